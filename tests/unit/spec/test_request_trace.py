"""Traces of requests: three forms read alike, and each wrong row is refused by its line."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.errors import DataError, SpecError
from equipoise.sim.serve.request import read_trace
from equipoise.spec.request_trace import TracedRequest, read_request_trace
from support.verbs import run


def write(folder: Path, text: str) -> Path:
    file = folder / "trace"
    file.write_text(text)
    return file


def lines(*rows: dict[str, object]) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def test_our_own_form(tmp_path: Path) -> None:
    later = {"arrival_s": 2, "prompt_tokens": 9, "output_tokens": 0}
    full = {
        "arrival_s": 1.5,
        "tenant": "a",
        "prompt_tokens": 7,
        "output_tokens": 3,
        "most_tokens": 5,
        "prefix_group": "g",
        "prefix_tokens": 4,
    }
    assert read_request_trace(write(tmp_path, lines(later, full))) == (
        TracedRequest(1.5, "a", 7, 3, 5, "g", 4),
        TracedRequest(2.0, "", 9, 0, 0),
    )


def test_apex_and_azure_read_like_ours(tmp_path: Path) -> None:
    apex = lines(
        {"StartTimeOffset": 0, "ContextTokens": 374, "GeneratedTokens": 44},
        {"StartTimeOffset": 4_314_000_000, "ContextTokens": 396, "GeneratedTokens": 109},
    )
    expected = (TracedRequest(0.0, "", 374, 44, 44), TracedRequest(4.314, "", 396, 109, 109))
    assert read_request_trace(write(tmp_path, apex)) == expected
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
    )
    read = read_request_trace(write(tmp_path, azure))
    assert [each.prompt_tokens for each in read] == [374, 396]
    assert read[0].arrival_s == 0.0 and read[1].arrival_s == pytest.approx(4.314579, abs=1e-5)
    owned = azure.replace("Tokens\r\n", "Tokens,tenant\r\n").replace(",44\r\n", ",44,ann\r\n")
    owned = owned.replace(",109\r\n", ",109,bob\r\n")
    assert [each.tenant for each in read_request_trace(write(tmp_path, owned))] == ["ann", "bob"]


def test_a_name_may_hold_what_ends_lines_elsewhere(tmp_path: Path) -> None:
    row = {"arrival_s": 0, "tenant": "a\u2028b\x85", "prompt_tokens": 1, "output_tokens": 1}
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(row, ensure_ascii=False)}\r\n" * 2, newline="")
    assert [each.tenant for each in read_request_trace(file)] == ["a\u2028b\x85"] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            lines({"arrival_s": 0, "prompt_tokens": [5, 200_000], "output_tokens": 1}),
            ":1  prompt_tokens is a list of 2. A trace has numbers of tokens, and not the tokens, "
            "which need not be in the vocabulary of the model that serves them. Give "
            "prompt_tokens = 2.",
        ),
        (
            lines({"arrival_s": 0, "prompt_token_ids": [5, 7], "output_tokens": 1}),
            ":1  prompt_token_ids is a list of 2. A trace has numbers of tokens, and not the "
            "tokens, which need not be in the vocabulary of the model that serves them. Give "
            "prompt_tokens = 2.",
        ),
        (
            lines({"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}),
            ":1  prompt_tokens is 0. Give a whole number of 1 to 2,147,483,647.",
        ),
        (
            lines({"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}),
            ":1  arrival_s is -1. Give a number of 0 to 10,000,000,000.",
        ),
        (
            lines({"arrival_s": 1e12, "prompt_tokens": 1, "output_tokens": 1}),
            ":1  arrival_s is 1000000000000.0. Give a number of 0 to 10,000,000,000.",
        ),
        (
            '{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}',
            ":1  arrival_s is NaN. Give a number of 0 to 10,000,000,000.",
        ),
        (
            lines({"arrival_s": 0, "prompt_tokens": 1, "output_tokens": True}),
            ":1  output_tokens is true. Give a whole number of 0 to 2,147,483,647.",
        ),
        (
            "\n" + lines({"arrival_s": 0, "prompt_tokens": 1}),
            ":2  has no output_tokens.",
        ),
        (
            lines({"arrival_s": 0, "prompt_token": 1, "output_tokens": 1}),
            ":1  prompt_token: no such key. Nearest: prompt_tokens. All: arrival_s, tenant, "
            "prompt_tokens, output_tokens, most_tokens, prefix_group, prefix_tokens.",
        ),
        (
            lines({"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 3, "most_tokens": 2}),
            ":1  most_tokens is 2. Give a whole number of 3 to 2,147,483,647.",
        ),
        (
            lines({"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 3, "prefix_tokens": 2}),
            ":1  needs both prefix_group and prefix_tokens, or neither.",
        ),
        (
            lines(
                {
                    "arrival_s": 0,
                    "prompt_tokens": 4,
                    "output_tokens": 3,
                    "prefix_group": "g",
                    "prefix_tokens": 5,
                }
            ),
            ":1  prefix_tokens is 5, and the prompt has 4 tokens. Give at most those.",
        ),
        ('{"arrival_s": 0}\n', ":1  has no prompt_tokens."),
        ("x" * 200_000, ":1  is not CSV: field larger than field limit (131072)."),
        (
            '[{"arrival_s": 0}]\n',
            ':1  is [{"arrival_s": 0}]. Each line must be an object in braces.',
        ),
        ("{}\n[1]\n", ":2  is [1]. Each line must be an object in braces."),
        (
            "time,tokens\n1,2\n",
            ":1  has no column TIMESTAMP. A CSV trace needs TIMESTAMP, ContextTokens and "
            "GeneratedTokens; these are time, tokens.",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,2,2\n",
            ':2  TIMESTAMP is "noon". Give a date and time.',
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50,2,x\n",
            ':2  GeneratedTokens is "x". Give a whole number of 0 to 2,147,483,647.',
        ),
        (
            'TIMESTAMP,ContextTokens,GeneratedTokens,tenant\n2023-11-16 18:15:50,2,2,"ann\n'
            "2023-11-16 18:15:51,2,2,bob\n",
            ":2  is not CSV: a quote is not closed.",
        ),
        (
            'TIMESTAMP,ContextTokens,GeneratedTokens,tenant\n2023-11-16 18:15:50,2,2,"ann\n'
            '2023-11-16 18:15:51,2,2,"bob\n',
            ":2  is not CSV: a value goes on behind its closing quote.",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50,2,2,9\n",
            ":2  has 4 columns, and the first line 3.",
        ),
        (
            "TIMESTAMP,ContextTokens, ContextTokens,GeneratedTokens\n2023-11-16 18:15:50,2,9,2\n",
            ":1  has column ContextTokens twice. Give it once.",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 3, "prompt_tokens": 9}',
            ':1  an object in it has "prompt_tokens" twice; give it once.',
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens,tenant\n2023-11-16 18:15:50,2,2\n",
            ":2  tenant is null. Give a name.",
        ),
        (
            lines(
                {"StartTimeOffset": 0, "ContextTokens": 4, "GeneratedTokens": 1},
                {"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 3},
            ),
            ":2  is of another form than line 1, which has StartTimeOffset. Give one form a file.",
        ),
        (
            "",
            " holds no requests. Give JSON lines with arrival_s, prompt_tokens and output_tokens, "
            "or a CSV file with TIMESTAMP, ContextTokens and GeneratedTokens.",
        ),
    ],
)
def test_a_wrong_row_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(DataError) as refusal:
        read_request_trace(file)
    assert str(refusal.value) == f"{file}{message}"


def test_lines_of_json_are_told_by_their_name_too(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("null\n")
    with pytest.raises(DataError) as refusal:
        read_request_trace(file)
    assert str(refusal.value) == f"{file}:1  is null. Each line must be an object in braces."


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt_tokens": [5, 200_000, 130_000], "output_tokens": 1},
            "prompt_tokens has token 200000, and the model's vocabulary has 128,256, counted from "
            "0. Split the text with the model's own tokenizer, and give the number of its tokens; "
            "prompt_tokens = 3 is that of the other one.",
        ),
        (
            {"prompt_tokens": 4, "output_tokens": [-1, 7]},
            "output_tokens has token -1, and the model's vocabulary has 128,256, counted from 0. "
            "Split the text with the model's own tokenizer, and give the number of its tokens; "
            "output_tokens = 2 is that of the other one.",
        ),
        (
            {"prompt_token_ids": [128_256], "output_tokens": 1},
            "prompt_token_ids has token 128256, and the model's vocabulary has 128,256, counted "
            "from 0. Split the text with the model's own tokenizer, and give the number of its "
            "tokens; prompt_tokens = 1 is that of the other one.",
        ),
        (
            {"prompt_tokens": [5, 128_255], "output_tokens": 1},
            "prompt_tokens is a list of 2. A trace has numbers of tokens, and not the tokens, "
            "which need not be in the vocabulary of the model that serves them. Give "
            "prompt_tokens = 2.",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_tokens_of_another_vocabulary_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    row: dict[str, object],
    message: str,
) -> None:
    file = write(tmp_path, lines({"arrival_s": 0} | row))
    layout = ["--layout", "tp=8"] if verb == "simulate" else []
    step = ["--requests", file, "--model", "llama3-8b", "--cluster", "h100-sxm:8", *layout]
    assert run(capsys, verb, *step) == (2, "", f"{file}:1  {message}\n")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        read_request_trace(tmp_path / "nope")
    assert str(refusal.value) == f"No such file: {tmp_path / 'nope'}"
    file = tmp_path / "bytes"
    file.write_bytes(b"{\xff}")
    with pytest.raises(DataError) as refusal:
        read_request_trace(file)
    assert str(refusal.value) == f"{file} holds no requests: it is not UTF-8 text: line 1."


def test_a_date_without_a_zone_never_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text += "2023-10-29 02:30:00,1,1\n2023-10-29 03:30:00,1,1\n"
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")  # an hour comes twice in that night
        time.tzset()
        read = read_request_trace(write(tmp_path, text))
    time.tzset()
    assert [each.arrival_s for each in read] == [0.0, 3600.0]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            (math.nan, "", 1, 1, 1),
            "A request arrives at nan s. Give a time of 0 to 10,000,000,000.",
        ),
        ((-1.0, "", 1, 1, 1), "A request arrives at -1 s. Give a time of 0 to 10,000,000,000."),
        (
            (0.0, "", 0, 1, 1),
            "A request has prompt_tokens = 0. Give a whole number of 1 to 2,147,483,647.",
        ),
        (
            (0.0, "", 1, -1, 1),
            "A request has output_tokens = -1. Give a whole number of 0 to 2,147,483,647.",
        ),
        (
            (0.0, "", 4, 1, 1, "g", 5),
            "A request has prefix_tokens = 5. Give a whole number of 0 to 4.",
        ),
        (
            (0.0, "", 4.5, 1, 1),
            "A request has prompt_tokens = 4.5. Give a whole number of 1 to 2,147,483,647.",
        ),
        (
            (0.0, "", 4, 1, 1, "", 3),
            "A request needs both prefix_group and prefix_tokens, or neither.",
        ),
    ],
)
def test_requests_that_no_file_could_hold_are_refused(request_: Any, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_trace([TracedRequest(*request_)], {}, "llama3-8b")
    assert str(refused.value) == message
