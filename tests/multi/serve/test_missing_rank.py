"""A server whose rank was killed says so to whoever asks for its health, until the rank is back."""

import json
import os
import signal
import threading
import time
from pathlib import Path

from equipoise.observe.prometheus import parse_metrics
from equipoise.serve.engine.build import EngineSettings, open_engine
from equipoise.serve.http.app import make_app
from equipoise.serve.http.served import serve_model
from equipoise.serve.http.server import ServerThread
from equipoise.serve.http.server_state import ServerState
from equipoise.serve.http.tenants import open_tenants
from equipoise.serve.longctx.decoder import ContextDecoder
from support.serving.http.raw import Reply, ask
from support.serving.http.served import prompt_reader
from support.serving.trained import CURVE, trained

LONGEST_S = 120.0


def asked(port: int) -> Reply:
    body = {"prompt": "a world of words", "max_tokens": 4, "temperature": 0}
    return ask(port, "POST", "/v1/completions", json.dumps(body).encode())


def wait_for_health(port: int, status: int) -> Reply:
    end_s = time.monotonic() + LONGEST_S
    while (answer := ask(port, "GET", "/health")).status != status:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return answer


def named_semaphores(pid: int) -> list[str]:
    """Those that a process has and that outlive it if it is killed."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm/sem." in line and not line.endswith("(deleted)")]


def test_a_rank_killed_while_nothing_is_computed_is_missing_until_it_is_back() -> None:
    settings = EngineSettings(cache_tokens=640, context_ranks=2)
    with open_engine(trained(), settings, curve=CURVE) as engine:
        engine.prompts = prompt_reader()
        ranks, may_start = engine._decoder, threading.Event()
        assert isinstance(ranks, ContextDecoder)
        restore = ranks.restore

        def restore_later() -> None:
            """For as long as it takes to see what clients are told meanwhile."""
            assert may_start.wait(LONGEST_S)
            restore()

        ranks.restore = restore_later  # type: ignore[method-assign]
        state = ServerState(serve_model(Path("small"), trained(), engine), open_tenants())
        with ServerThread(make_app(state), state) as server:
            port = server.port
            first = asked(port)
            assert (first.status, ask(port, "GET", "/health").status) == (200, 200)
            (victim,) = ranks.peers.pids
            assert not named_semaphores(victim)
            assert os.getpgid(victim) != os.getpgid(0), "a signal to the group lets it drain"
            os.kill(victim, signal.SIGKILL)
            told = [wait_for_health(port, 503), ask(port, "GET", "/ready"), asked(port)]
            for answer in told:
                assert (answer.status, answer.headers["retry-after"]) == (503, "5")
                assert json.loads(answer.body)["error"] == {
                    "message": "Rank 1 of 2 was lost. Ask again.",
                    "type": "overloaded_error",
                    "param": None,
                    "code": "overloaded",
                }
            page = ask(port, "GET", "/metrics").body.decode()
            may_start.set()
            wait_for_health(port, 200)  # nobody asks for anything that would need the rank
            again = asked(port)
    refused = parse_metrics(page)["equipoise_admission_rejections_total"]
    assert [n for labels, n in refused.items() if ("reason", "engine") in labels] == [1]
    assert again.status == 200
    assert json.loads(again.body)["choices"] == json.loads(first.body)["choices"]
    assert victim not in ranks.peers.pids
