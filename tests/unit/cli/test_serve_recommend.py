"""``equipoise serve`` of a recommender as a program, and what it refuses."""

import json
import re
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
        _, said = server.communicate(timeout=60)
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
