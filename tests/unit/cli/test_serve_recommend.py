"""``equipoise serve`` of a recommender as a program, what it refuses, and what inspect says."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.recsys.rank.ranker import open_ranker
from support.recsys.runs import trained_run
from support.serving.http.raw import ask
from support.verbs import run

BODY = {
    "context": {"user": "u1", "price": 0.5},
    "candidates": {"ad": ["a1", "a2", "new"], "words": [["w1"], "w2 w3", []]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("ranked"))


@pytest.mark.long
def test_a_recommender_answers_until_it_is_told_to_stop(folder: Path) -> None:
    command = [sys.executable, "-m", "equipoise.cli.main", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        ready = server.stdout.readline()
        port = int(re.search(r"127\.0\.0\.1:(\d+)/v1", ready)[1])  # type: ignore[index]
        reply = ask(port, "POST", "/v1/rank", json.dumps(BODY).encode())
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=240)
    ranker = open_ranker(folder)
    assert ready == (
        f"Ranking with clicks on http://127.0.0.1:{port}/v1/rank (step {ranker.step}, 3 tables, "
        f"{ranker.scorer.held_bytes:,} bytes of fp32; ready in {ready.partition('ready in ')[2]}"
    )
    (logits,) = ranker.score([ranker.code(BODY["context"], BODY["candidates"])])
    results = json.loads(reply.body)["results"]
    assert {each["index"]: each["logit"] for each in results} == dict(enumerate(logits))
    assert server.returncode == 0
    assert re.fullmatch(
        r"POST /v1/rank 200 default \d+\.\d{3}s req-[0-9a-f]{32}\n"
        r"Requests: 1, candidates: 3, passes: 1; P50 \d+\.\d ms, P99 \d+\.\d ms\.\n",
        said,
    )


def test_what_is_for_texts_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in {
        ("--kv-tokens", "64"): "--kv-tokens is not for a recommender. Leave it out.\n",
        ("--layout.context", "2"): "--layout.context is not for a recommender. Leave it out.\n",
        ("--invariant",): "--invariant is not for a recommender. Leave it out.\n",
        ("--host", "0.0.0.0"): (
            "--host 0.0.0.0 opens the server to other machines, and a recommender has no keys. "
            "Serve on 127.0.0.1, behind a proxy that knows its users.\n"
        ),
    }.items():
        assert run(capsys, "serve", str(folder), *flags) == (2, "", words)


def test_inspect_says_what_a_recommender_and_its_checkpoints_hold(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "run"
    shutil.copytree(folder, own)
    newest = own / "checkpoint" / "step-000024"
    code, out, _ = run(capsys, "inspect", str(own), "--json")
    facts = json.loads(out)
    assert (code, facts["kind"], facts["name"]) == (0, "recommender", "clicks")
    assert facts["columns"] == "user, ad, words, price" and facts["ranks"] == 1
    assert facts["record"] == "no rank has ended yet"
    assert [(each["step"], each["state"]) for each in facts["checkpoints"]] == [
        (24, "ok"),
        (20, "ok"),
    ]
    one = json.loads(run(capsys, "inspect", str(newest), "--json")[1])
    assert one == facts["checkpoints"][0]
    assert one["tables"] == {"user": "31 x 4", "ad": "13 x 4", "words": "10 x 4"}
    assert (one["architecture"], one["seed"], one["files"]) == ("dlrm", 0, 2)
    (newest / "dense.pt").unlink()
    (own / "recommend.json").write_text('{"step": 24, "best": {"test_auc": 0.75, "epoch": 2}}')
    code, out, _ = run(capsys, "inspect", str(own), "--json")
    facts = json.loads(out)
    assert (code, facts["steps"], facts["test_auc"], facts["record"]) == (4, 24, 0.75, "ok")
    torn = f"{newest / 'dense.pt'} cannot be read: no such file or directory."
    assert [each["state"] for each in facts["checkpoints"]] == [torn, "ok"]
    (newest / "recommend.json").unlink()
    assert run(capsys, "inspect", str(newest), "--quiet")[:2] == (4, "checkpoint\n")
    (own / "recommend.json").write_text("[]")
    facts = json.loads(run(capsys, "inspect", str(own), "--json")[1])
    assert facts["record"] == (
        f"{own / 'recommend.json'} cannot be read: it does not hold a JSON object. Delete it, and "
        "run the same `equipoise train` again, which writes it from the newest checkpoint."
    )
