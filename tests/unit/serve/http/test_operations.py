"""Clients that go away, clients that do not read, servers that stop; and what metrics say of it."""

import asyncio
import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.request import Event, GenerateRequest, TokenEvent
from equipoise.serve.http.answers import Answers, SlowReaderError
from equipoise.serve.http.asked import Asked, Prompt
from equipoise.serve.http.server import ServerThread
from support.serving.http.raw import Reply, ask, open_socket, read_reply
from support.serving.http.scrape import scraped
from support.serving.http.served import MODEL, Running, running

LONG = {"model": MODEL, "prompt": "a", "max_tokens": 3500, "ignore_eos": True, "temperature": 0}
HONEST = {"model": MODEL, "prompt": "Hello world", "max_tokens": 20, "ignore_eos": True}
SIZES: dict[str, Any] = {"pages": 1024, "context_tokens": 4000, "most_sequences": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(**SIZES, queued_requests=2) as server:
        yield server


def until(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline_s, "nothing changed for minutes"
        time.sleep(0.01)


def begin(
    server: Running,
    path: str = "/v1/completions",
    body: dict[str, Any] = LONG,
    **fields: Any,
) -> socket.socket:
    """A request whose answer nobody has read yet."""
    raw = open_socket(server.port)
    data = json.dumps({**body, **fields}).encode()
    raw.sendall(
        f"POST {path} HTTP/1.1\r\nHost: a".encode() + b"\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + str(len(data)).encode() + b"\r\n\r\n" + data
    )
    return raw


def is_idle(server: Running) -> bool:
    stats = server.state.model.engine.stats()
    return not (stats.running or stats.waiting or stats.used_pages or server.state.under_way)


def aborted(server: Running) -> float:
    return scraped(server)["equipoise_request_success_total", "abort"]


@pytest.mark.parametrize("ending", ["fin", "rst", "half"])
@pytest.mark.parametrize("streams", [False, True])
def test_who_goes_away_frees_the_engine(server: Running, ending: str, streams: bool) -> None:
    before = aborted(server)
    raw = begin(server, stream=streams)
    until(lambda: server.state.model.engine.stats().running == 1)
    if ending == "half":
        raw.shutdown(socket.SHUT_WR)
    elif ending == "rst":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
    else:
        raw.close()
    until(lambda: is_idle(server))
    raw.close()
    assert aborted(server) == before + 1


@pytest.mark.parametrize("streams", [False, True])
def test_who_goes_away_behind_a_further_request_frees_the_engine(
    server: Running, streams: bool
) -> None:
    before = aborted(server)
    raw = begin(server, stream=streams)
    until(lambda: server.state.model.engine.stats().running == 1)
    raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
    time.sleep(0.05)  # the server reads both
    raw.close()
    until(lambda: is_idle(server))
    assert aborted(server) == before + 1


def test_who_goes_away_while_its_text_waits_to_be_cut_is_gone(server: Running) -> None:
    model = server.state.model
    others = model.long_texts
    object.__setattr__(model, "long_texts", asyncio.Semaphore(0))  # another text never ends
    try:
        talk = [{"role": "user", "content": "a " * 40_000}]
        for path, body in (
            ("/v1/chat/completions", {"messages": talk}),
            ("/tokenize", {"messages": talk}),
            ("/tokenize", {"prompt": "a " * 40_000}),
        ):
            raw = begin(server, path, body)
            until(lambda: server.state.under_way == 1)
            raw.close()
            until(lambda: is_idle(server))
        # Nobody needs to cut these: no token of this tokenizer has more than seven bytes.
        for path, field, name in (
            ("/v1/completions", "prompt", "prompt has at least 11,429 tokens. Shorten the prompt"),
            ("/v1/embeddings", "input", "input has at least 11,429 tokens. Shorten the input"),
        ):
            with begin(server, path, {field: "a " * 40_000}) as raw:
                said = json.loads(read_reply(raw).body)["error"]
            assert f"The model's context is 4,000 tokens; the {name}" in said["message"]
            assert said["param"] == field
    finally:
        object.__setattr__(model, "long_texts", others)


def test_who_goes_away_in_the_queue_was_never_there(server: Running) -> None:
    with ExitStack() as open_:
        for _ in range(2):
            open_.enter_context(begin(server))
        until(lambda: server.state.model.engine.stats().running == 2)
        waiting = begin(server)
        until(lambda: server.state.model.engine.stats().waiting == 1)
        waiting.close()
        until(lambda: server.state.model.engine.stats().waiting == 0)
        assert server.state.model.engine.stats().running == 2
    until(lambda: is_idle(server))


def test_a_full_queue_says_when_to_come_back(server: Running) -> None:
    with ExitStack() as open_:
        for _ in range(2):
            open_.enter_context(begin(server))
        until(lambda: server.state.model.engine.stats().running == 2)
        open_.enter_context(begin(server))
        until(lambda: server.state.model.engine.stats().waiting == 1)
        before = aborted(server)
        several = open_.enter_context(begin(server, n=3, temperature=1))
        assert read_reply(several).status == 503  # all of its answers or none
        until(lambda: server.state.model.engine.stats().waiting == 1)
        open_.enter_context(begin(server))
        until(lambda: server.state.model.engine.stats().waiting == 2)
        raw = open_.enter_context(begin(server))
        refused = read_reply(raw)
        assert aborted(server) == before, "who was refused was never there"
    until(lambda: is_idle(server))
    assert refused.status == 503
    seconds = int(refused.headers["retry-after"])
    assert seconds >= 1
    assert 0 <= seconds * 1000 - int(refused.headers["retry-after-ms"]) < 1000
    said = json.loads(refused.body)["error"]
    assert said["type"] == "overloaded_error"
    assert said["message"].startswith("2 requests wait already, as many as may. Try again in ")


def test_a_storm_of_clients_that_leave_holds_nobody_up() -> None:
    settings: list[dict[str, Any]] = [
        {"n": 2, "temperature": 1},
        {"stream": True},
        {"prompt": "a " * 200, "max_tokens": 9},
    ]
    data = json.dumps(HONEST).encode()
    with running(**SIZES) as server:
        for at in range(12):
            begin(server, **settings[at % 3]).close()
            if at % 4 == 3:
                honest = ask(server.port, "POST", "/v1/completions", data)
                assert json.loads(honest.body)["usage"]["completion_tokens"] == 20
        until(lambda: is_idle(server))


def test_who_does_not_read_is_given_up() -> None:
    lines = list[str]()
    with running(**SIZES, state={"most_events": 50, "log": lines.append}) as server:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.connect(("127.0.0.1", server.port))
        data = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 2}).encode()
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"X-Request-Id: slow-1\r\nContent-Length: "
            + str(len(data)).encode()
            + b"\r\n\r\n"
            + data
        )
        until(lambda: aborted(server) == 2)
        until(lambda: is_idle(server))
        until(lambda: any(" /v1/completions 499 " in line for line in lines))
        raw.close()
    assert lines.count("Gave up slow-1. More than 50 events waited for its client.") == 1


