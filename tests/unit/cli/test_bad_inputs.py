"""Inputs that nobody means, through the real command line: one sentence, the documented code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.write import write_hf
from equipoise.spec.model.presets import ModelSpec
from support.chat.template import tokenizer_files
from support.verbs import run

DEEP = "brackets are nested more than 64 deep"
LONG = "a whole number has more digits than 64 bits hold"

BAD_RUNS = {
    "nested brackets": ("a = " + "[" * 100_000, f"run.toml cannot be read: {DEEP}."),
    "nested tables": ("a" + ".a" * 100 + " = 1", f"run.toml cannot be read: {DEEP}."),
    "5,000 digits": ("[train]\nsteps = " + "9" * 5000, f"run.toml cannot be read: {LONG}."),
    "5,000 digits of hex": (
        "[train]\nsteps = 0x" + "f" * 5000,
        f"run.toml cannot be read: {LONG}.",
    ),
    "NUL in extends": (
        'extends = "a\\u0000b"',
        'run.toml:1  extends: cannot read "a\\u0000b": the name has a character that no file name '
        "can have.",
    ),
    "NUL in a path": (
        '[data]\npath = "a\\u0000b"',
        'run.toml:2  data.path: "a\\u0000b" has a NUL character, which no text here can hold.',
    ),
    "10^9 layers": (
        "[model]\nlayers = 1000000000",
        "run.toml:2  model.layers: 1000000000 is too large; it must be at most 4096.",
    ),
    "10^9 experts": (
        "[model]\nexperts = 1000000000",
        "run.toml:2  model.experts: 1000000000 is too large; it must be at most 65536.",
    ),
    "a window beyond 31 bits": (
        "[pack]\ncontext_tokens = 3000000000",
        "run.toml:2  pack.context_tokens: 3000000000 is too large; it must be at most 2147483647.",
    ),
    "a long value": (
        f'[pack]\npolicy = "{"x" * 5000}"',
        f'run.toml:2  pack.policy: "{"x" * 23}...{"x" * 23}" (5,002 characters) is not one of ',
    ),
    "binary": ("\x00\x01\x02", "run.toml:1  not TOML: Invalid statement (column 1)."),
}


@pytest.mark.parametrize("verb", ["pack", "plan"])
def test_a_corpus_of_more_tokens_than_the_vocabulary(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(tokenizer_files(tmp_path / "theirs")["tokenizer.json"])
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("system user assistant")
    (tmp_path / "run.toml").write_text(
        "[model]\nvocab = 128\n"
        '[data]\nsource = "text"\npath = "corpus"\ntokenizer = "tokenizer.json"\ncache = "cache"\n'
    )
    code, out, err = run(capsys, verb, tmp_path / "run.toml", "--quiet")
    (made,) = (tmp_path / "cache").glob("tokens-*")
    assert (code, out, err) == (
        2,
        "",
        f"The tokenizer {made}/tokenizer.json has 270 tokens, but the model has only 128. Set "
        "model.vocab = 320, or use the model's own tokenizer.\n",
    )


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_run_that_nobody_means(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BAD_RUNS[case]
    file = tmp_path / "run.toml"
    file.write_text(text)
    code, out, err = run(capsys, "config", file)
    assert (code, out) == (2, "")
    if case == "a long value":
        assert err.startswith(message)
        assert len(err) < 500
    else:
        assert err == f"{message}\n"


BAD_FLAGS = {
    ("--",): 'equipoise: "--" is one argument too many. See "equipoise --help".',
    ("train", "--out", ""): (
        'equipoise train: --out: "" is not a folder. See "equipoise train --help".'
    ),
    ("config", "--train.steps=" + "9" * 5000): (
        f"--train.steps: {'9' * 24}...{'9' * 24} (5,000 characters) is too large; 64 bits do not "
        "hold it."
    ),
    ("config", "--model.layers=1000000000"): (
        "--model.layers: 1000000000 is too large; it must be at most 4096."
    ),
    ("config", "--layout.tp=10000000000"): (
        "--layout.tp: 10000000000 is too large; it must be at most 2147483647."
    ),
    ("pack", "--ranks", "9" * 5000): (
        f'equipoise pack: --ranks: needs a whole number, got "{"9" * 23}...{"9" * 23}" '
        '(5,002 characters). See "equipoise pack --help".'
    ),
    ("config", "--train.steps=18446744073709551616"): (
        "--train.steps: 18446744073709551616 is too large; 64 bits do not hold it."
    ),
    ("config", "--json=1"): (
        'equipoise config: --json: takes no value, but got "1". See "equipoise config --help".'
    ),
    ("config", "run.toml", "--", "--json"): (
        'equipoise config: "--json" is one argument too many. See "equipoise config --help".'
    ),
    ("check", "--in-process", "--ranks", "99999999999999999999"): (
        "--ranks 99,999,999,999,999,999,999 is more than 1,024. Give 1,024 or less."
    ),
    ("generate", "nowhere", "a", "--tokens", "9223372036854775808"): (
        "--tokens 9,223,372,036,854,775,808 is more than 1,048,576. Give 1,048,576 or less."
    ),
    (
        "pack",
        "--context-tokens",
        "-1",
        "--micro-batches",
        "2",
    ): "--pack.context_tokens: -1 is too small; it must be at least 2.",
    (
        "pack",
        "--ranks",
        "1000000000",
    ): "--ranks 1,000,000,000 is more than 1,024. Give 1,024 or less.",
    ("pack", "--steps", "1000000000"): (
        "--steps 1,000,000,000 is more than 10,000. Give 10,000 or less."
    ),
    ("explain", "attention", "--ranks", "1000000000"): (
        "--ranks 1,000,000,000 is more than 1,024. Give 1,024 or less."
    ),
    ("doctor", "--ranks", "1000000000"): (
        "--ranks 1,000,000,000 is more than 1,024 processes of one machine. Give 1,024 or less."
    ),
    ("inspect", "a\0b"): (
        'equipoise: the argument "a\\u0000b" has a character that no file name can have. Type it '
        "again."
    ),
    ("init", "--from=--"): (
        'equipoise init: --from: "--" is not a value. See "equipoise init --help".'
    ),
    ("explain", "attention", "--plot="): (
        '--plot .: a picture\'s name ends in .png, .svg or .pdf, not "". Try picture.png.'
    ),
    ("explain", "tables", "synthetic:" + "9" * 5000): (
        f'"synthetic:{"9" * 13}...{"9" * 22}": (5,013 characters) synthetic needs a count from 1 '
        "to 100,000, as in synthetic:1000."
    ),
    ("explain", "boxing", "S(0) -> B", "--mesh", "9" * 5000): (
        f'--mesh: "{"9" * 23}...{"9" * 23}" (5,002 characters) is not sizes with x between them, '
        "as in 2x4."
    ),
    ("explain", "boxing", f"S({'9' * 5000}) -> B"): (
        f'"S({"9" * 21}...{"9" * 22})" (5,005 characters) is not a placement. Give S(dim), '
        "S(dim: 3+1) with the share of each rank, B, P or P(max), one for each mesh axis, as in "
        "S(0), B."
    ),
    ("explain", "attention", "--mask", "window:\u00b2"): (
        '--mask: "window:\u00b2" is not causal, full, or a window as in window:4096.'
    ),
    ("dash", "--port", "9" * 5000): (
        f'equipoise dash: --port: "{"9" * 23}...{"9" * 23}" (5,002 characters) is not a port: 0 to '
        '65,535. See "equipoise dash --help".'
    ),
    ("serve", "nowhere", "--layout.context", "5000"): (
        "--layout.context 5,000 is more than 64 processes of one machine. Give 64 or less."
    ),
    ("launch", "--cluster=" + "x" * 5000): None,
    ("config", "--model.preset=" + "x" * 5000): None,
    ("config", "--data.path=" + "x" * 5000): None,
}


@pytest.mark.parametrize("argv", BAD_FLAGS, ids=lambda argv: " ".join(argv)[:40])
def test_a_flag_that_nobody_means(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert len(err) < 1000
    if (message := BAD_FLAGS[argv]) is not None:
        assert err == f"{message}\n"


BAD_JSON = {
    "deep": ("[" * 100_000, DEEP),
    "long": ("9" * 5000, LONG),
    "none": ("", "it is not JSON at line 1, column 1: expecting value"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_json_that_nobody_means(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, reason = BAD_JSON[case]
    for name in ("config.json", "plan.lock", "device.json", "resolved.json"):
        (tmp_path / name).write_text(text)
    file = tmp_path / "config.json"
    asked = ["--cluster", "h100-sxm:8", "--layout", "dp=8"]
    asked += ["--context-tokens", "4096", "--step-sequences", "8"]
    assert run(capsys, "simulate", "--model", file, *asked)[::2] == (
        2,
        f"model: {file} cannot be read as a config.json ({reason}). Give the file that the "
        "model was published with.\n",
    )
    file = tmp_path / "plan.lock"
    assert run(capsys, "explain", "plan", file)[::2] == (
        4,
        f"{file} cannot be read as a plan.lock ({reason}). Write one: "
        f'"equipoise plan --out {tmp_path}".\n',
    )
    assert run(capsys, "launch", tmp_path)[::2] == (
        2,
        f"{tmp_path} holds no readable resolved.json: it is not the folder of a run of this "
        "version. Start it with `equipoise train run.toml`.\n",
    )
    file = tmp_path / "device.json"
    assert run(capsys, "calibrate", "--compare", tmp_path, "--out", file)[::2] == (
        2,
        f'{file} is not a device file: it is not JSON. Measure again: "equipoise calibrate".\n',
    )
    journal = tmp_path / "run" / "journal"
    journal.mkdir(parents=True)
    (journal / "rank-00000.jsonl").write_text(text)
    code, _, err = run(capsys, "report", tmp_path / "run")
    assert code == 2
    assert err.startswith(f"{tmp_path}/run has a journal ")


def test_a_pipe_that_nobody_writes_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = "it is a pipe, a socket or a device, not a file"
    assert run(capsys, "config", pipe)[::2] == (2, f"Cannot read {pipe}: {words}.\n")
    assert run(capsys, "pack", "--lengths", pipe)[::2] == (
        2,
        f"{pipe} cannot be read as text ({words}). Give CSV, JSON lines, Parquet, or one whole "
        "number per line.\n",
    )


def test_a_pipe_that_nobody_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "packs.jsonl"
    os.mkfifo(pipe)
    assert run(capsys, "pack", "--lengths", "wikipedia", "--micro-batches", "2", "--out", pipe) == (
        2,
        "",
        f"--out {pipe} is a pipe, which may have no reader. Give a file.\n",
    )


def test_columns_that_no_terminal_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("9" * 5000, "\u00b2", "x", "-5", ""):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, err = run(capsys, "systems", "1")
        assert (code, err) == (0, ""), columns
        assert out


def test_a_host_with_a_line_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = tmp_path / "run"
    flags = ("--train.steps=20", "--layout.dp=16", f"--data.cache={tmp_path}", "--out", prepared)
    host = "a\ntouch pwned"
    code, _, err = run(capsys, "launch", *flags, "--cluster", "h100-sxm:16", "--host", host)
    assert code == 2
    assert "pwned" not in err.replace(json.dumps(host), "")


def under(limit: str, *argv: object, cwd: Path) -> tuple[int, str]:
    words = [sys.executable, "-m", "equipoise.cli.main", *map(str, argv)]
    done = subprocess.run(
        ["bash", "-c", f'{limit}; exec "$@"', "bash", *words],
        capture_output=True, text=True, check=False, cwd=cwd,
    )  # fmt: skip
    return done.returncode, done.stderr


# Each starts an interpreter, which nothing in this process can have its limits lowered for.
def test_the_limits_of_the_shell(tmp_path: Path) -> None:
    assert under("ulimit -n 20", "train", "--layout.dp=2", cwd=tmp_path) == (
        2,
        '2 ranks need 40 file descriptors, but this shell allows 20. Raise the limit: "ulimit -n '
        '40", or start fewer ranks.\n',
    )
    assert under("ulimit -v 1000000", "train", "--layout.dp=2", cwd=tmp_path) == (
        2,
        "A rank needs 1.5 GiB of address space for torch alone, but this shell allows 1.0 GiB. "
        'Raise the limit: "ulimit -v unlimited".\n',
    )


def test_a_run_toml_that_is_not_written_whole_does_not_stay(tmp_path: Path) -> None:
    assert under("ulimit -f 1; trap '' XFSZ", "init", "new", cwd=tmp_path) == (
        2,
        "Cannot write new/run.toml: file too large. Give a folder that you may write to: equipoise "
        "init DIR.\n",
    )
    assert not (tmp_path / "new" / "run.toml").exists()


def test_the_folder_in_which_it_runs_is_gone(tmp_path: Path) -> None:
    assert under("mkdir a; cd a; rmdir ../a", "init", "new", cwd=tmp_path) == (
        1,
        "The folder in which this runs has been deleted. Change to one that exists.\n",
    )


_EXHAUST = """
import os, sys
from equipoise.cli import report
from equipoise.cli.main import main
from equipoise.dash import report as page
from equipoise.observe import reader
try:
    while True:
        os.open(os.devnull, os.O_RDONLY)
