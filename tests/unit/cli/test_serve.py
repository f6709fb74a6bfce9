"""``equipoise serve`` as a program: ready, answers, drains; and what it refuses."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.serve.http.keys import hash_key
from equipoise.spec.model.presets import ModelSpec
from support.chat.corpus import write_model
from support.serving.http.raw import ask
from support.verbs import run

MODEL = ModelSpec(layers=1, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=270, head_width=8)
PHASES = (
    r"Loaded Python's libraries: \d+\.\d s\nRead small: \d+\.\d s\n",
    r"Read the tokenizer: \d+\.\d s\nLaid the weights out: \d+\.\d s\n"
    r"(Compiled kernels, once for this installation: \d+\.\d s\n)?"
    r"Estimated what iterations take; it is measured between requests: \d+\.\d s\n",
)
"""What a start says it waits for: before a model's engine is built, and while it is."""
HELLO = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "small"
    write_model(folder, MODEL)
    return folder


@pytest.mark.long
def test_a_server_answers_until_it_is_told_to_stop(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "equipoise.cli.main", "serve", str(folder), "--port", "0",
               "--kv-tokens", "1024"]  # fmt: skip
    home = {**os.environ, "HOME": str(tmp_path)}  # nothing was measured there
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=home
    ) as server:
        assert server.stdout is not None
        ready = server.stdout.readline()
        port = int(re.search(r"127\.0\.0\.1:(\d+)/v1", ready)[1])  # type: ignore[index]
        reply = ask(port, "POST", "/v1/chat/completions", HELLO)
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=240)
    assert ready == (
        f"Serving small on http://127.0.0.1:{port}/v1 (fp32 on cpu, context 1,024 tokens, cache "
        f"1,024; ready in {ready.partition('ready in ')[2]}"
    )
    assert reply.status == 200
    assert json.loads(reply.body)["usage"]["completion_tokens"] <= 3
    assert server.returncode == 0
    assert re.fullmatch(
        "".join(PHASES) + r"POST /v1/chat/completions 200 default \d+\.\d{3}s req-[0-9a-f]{32}\n",
        said,
    )


def test_a_key_is_shown_once_and_kept_as_a_digest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "serve", "--new-key", "team.a", "--json")
    said = json.loads(out)
    assert code == 0
    assert said["tenant"] == "team.a"
    assert said["hash"] == hash_key(said["key"])
    _, shown, _ = run(capsys, "serve", "--new-key", "team.a")
    key, kept = re.search(r"(eq-\S+)[\s\S]*(sha256:\w+)", shown).groups()  # type: ignore[union-attr]
    assert hash_key(key) == kept
    assert '[tenants."team.a"]' in shown


def test_what_cannot_be_served_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = {
            (str(folder), "--port", str(port)): (
                f"Cannot listen on 127.0.0.1:{port}: address already in use. Give another --port "
                "(0 takes any free one) or --host.",
                2,
            ),
            (str(folder), "--port", "70000"): (
                "--port must be from 0 to 65535; it is 70000.",
                2,
            ),
            (str(folder), "--host", "0.0.0.0"): (
                "--host 0.0.0.0 opens the server to other machines, and without --tenants anybody "
                "may use it. Give a tenants file (equipoise serve --new-key NAME), or --host "
                "127.0.0.1.",
                2,
            ),
            (str(tmp_path / "absent"), "--port", "0"): (
                f"No such file or folder: {tmp_path / 'absent'}. Give a run, a checkpoint, a "
                "Hugging Face folder, or a .gguf file.",
                2,
            ),
            (str(folder), "--port", "0", "--kv-tokens", "15"): (
                "The cache has 15 tokens, and one page has 16. Give it more.",
                2,
            ),
            (str(folder), "--port", "0", "--policy", "uwqf"): (
                'No policy of fairness is called "uwqf". Nearest: uwfq. All: fifo, job-fair, '
                "user-fair, vtc, uwfq.",
                2,
            ),
            (str(folder), "--layout.context", "0"): (
                "--layout.context 0 is below 1. Give 1 or more.",
                2,
            ),
            (str(folder), "--kv-tokens", "0"): (
                "--kv-tokens 0 is below 1. Give at least one page.",
                2,
            ),
            (str(folder), "--tenants", str(tmp_path / "absent")): (
                f"No such file: {tmp_path / 'absent'}. Give a TOML file of tenants.",
                2,
            ),
            ("--new-key", "a b"): (
                '"a b" is not a tenant\'s name. Use letters, digits, ".", "_" and "-", at most 63 '
                "of them, and begin with a letter or a digit.",
                2,
            ),
        }
        for words, (sentence, code) in refused.items():
            refusal, out, err = run(capsys, "serve", *words)
            said = re.sub(r"(?m)^(Loaded|Read|Laid|Compiled) .*: \d+\.\d s\n", "", err)
            assert (refusal, out, said) == (code, "", f"{sentence}\n")
