"""Ranking over HTTP: scores to the bit, faults in OpenAI's shape, counts and quantiles."""

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from equipoise.recsys.rank.coding import Coded
from equipoise.serve.http.body import SHORT_BYTES
from equipoise.serve.http.server import ServerThread
from equipoise.serve.ranking.app import RankState, make_rank_app
from equipoise.serve.ranking.batcher import Batcher
from support.recsys.rankers import small_ranker
from support.serving.http.raw import Reply, ask

RANKER = small_ranker()


class Held:
    """The ranker, whose passes wait until they may go on."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.may_go.set()
        self.has_begun = threading.Event()
        self.passes: list[int] = []
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(RANKER, name)

    def score(self, requests: Sequence[Coded]) -> list[list[float]]:
        self.has_begun.set()
        self.may_go.wait()
        self.passes.append(len(requests))
        if self.fails:
            raise RuntimeError("a fault of the model's")
        return RANKER.score(requests)


class Running:
    def __init__(self) -> None:
        self.model, self.lines = Held(), []
        self.port = 0

    def rank(self, body: Any, path: str = "/v1/rank") -> Reply:
        return ask(self.port, "POST", path, json.dumps(body).encode())

    def metrics(self) -> dict[tuple[str, str], float]:
        text = ask(self.port, "GET", "/metrics").body.decode()
        return {
            (
                s.name,
                s.labels.get("quantile", s.labels.get("reason", s.labels.get("le", ""))),
            ): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }


@pytest.fixture
def server() -> Iterator[Running]:
    running = Running()
    with Batcher(running.model, most_together=64) as batcher:
        state = RankState(batcher, log=running.lines.append)
        with ServerThread(make_rank_app(state), state) as thread:
            running.port, running.state = thread.port, state
            yield running


def request(seed: int, count: int) -> dict[str, Any]:
    return {
        "context": {"user": f"u{seed}", "price": seed / 7},
        "candidates": {
            "ad": [(seed + at) % 10 for at in range(count)],
            "words": [["red", "blue"][: at % 3] for at in range(count)],
        },
    }


def test_requests_that_come_together_are_scored_together_to_the_bit(server: Running) -> None:
    bodies = [request(seed, 1 + seed) for seed in range(12)]
    server.model.may_go.clear()
    with ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(server.rank, bodies[0])]
        server.model.has_begun.wait()
        replies += [pool.submit(server.rank, body) for body in bodies[1:]]
        while len(server.state.batcher._queue) < 11:
            time.sleep(0.01)
        server.model.may_go.set()
        answers = [json.loads(each.result().body) for each in replies]
    for body, answer in zip(bodies, answers, strict=True):
        (logits,) = RANKER.score([RANKER.code(body["context"], body["candidates"])])
        results = answer["results"]
        assert {each["index"]: each["logit"] for each in results} == dict(enumerate(logits))
        assert [each["logit"] for each in results] == sorted(logits, reverse=True)
        for each in results:
            assert each["score"] == pytest.approx(1 / (1 + math.exp(-each["logit"])))
        assert answer["usage"]["candidates"] == len(logits)
    # One pass was under way; the 78 candidates of the others took two, of at most 64.
    assert len(server.model.passes) == 3
    assert (server.model.passes[0], sum(server.model.passes)) == (1, 12)
    counts = server.metrics()
    assert counts["equipoise_rank_request_seconds_count", ""] == 12
    assert counts["equipoise_rank_pass_candidates_total", ""] == 78
    assert counts["equipoise_rank_passes_total", ""] == 3
    middle, high = (counts["equipoise_rank_latency_seconds", q] for q in ("0.5", "0.99"))
    assert 0 < middle <= high
    health = json.loads(ask(server.port, "GET", "/health").body)
    assert health == {"status": "ok", "requests": 12, "p50_s": middle, "p99_s": high}
    assert server.state.metrics.words() == (
        f"Requests: 12, candidates: 78, passes: 3; P50 {1000 * middle:.1f} ms, "
        f"P99 {1000 * high:.1f} ms."
    )


def test_the_best_come_first_and_unknown_values_are_counted(server: Running) -> None:
    body = request(1, 9) | {"top": 2, "model": "clicks"}
    body["context"]["user"] = "nobody"
    answer = json.loads(server.rank(body).body)
    assert [*answer] == ["object", "model", "results", "usage"]
    assert (answer["object"], answer["model"], len(answer["results"])) == ("ranking", "clicks", 2)
    assert answer["usage"] == {"candidates": 9, "unknown_values": 10}
    assert server.metrics()["equipoise_rank_unknown_values_total", ""] == 10
    card = json.loads(ask(server.port, "GET", "/v1/models").body)["data"][0]
    assert card["columns"] == ["user", "ad", "words", "price"]
    assert server.state.metrics.requests == 1


def test_a_client_that_has_left_costs_no_pass() -> None:
    model = Held()
    model.may_go.clear()

    async def ask_three(batcher: Batcher) -> list[int]:
        asked = [request(seed, 5) for seed in range(3)]
        tasks = [
            asyncio.ensure_future(batcher.score(each["context"], each["candidates"]))
            for each in asked
        ]
        while not model.has_begun.is_set():
            await asyncio.sleep(0.001)
        tasks[1].cancel()
        await asyncio.sleep(0)
        model.may_go.set()
        return [len((await tasks[at]).logits) for at in (0, 2)]

    with Batcher(model, most_together=5) as batcher:
        assert asyncio.run(ask_three(batcher)) == [5, 5]
        assert (model.passes, batcher.stats.candidates) == ([1, 1], 10)


GOOD = request(1, 2)
BAD = {
    "missing": (
        {"candidates": GOOD["candidates"]},
        400,
        'The column "user" is missing. Give it in context, or in candidates with a value for each.',
    ),
    "empty": (
        {"candidates": {}},
        400,
        "'candidates' must have a column with a value for each candidate.",
    ),
    "top": (GOOD | {"top": 0}, 400, "'top' must be at least 1; it is 0."),
    "unknown": (
        GOOD | {"candidate": {}},
        400,
        "Unknown parameter: 'candidate'. Nearest: 'candidates'.",
    ),
    "kind": ([1], 400, "The body must be a JSON object: {...}."),
    "lists": (
        {"context": {}, "candidates": {"ad": 3}},
        400,
        "'candidates.ad' must be a list, not 3.",
    ),
    "shared": (
        {
            "context": {"user": "u1", "price": 1, "words": "red " * 3_000},
            "candidates": {"ad": [1] * 2_000},
        },
        400,
        'The column "words" has 3,000 values in context for 2,000 candidates, 6,000,000 in all, '
        "and a request may have 4,194,304. Ask for fewer candidates at a time.",
    ),
    "model": (
        GOOD | {"model": "other"},
        404,
        "There is no model 'other'. This server has 'clicks'.",
    ),
}


def test_long_requests_are_read_and_written_beside_others(server: Running) -> None:
    body = {
        "context": {"user": "u1", "price": 1},
        "candidates": {"ad": [at % 10 for at in range(6_000)], "words": [["red"]] * 6_000},
    }
    assert len(json.dumps(body)) > SHORT_BYTES
    reply = server.rank(body)
    (logits,) = RANKER.score([RANKER.code(body["context"], body["candidates"])])
    results = json.loads(reply.body)["results"]
    assert {each["index"]: each["logit"] for each in results} == dict(enumerate(logits))
    assert [each["logit"] for each in results] == sorted(logits, reverse=True)
    body["candidates"]["ad"].pop()
    reply = server.rank(body)
    assert (reply.status, json.loads(reply.body)["error"]["message"]) == (
        400,
        "Columns of candidates have different lengths: ad 5,999, words 6,000.",
    )


def test_requests_are_bounded_by_bytes(server: Running) -> None:
    """A queue of 1,024 had no bound but their number, and each may look up 4 million rows."""
    small, batcher = request(1, 2), server.state.batcher
    batcher.most_waiting_bytes = 200
    own = RANKER.code(small["context"], small["candidates"]).held_bytes
    assert own == 4 * 6 + 8 * 5 + 4 * 2
    server.model.may_go.clear()
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(server.rank, small)]
        server.model.has_begun.wait()
        for waiting in (1, 2):
            replies.append(pool.submit(server.rank, small))
            while len(batcher._queue) < waiting:
                time.sleep(0.001)
        assert batcher._waiting_bytes == 2 * own
        reply = server.rank(small)
        assert (reply.status, json.loads(reply.body)["error"]["message"]) == (
            503,
            f"Requests of {2 * own} bytes wait already, and this one has {own} (200 at most).",
        )
        server.model.may_go.set()
        assert [each.result().status for each in replies] == [200] * 3
    assert batcher._waiting_bytes == 0
    bodies = server.state.bodies
    while bodies.size_bytes:  # the last answer has arrived before its request is over
        time.sleep(0.001)
    bodies.size_bytes = 512 << 20
    reply = server.rank(small)
    assert (reply.status, json.loads(reply.body)["error"]["message"]) == (
        503,
        "Requests of 536,870,912 bytes are under way already (536,870,912 at most).",
    )
    assert server.metrics()["equipoise_rank_refusals_total", "queue_full"] == 2
    bodies.size_bytes = 0


def test_what_is_wrong_is_one_sentence_and_the_server_goes_on(server: Running) -> None:
    for body, status, words in BAD.values():
        reply = server.rank(body)
        fault = json.loads(reply.body)["error"]
        assert (reply.status, fault["message"]) == (status, words)
        assert fault["type"] == "invalid_request_error"
    reply = ask(server.port, "POST", "/v1/rank", b"{nonsense")
    assert json.loads(reply.body)["error"]["code"] == "invalid_json"
    assert ask(server.port, "GET", "/v1/rank").status == 405
    assert server.metrics()["equipoise_rank_refusals_total", "invalid"] == len(BAD) + 1
    # A model that fails is a 500 for those who asked, and no more.
    server.model.fails = True
    reply = server.rank(GOOD)
    assert (reply.status, json.loads(reply.body)["error"]["type"]) == (500, "server_error")
    server.model.fails = False
    assert server.rank(GOOD).status == 200
    counts = server.metrics()
    reasons = {of[1]: n for of, n in counts.items() if of[0] == "equipoise_rank_refusals_total"}
    assert {name: n for name, n in reasons.items() if n} == {"invalid": len(BAD) + 1, "failed": 1}
    server.state.is_draining = True
    assert server.rank(GOOD).status == 503
    server.state.is_draining = False


def test_bodies_that_are_only_announced_keep_nobody_out(server: Running) -> None:
    """Eight heads that each announced the largest body had every other request refused."""
    head = b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(9)]
    try:
        for each in slow:
            each.sendall(head + b"Content-Length: 67108864\r\n\r\n{")
        bodies = server.state.bodies
        while bodies.size_bytes < len(slow):
            time.sleep(0.001)
        assert server.rank(request(1, 2)).status == 200
    finally:
        for each in slow:
            each.close()
    while bodies.size_bytes:
        time.sleep(0.001)