except OSError:
    sys.exit(main(["report", sys.argv[1]]))
"""


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "rank-00000.jsonl").write_text("{}\n")
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 60; exec "$@"', "bash", sys.executable, "-c", _EXHAUST, tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        1,
        'Too many open files: this process may hold 60. Raise the limit: "ulimit -n 65536".\n',
    )


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_bytes(b"3\n" * 40_000_000)
    code, err = under("ulimit -v 400000", "pack", "--lengths", lengths, "--quiet", cwd=tmp_path)
    assert code == 1, err
    assert err.endswith('Free some, choose a smaller size, or raise "ulimit -v".\n'), err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer."""
    root = tmp_path_factory.mktemp("model")
    spec = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=320, head_width=16)
    decoder = Decoder(spec)
    initialize(decoder, 0)
    write_hf(root / "hf", spec, decoder.state_dict(), files=tokenizer_files(root / "tokenizer"))
    return root / "hf"


def test_a_folder_with_a_model_is_no_place_for_a_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "hf")
    before = {file.name: file.read_bytes() for file in (tmp_path / "hf").iterdir()}
    assert run(capsys, "train", "--prepare", "--out", tmp_path) == (
        2,
        "",
        f"{tmp_path}/hf is not of a run, which would replace it by its own files. Choose another "
        "folder with --out.\n",
    )
    assert {file.name: file.read_bytes() for file in (tmp_path / "hf").iterdir()} == before