def test_what_comes_at_once_is_no_slow_client_s_fault() -> None:
    """Only what waits although its reader has had a turn."""
    delivers = list[Callable[[Event], None]]()
    slow, aborted_ = list[int](), list[int]()

    def submit(_: GenerateRequest, *, deliver: Callable[[Event], None]) -> Any:
        delivers.append(deliver)
        return SimpleNamespace(waited_s=0.0, abort=lambda: aborted_.append(1))

    model: Any = SimpleNamespace(
        vocabulary=SimpleNamespace(text_bytes=lambda token: bytes([token])),
        end_ids=frozenset(),
        engine=SimpleNamespace(submit=submit),
    )
    counts: Any = SimpleNamespace(count_first=lambda *_: 0, count_next=lambda *_: 0)
    asked = Asked((Prompt((65,), "A"),), (GenerateRequest((65,)),), each=1, n=1, top=None)

    async def read() -> None:
        on_slow = partial(slow.append, 1)
        answers = Answers(model, asked, counts, on_slow=on_slow, most_events=3)
        for _ in range(50):
            delivers[0](TokenEvent(66, "B"))
        parts = answers.parts()
        for _ in range(50):
            await anext(parts)
        assert (slow, aborted_) == ([], [])
        for _ in range(2):  # four wait, and then one comes
            for _ in range(4):
                delivers[0](TokenEvent(66, "B"))
            await asyncio.sleep(0)
        assert (slow, aborted_) == ([1], [1])
        with pytest.raises(SlowReaderError):
            await anext(parts)

    asyncio.run(read())


