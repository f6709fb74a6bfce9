import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from equipoise.base.errors import SpecError
from equipoise.dash.web.serving import KEY, Series, Serving, look, metrics_url, tell
from equipoise.observe.prometheus import parse_metrics
from support.launch.ports import free_port

OURS = """
equipoise_requests_running{{model_name="m"}} 3
equipoise_kv_cache_usage_ratio{{model_name="m"}} 0.25
equipoise_prompt_tokens_total{{model_name="m",tenant="a"}} {a}
equipoise_prompt_tokens_total{{model_name="m",tenant="b"}} 50
equipoise_generation_tokens_total{{model_name="m",tenant="a"}} 10
equipoise_context_bytes_total{{variant="pass-kv"}} {bytes}
equipoise_time_to_first_token_seconds_bucket{{le="1"}} {few}
equipoise_time_to_first_token_seconds_bucket{{le="+Inf"}} {few}
vllm:num_requests_running{{engine="0"}} 3
vllm:prompt_tokens_total{{engine="0"}} 999
"""


def ours(a: int, sent: int, few: int) -> str:
    return OURS.format(a=a, bytes=sent, few=few)


def series(*texts: str, every_s: float = 30.0) -> Series:
    answer = Series()
    for number, text in enumerate(texts):
        answer.add(look(parse_metrics(text), number * every_s))
    return answer


def test_rates_are_of_the_last_minute_and_ours_come_before_theirs() -> None:
    told = tell(series(ours(0, 0, 0), ours(600, 6_000, 4), ours(1_200, 9_000, 8)))
    columns = told["columns"]
    assert columns["running"] == [3, 3, 3] and columns["kv_share"] == [0.25] * 3
    assert columns["prompt_tokens_per_s"] == [None, 20, 20]
    assert columns["first_token_p50_s"] == [None, 0.5, 0.5]
    assert [each["name"] for each in told["tenants"]] == ["a", "b"]
    assert [each["tokens"] for each in told["tenants"]] == [1_210, 50]
    assert [each["tokens_per_s"] for each in told["tenants"]] == [20, 0]
    assert told["context"][0]["line"] == [None, 200, 150]
    assert "served_gap" not in columns  # one tenant alone was served


def test_the_gap_is_between_tenants_that_are_served() -> None:
    name = "equipoise_generation_tokens_total"
    pages = [
        "".join(f'{name}{{tenant="{each}"}} {rate * at}\n' for each, rate in served.items())
        for at in (0, 60, 120)
        for served in [{"a": 5, "b": 2, "idle": 0}]
    ]
    assert tell(series(*pages, every_s=60.0))["columns"]["served_gap"] == [None, 3, 3]


def test_preemptions_are_told_apart_where_the_server_does() -> None:
    name = "equipoise_preemptions_total"
    pages = [
        f'{name}{{mode="swap"}} {at}\n{name}{{mode="recompute"}} {3 * at}\n' for at in (0, 60, 120)
    ]
    columns = tell(series(*pages, every_s=60.0))["columns"]
    assert columns["preemptions_per_s"] == [None, 4, 4]
    assert columns["preemptions_by_swap_per_s"] == [None, 1, 1]
    assert columns["preemptions_by_recompute_per_s"] == [None, 3, 3]
    theirs = [f'vllm:num_preemptions_total{{engine="0"}} {at}\n' for at in (0, 60)]
    alone = tell(series(*theirs, every_s=60.0))["columns"]
    assert alone == {"preemptions_per_s": [None, 1]}


def test_a_quiet_minute_has_no_latency() -> None:
    told = tell(series(*[ours(5, 5, 5)] * 4))
    assert told["columns"]["first_token_p50_s"] == [None] * 4
    assert told["columns"]["prompt_tokens_per_s"][1:] == [0, 0, 0]


def test_a_server_that_began_anew_counts_from_there() -> None:
    told = tell(series(ours(900, 900, 9), ours(0, 0, 0), ours(30, 30, 3)))
    assert told["columns"]["prompt_tokens_per_s"] == [None, None, 1]


def test_it_reads_vllms_names() -> None:
    text = """
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.7
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 0
vllm:generation_tokens_total{engine="0"} 100
"""
    columns = tell(series(text, text))["columns"]
    assert (columns["running"][-1], columns["waiting"][-1], columns["kv_share"][-1]) == (2, 7, 0.6)
    assert columns["generation_tokens_per_s"][-1] == 0


@contextmanager
def serve(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None: ...

    place = "127.0.0.1", free_port()  # where nobody answers once it is closed
    with http.server.ThreadingHTTPServer(place, Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def reply(status: int, text: str, **headers: str) -> Callable[..., None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


def fetch(place: str) -> str:
    for _ in range(20):
        serving = Serving(place)
        serving.fetch()
        sentence: str = json.loads(serving.as_json())["sentence"]
        if "timed out" not in sentence:  # after 3 s, in which a busy machine may not answer
            break
    return sentence


def test_what_a_server_answers_becomes_a_sentence() -> None:
    with serve(reply(200, ours(1, 1, 1))) as place:
        assert fetch(place) == ""
    where = f"http://{place}/metrics"
    assert fetch(place) == f"{where} does not answer: Connection refused."
    with serve(reply(200, "<html>")) as place:
        assert fetch(place) == f"http://{place}/metrics has no metrics of a model server."
    with serve(reply(401, "{}")) as place:
        assert fetch(place) == (
            f"http://{place}/metrics answers 401 instead of metrics. Put its key into the "
            f"environment variable {KEY}."
        )
    with serve(reply(302, "", Location="http://127.0.0.1:1/secret")) as place:
        assert fetch(place) == f"http://{place}/metrics answers 302 instead of metrics."


def test_half_an_answer_is_none() -> None:
    def chunked(handler: http.server.BaseHTTPRequestHandler) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        handler.wfile.write(head + b"ff\r\nequipoise_requests_running 3")

    def strange(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"SSH-2.0-none\r\n")

    short = reply(200, "equipoise_requests_running 3", **{"Content-Length": "99"})
    for answer, words in (
        (short, "its text was cut short"),
        (chunked, "its text was cut short"),
        (strange, "it does not speak HTTP"),
    ):
        with serve(answer) as place:
            assert fetch(place) == f"http://{place}/metrics does not answer: {words}."


def test_the_key_goes_to_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    seen: list[str | None] = []

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Authorization"])
        reply(200, ours(1, 1, 1))(handler)

    with serve(answer) as place:
        serving = Serving(f"user:word@{place}")
        serving.fetch()
    assert b"secret" not in serving.as_json() and b"word" not in serving.as_json()
    with serve(answer) as place:
        assert fetch(place) == ""
    assert seen[-1] == "Bearer secret"


@pytest.mark.parametrize(
    "text", ["", "ftp://x", "http://", "http://[", "file:///etc/passwd", "a b"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        metrics_url(text)
    assert str(caught.value) == (
        f'--metrics "{text}" is not the address of a server. Give one such as '
        "http://127.0.0.1:8000/metrics."
    )
