"""A rank is killed while it computes: its requests end with 503, and the server goes on."""

import json
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

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
ANSWERS = 4


def asked(port: int, number: int, tokens: int, *, stream: bool = False) -> Reply:
    body = {
        "prompt": f"a world of {number} words",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    return ask(port, "POST", "/v1/completions", json.dumps(body).encode())


def text_of(reply: Reply) -> str:
    text: str = json.loads(reply.body)["choices"][0]["text"]
    return text


def test_requests_of_a_killed_rank_get_503_and_the_next_ones_their_answers() -> None:
    settings = EngineSettings(cache_tokens=2560, context_ranks=2, most_sequences=ANSWERS)
    with open_engine(trained(), settings, curve=CURVE) as engine:
        engine.prompts = prompt_reader()
        ranks = engine._decoder
        assert isinstance(ranks, ContextDecoder)
        state = ServerState(serve_model(Path("small"), trained(), engine), open_tenants())
        with ServerThread(make_app(state), state) as server, ThreadPoolExecutor(9) as pool:
            port = server.port
            wanted = [text_of(asked(port, number, 150)) for number in range(ANSWERS + 4)]
            (victim,) = ranks.peers.pids
            may_begin, may_run, run = threading.Event(), threading.Event(), ranks.run
            iterations = list[int]()

            def held(*given: object) -> object:
                """From when all have asked until all have tokens on both ranks; the rest after
                the kill."""
                assert may_begin.wait(LONGEST_S)
                iterations.append(len(given[0]))  # type: ignore[arg-type]
                if len(iterations) > 20 and iterations[-1] == ANSWERS:
                    assert may_run.wait(LONGEST_S)
                return run(*given)  # type: ignore[arg-type]

            ranks.run = held  # type: ignore[assignment,method-assign]
            replies: list[Future[Reply]] = [
                pool.submit(asked, port, number, 150, stream=number == 0)
                for number in range(ANSWERS)
            ]
            end_s = time.monotonic() + LONGEST_S
            while engine.stats().running + engine.stats().waiting < ANSWERS:
                assert time.monotonic() < end_s
                time.sleep(0.001)
            may_begin.set()
            while not (len(iterations) > 20 and iterations[-1] == ANSWERS):
                assert time.monotonic() < end_s
                time.sleep(0.001)
            waiting = [pool.submit(asked, port, ANSWERS + at, 150) for at in range(4)]
            while engine.stats().waiting < 4:
                assert time.monotonic() < end_s
                time.sleep(0.001)
            os.kill(victim, signal.SIGKILL)
            may_run.set()
            streamed, *whole = [each.result(LONGEST_S) for each in replies]
            later = [each.result(LONGEST_S) for each in waiting]
            again = [asked(port, number, 150) for number in range(ANSWERS)]
            page = ask(port, "GET", "/health")
    error = {
        "message": "Rank 1 of 2 was lost: SIGKILL ended it. Ask again.",
        "type": "overloaded_error",
        "param": None,
        "code": "overloaded",
    }
    for reply in whole:
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert json.loads(reply.body)["error"] == error
    events = streamed.body.decode().split("\n\n")
    assert streamed.status == 200, "its head was sent before the rank died"
    assert json.loads(events[-2].removeprefix("data: "))["error"] == error
    assert "[DONE]" not in streamed.body.decode()
    assert [text_of(reply) for reply in later] == wanted[ANSWERS:]
    assert [text_of(reply) for reply in again] == wanted[:ANSWERS]
    assert page.status == 200
    assert victim not in ranks.peers.pids
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