DAMAGED = {
    "a mark of byte order": ("config.json", lambda data: b"\xef\xbb\xbf" + data, None),
    "an empty file": (
        "generation_config.json",
        lambda _: b"",
        "hf/generation_config.json cannot be read: it is not JSON at line 1, column 1: expecting "
        "value. Correct it, or remove it.",
    ),
    "a list": (
        "tokenizer_config.json",
        lambda _: b"[]",
        "hf/tokenizer_config.json does not hold a JSON object. Correct it, or remove it.",
    ),
    "templates of another form": (
        "tokenizer_config.json",
        lambda _: b'{"chat_template": ["a", 3], "additional_special_tokens": 3}',
        None,
    ),
    "UTF-16": (
        "config.json",
        lambda data: data.decode().encode("utf-16"),
        "hf/config.json cannot be read: it is not UTF-8 text: line 1.",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_model_is_named_by_the_file_that_is_damaged(
    case: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "hf")
    name, damage, message = DAMAGED[case]
    file = Path("hf", name)
    file.write_bytes(damage(file.read_bytes()))
    code, _, err = run(capsys, "inspect", "hf")
    assert (code, err) == ((0, "") if message is None else (2, f"{message}\n"))


def test_weights_that_are_a_pipe(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "hf" / "model.safetensors")
    code, out, _ = run(capsys, "inspect", tmp_path / "hf", "--json")
    assert (code, json.loads(out)["state"]) == (
        0,
        "model.safetensors cannot be read (it is a pipe, a socket or a device, not a file)",
    )


def test_a_loop_of_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for words in (("train", "--prepare", "--out", loop), ("report", loop), ("inspect", loop)):
        code, _, err = run(capsys, *words)
        assert (code, str(loop) in err, err.count("\n")) == (2, True, 1), err
    code, _, err = run(capsys, "doctor", "--folder", loop)
    assert code in (0, 5)
    assert err == ""


def test_packs_are_not_written_over_their_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 3\n")
    assert run(capsys, "pack", file, "--out", tmp_path / "." / "run.toml")[::2] == (
        2,
        f"--out {file} is the run.toml that is read. Give another file.\n",
    )
    assert file.read_text() == "[train]\nsteps = 3\n"


def test_rows_with_many_long_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {f"{'k' * 100}{number}": number for number in range(3000)}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    data = [f"--data.path={tmp_path}/a.jsonl", "--data.source=jsonl", f"--data.cache={tmp_path}"]
    code, _, err = run(capsys, "pack", *data, "--json")
    key = f"{'k' * 24}...{'k' * 23}0 (101 characters)"
    assert code == 2
    assert err.startswith(f'{tmp_path}/a.jsonl:1 has no field "text" among its 3000 ({key}, ')
    assert err.endswith(
        f' and 2,988 more). Nearest: "{key}". Set data.field to the field that holds the text.\n'
    )


def test_a_file_is_no_folder_for_a_run_toml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert run(capsys, "init", tmp_path / "notes.txt") == (
        2,
        "",
        f"{tmp_path}/notes.txt is not a folder. Give another: equipoise init DIR.\n",
    )