def test_the_end_of_an_answer_does_not_wait_for_its_head_to_be_acknowledged() -> None:
    said: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive
        end = scope["state"]["transport"].get_extra_info("socket")
        said.append(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    state: Any = SimpleNamespace(is_draining=False, under_way=0, share=None)
    with ServerThread(app, state) as server:
        for _ in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/") as reply:
                assert reply.status == 200
    assert all(said) and len(said) == 2


def test_a_long_wait_has_a_pulse() -> None:
    with running(**SIZES, state={"heartbeat_s": 0.05}) as server, ExitStack() as open_:
        for _ in range(2):
            open_.enter_context(begin(server))
        until(lambda: server.state.model.engine.stats().running == 2)
        raw = open_.enter_context(begin(server, stream=True))
        got = b""
        while got.count(b": waiting\n\n") < 2:
            got += raw.recv(4096)
        assert b"data:" not in got


def test_a_server_that_drains_answers_what_it_took() -> None:
    with running(**SIZES) as server:
        raw = begin(server, max_tokens=200)
        kept = open_socket(server.port)
        until(lambda: server.state.model.engine.stats().running == 1)
        server.thread.drain()
        refused = [
            ask(server.port, "POST", "/v1/completions", json.dumps(LONG).encode()),
            ask(server.port, "GET", "/health"),
        ]
        whole = read_reply(raw)
        assert server.thread.join(60)
        raw.close()
        kept.close()
    assert whole.status == 200
    assert json.loads(whole.body)["usage"]["completion_tokens"] == 200
    for each in refused:
        assert each.status == 503
        assert "retry-after" in each.headers


def test_every_token_is_in_a_usage_or_was_given_up() -> None:
    with running(**SIZES) as server:

        def post(**fields: Any) -> Reply:
            data = json.dumps({**LONG, "max_tokens": 9, **fields}).encode()
            return ask(server.port, "POST", "/v1/completions", data)

        asked: list[dict[str, Any]] = [{}, {"n": 3, "seed": 1}, {"best_of": 2}]
        asked.append({"prompt": ["a", "b c"]})
        usages = [json.loads(post(**fields).body)["usage"] for fields in asked]
        stream = post(stream=True, stream_options={"include_usage": True}).body
        usages.append(json.loads(stream.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"])
        begin(server, max_tokens=3500).close()
        raw = begin(server, stream=True)
        raw.recv(1)
        raw.close()
        until(lambda: is_idle(server) and aborted(server) == 2)
        said = scraped(server)
    generated = said["equipoise_generation_tokens_total", "default"]
    lost = said["equipoise_unanswered_tokens_total", "default"]
    assert generated - lost == sum(each["completion_tokens"] for each in usages)
    assert said["vllm:generation_tokens_total", ""] == generated
    answers = said["equipoise_e2e_request_latency_seconds_count", ""]
    ended = sum(
        said["equipoise_request_success_total", reason] for reason in ("stop", "length", "abort")
    )
    assert answers == ended == 1 + 3 + 2 + 2 + 1 + 2
    firsts = said["equipoise_time_to_first_token_seconds_count", ""]
    nexts = said["equipoise_inter_token_latency_seconds_count", ""]
    assert firsts + nexts == generated
    assert said["vllm:request_decode_time_seconds_count", ""] == firsts
    assert said["equipoise_request_longest_tokens_count", ""] == 7
    assert said["vllm:request_max_num_generation_tokens_sum", ""] >= 5 * 9


def test_tokens_of_a_stream_that_fails_are_in_no_usage() -> None:
    class Torn(PagedDecoder):
        left = 6

        def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise ValueError("torn")
            return super().run(chunks, tokens)

    with running(**SIZES) as server:
        engine = server.state.model.engine
        engine._decoder = Torn(engine._decoder.decoder, engine._decoder.pool)
        data = json.dumps({**HONEST, "stream": True, "stream_options": {"include_usage": True}})
        body = ask(server.port, "POST", "/v1/completions", data.encode()).body
        until(lambda: is_idle(server))
        said = scraped(server)
    *chunks, last, empty = body.decode().split("\n\n")
    assert empty == "" and all(json.loads(each[6:])["usage"] is None for each in chunks)
    assert json.loads(last[6:])["error"]["message"] == (
        "The request failed inside the engine: ValueError."
    )
    generated = said["equipoise_generation_tokens_total", "default"]
    assert generated == said["equipoise_unanswered_tokens_total", "default"] == 6


def test_an_answer_that_is_not_whole_in_time_ends(server: Running) -> None:
    words = "The answer was not whole within the seconds that X-Request-Timeout gives."
    before = aborted(server)
    for streams in (False, True):
        data = json.dumps({**LONG, "stream": streams}).encode()
        late = {"X-Request-Timeout": "0.05"}
        reply = ask(server.port, "POST", "/v1/completions", data, late)
        until(lambda: is_idle(server))
        said = reply.body.decode()
        if streams:
            *_, said, empty = said.split("\n\n")
            assert empty == "" and "[DONE]" not in said
            said = said.removeprefix("data: ")
        else:
            assert (reply.status, reply.headers["x-should-retry"]) == (408, "false")
        fault = json.loads(said)["error"]
        assert (fault["message"], fault["code"]) == (words, "request_timeout")
    assert aborted(server) == before + 2
    short = json.dumps({**HONEST, "max_tokens": 1}).encode()
    for said, status in (("60", 200), ("soon", 400), ("0", 400), ("nan", 400), ("inf", 400)):
        within = {"X-Request-Timeout": said}
        reply = ask(server.port, "POST", "/v1/completions", short, within)
        assert reply.status == status
        words = f'X-Request-Timeout must be a number of seconds above 0; it is "{said}".'
        assert status == 200 or json.loads(reply.body)["error"]["message"] == words


def test_a_conversations_stream_says_nothing_before_its_first_token(server: Running) -> None:
    """Clients take the first chunk for the first token."""
    talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": True}
    with ExitStack() as open_:
        for _ in range(2):
            open_.enter_context(begin(server))
        until(lambda: server.state.model.engine.stats().running == 2)
        raw = open_.enter_context(begin(server, "/v1/chat/completions", talk))
        read_reply(raw)  # the head comes at once
        until(lambda: server.state.model.engine.stats().waiting == 1)
        raw.settimeout(0.1)
        with pytest.raises(TimeoutError):
            raw.recv(1)
    until(lambda: is_idle(server))


def test_bodies_are_let_go_with_their_requests(server: Running) -> None:
    limits = server.state.limits["default"]
    with begin(server, prompt="a" * 3_000, max_tokens=900):
        until(lambda: server.state.model.engine.stats().running == 1)
        assert limits._bodies.size_bytes > 3_000
    until(lambda: is_idle(server))
    for data in (b"{", json.dumps({**HONEST, "max_tokens": 1}).encode()):
        ask(server.port, "POST", "/v1/completions", data)
    until(lambda: is_idle(server))
    assert limits._bodies.size_bytes == 0


def test_a_page_of_metrics_shows_one_moment(server: Running) -> None:
    """Iterations go on while it is written."""
    with begin(server):
        until(lambda: server.state.model.engine.stats().running == 1)
        for _ in range(30):
            seen = scraped(server)
            iterations = seen["equipoise_iterations_total", ""]
            assert iterations == seen["equipoise_iteration_tokens_count", ""]
            assert iterations == seen["vllm:iteration_tokens_total_count", ""]
    until(lambda: is_idle(server))
