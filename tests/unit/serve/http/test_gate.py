"""What every request passes: keys, shapes of errors, ids, bodies as bytes."""

import json
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from equipoise import __version__
from equipoise.serve.http.keys import hash_key, make_key
from equipoise.serve.http.tenants import Tenant, Tenants
from support.serving.http.raw import Reply, ask, open_socket, read_reply
from support.serving.http.served import MODEL, Running, running

KEYS = {name: make_key() for name in ("ann", "bob", "few")}
BY_NAME = {
    "ann": Tenant("ann"),
    "bob": Tenant("bob"),
    "few": Tenant("few", requests_per_minute=1, tokens_per_minute=1000),
}
TENANTS = Tenants(BY_NAME, {hash_key(key): BY_NAME[name] for name, key in KEYS.items()})
BODY = {"model": MODEL, "prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(TENANTS) as server:
        yield server


def post(server: Running, body: Any, path: str = "/v1/completions", **headers: str) -> Reply:
    headers = {"Authorization": f"Bearer {KEYS['ann']}", **headers}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(server.port, "POST", path, data, headers)


def error(reply: Reply) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    said = json.loads(reply.body)
    assert set(said) == {"error"}
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert isinstance(said["error"]["message"], str)
    value: dict[str, Any] = said["error"]
    return value


ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", [None, "Bearer wrong", "Basic wrong", "Bearer "])
def test_no_route_answers_strangers(
    server: Running, method: str, path: str, key: str | None
) -> None:
    headers = {} if key is None else {"Authorization": key}
    reply = ask(server.port, method, path, b"{}" if method == "POST" else b"", headers)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    said = error(reply)
    assert said["code"] == "invalid_api_key"
    is_wrong = key == "Bearer wrong"
    assert said["message"] == (
        "The API key is not known."
        if is_wrong or key == "Basic wrong"
        else "There is no API key. Send one as Authorization: Bearer KEY."
    )


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_a_load_balancer_needs_no_key(server: Running, path: str) -> None:
    reply = ask(server.port, "GET", path)
    assert reply.status == 200
    if path == "/version":
        assert json.loads(reply.body) == {"version": __version__}


def test_models_are_listed(server: Running) -> None:
    client = server.client(KEYS["ann"])
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"


def test_what_is_not_there(server: Running) -> None:
    headers = {"Authorization": f"Bearer {KEYS['ann']}"}
    for path in ("/v1/responses", "/nowhere", "/v1/completions/"):
        reply = ask(server.port, "GET", path, headers=headers)
        assert reply.status == 404
        assert error(reply)["message"] == f"There is nothing at {path}."
    reply = ask(server.port, "GET", "/v1/completions", headers=headers)
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"
    assert error(reply)["message"] == "GET is not possible at /v1/completions. Allowed: POST."
    reply = post(server, {**BODY, "model": "gpt-9"})
    assert reply.status == 404
    assert error(reply) == {
        "message": "There is no model 'gpt-9'. This server has 'tiny'.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


BAD_BYTES: list[tuple[bytes, str]] = [
    (b"", "The body is not JSON: Expecting value at line 1, column 1."),
    (b"{", "The body is not JSON: Expecting property name enclosed in double quotes at line 1, "
           "column 2."),
    (b"[1]", "The body must be a JSON object: {...}."),
    (b'{"prompt": "\xff"}', "The body cannot be read: it is not UTF-8 text."),
    (b'{"prompt": "a", "n": 1, "n": 9}',
     'The body cannot be read: an object in it has "n" twice; give it once.'),
    (b"[" * 100_000, "The body cannot be read: brackets are nested more than 64 deep."),
    (b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
     "The body cannot be read: brackets are nested more than 64 deep."),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BAD_BYTES, ids=range(len(BAD_BYTES)))
def test_bytes_that_are_no_body(server: Running, data: bytes, message: str) -> None:
    reply = post(server, data)
    assert reply.status == 400
    assert error(reply) == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_json",
    }


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"prompt": "a", "seed": -' + b"9" * 21 + b"}", "seed"),
        (
            b'{"prompt": [1, [2, 1' + b"0" * 20 + b']], "top_k": 1' + b"0" * 30 + b"}",
            "prompt[1][1]",
        ),
    ],
)
def test_a_number_that_no_field_holds_is_named(server: Running, data: bytes, path: str) -> None:
    reply = post(server, data)
    assert reply.status == 400
    assert error(reply) == {
        "message": f"'{path}' has more digits than 64 bits hold.",
        "type": "invalid_request_error",
        "param": path,
        "code": "invalid_value",
    }


@pytest.mark.parametrize(
    ("version", "lengths", "message"),
    [
        (
            b"1.1",
            b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "A request has Transfer-Encoding or Content-Length, not both. Leave one out.",
        ),
        (
            b"1.1",
            b"Transfer-Encoding: chunked\r\nContent-Length: 40\r\n",
            "A request has Transfer-Encoding or Content-Length, not both. Leave one out.",
        ),
        (
            b"1.0",
            b"Transfer-Encoding: chunked\r\n",
            "HTTP/1.0 has no Transfer-Encoding. Send Content-Length, or HTTP/1.1.",
        ),
    ],
)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/health"])
def test_a_body_with_two_ends_is_refused_with_all_that_follows(
    server: Running, version: bytes, lengths: bytes, message: str, path: bytes
) -> None:
    with open_socket(server.port) as raw:
        raw.sendall(
            b"POST " + path + b" HTTP/" + version + b"\r\nHost: a\r\n"
            b"Content-Type: application/json\r\n" + lengths + b"\r\n0\r\n\r\n"
            b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        )
        reply = read_reply(raw)
        assert raw.recv(1) == b""
    assert reply.status == 400
    assert reply.headers["connection"] == "close"
    assert error(reply) == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }


def test_a_body_is_json_and_says_so(server: Running) -> None:
    reply = post(server, BODY, **{"Content-Type": "text/plain"})
    assert reply.status == 415
    assert error(reply)["message"] == (
        'The body must be JSON: send it with Content-Type: application/json, not "text/plain".'
    )
    assert post(server, BODY, **{"Content-Type": "application/json; charset=utf-8"}).status == 200
    reply = post(server, BODY, **{"Content-Encoding": "gzip"})
    assert reply.status == 415


def test_a_body_that_is_too_large_is_refused_whole(server: Running) -> None:
    most = server.state.most_body_bytes
    reply = post(server, b" " * (most + 1))
    assert reply.status == 413
    assert error(reply)["message"] == f"The body is too large: at most {most:,} bytes are read."
    with open_socket(server.port) as raw:  # by chunks, with no length said
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer " + KEYS["ann"].encode() + b"\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(most // 65536 + 2):
            raw.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        raw.sendall(b"0\r\n\r\n")
        assert read_reply(raw).status == 413


def test_context_names_limit_and_count(server: Running) -> None:
    reply = post(server, {"prompt": [5] * 510, "max_tokens": 7})
    assert reply.status == 400
    assert error(reply) == {
        "message": "The model's context is 512 tokens; the prompt has 510 tokens and the answer "
        "may have 7 (max_tokens), together 517. Shorten the prompt or ask for fewer.",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "context_length_exceeded",
    }
    reply = post(server, {"prompt": "hello " * 5000, "max_tokens": 1})
    count = len(server.state.model.tokenizer.encode("hello " * 5000))
    assert error(reply) == {
        "message": f"The model's context is 512 tokens; the prompt has {count:,} tokens. Shorten "
        "the prompt or ask for fewer.",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [9999]}, "'prompt' has token 9,999, and the model's tokens are 0 to 279."),
        (
            {"logit_bias": {"280": 1}},
            "'logit_bias' has token 280, and the model's tokens are 0 to 279.",
        ),
        (
            {"stop_token_ids": [300]},
            "'stop_token_ids' has token 300, and the model's tokens are 0 to 279.",
        ),
        ({"min_tokens": 2}, "min_tokens is 2, and the answer may have 1."),
        (
            {"prompt": ["a"] * 65, "n": 2},
            "65 prompts with 2 answers each are 130 answers. One request may have at most 128.",
        ),
        (
            {"max_tokens": 0, "echo": True, "n": 2},
            "max_tokens is 0, so n and best_of must be 1.",
        ),
    ],
)
def test_impossible_settings(server: Running, fields: dict[str, Any], message: str) -> None:
    reply = post(server, {**BODY, **fields})
    assert reply.status == 400
    assert error(reply)["message"] == message


def test_a_whole_address_may_be_asked_for(server: Running) -> None:
    """As proxies do: RFC 9112 has every server take it."""
    with open_socket(server.port) as raw:
        raw.sendall(b"GET http://a:80/version?x=1 HTTP/1.1\r\nHost: a\r\n\r\n")
        reply = read_reply(raw)
    assert (reply.status, json.loads(reply.body)) == (200, {"version": __version__})


def test_limits_are_said_in_headers(server: Running) -> None:
    few = {"Authorization": f"Bearer {KEYS['few']}"}
    first = post(server, BODY, **few)
    assert first.status == 200
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    second = post(server, BODY, **few)
    assert second.status == 429
    assert 1 <= int(second.headers["retry-after"]) <= 60
    assert int(second.headers["retry-after-ms"]) <= 60_000
    assert error(second)["code"] == "rate_limit_exceeded"
    assert post(server, BODY, Authorization=f"Bearer {KEYS['bob']}").status == 200
    # What would be refused for its length is refused before anybody counts its tokens.
    long = {"model": MODEL, "prompt": "hello " * 5000}
    for body, path in (
        (long, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "hello " * 5000}]}, "/v1/chat/completions"),
        ({"input": "hello " * 5000}, "/v1/embeddings"),
        ({"prompt": "a"}, "/tokenize"),
        ({"tokens": [70]}, "/detokenize"),
    ):
        assert post(server, body, path, **few).status == 429
    assert post(server, long, Authorization=f"Bearer {KEYS['bob']}").status == 400


def test_the_prefix_cache_is_a_tenants_own(server: Running) -> None:
    prompt = [*range(30, 90)]

    def cached(name: str, **fields: Any) -> int:
        client = server.client(KEYS[name])
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body=fields
        )
        count: int = answer.usage.prompt_tokens_details.cached_tokens
        return count

    assert cached("ann") == 0
    assert cached("ann") > 0
    assert cached("bob") == 0
    assert cached("bob", cache_salt="ann") == 0
    assert cached("bob", cache_salt="ann") > 0
    assert cached("ann", cache_salt="x") == 0


def test_requests_have_ids(server: Running) -> None:
    assert post(server, BODY, **{"X-Request-Id": "mine-7"}).headers["x-request-id"] == "mine-7"
    made = post(server, BODY, **{"X-Request-Id": "two words"}).headers["x-request-id"]
    assert made.startswith("req-")
    assert "x-request-id" in ask(server.port, "GET", "/nowhere").headers


def test_tokens_and_back(server: Running) -> None:
    said = json.loads(post(server, {"prompt": "Hello 🙂"}, "/tokenize").body)
    assert said["count"] == len(said["tokens"])
    assert said["max_model_len"] == 512
    back = json.loads(post(server, {"tokens": said["tokens"]}, "/detokenize").body)
    assert back == {"prompt": "Hello 🙂"}
    talk = {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True}
    said = json.loads(post(server, talk, "/tokenize").body)
    assert len(said["token_strs"]) == said["count"]


def test_heads_may_come_in_pieces_and_requests_together(server: Running) -> None:
    data = json.dumps(BODY).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer " + KEYS["ann"].encode() + b"\r\n"
        b"Content-Length: " + str(len(data)).encode() + b"\r\n\r\n" + data
    )
    with open_socket(server.port) as raw:
        for at in range(0, len(request), 7):
            raw.sendall(request[at : at + 7])
        assert read_reply(raw).status == 200
        raw.sendall(request * 3)
        assert [read_reply(raw).status for _ in range(3)] == [200] * 3


def test_what_is_not_http_gets_the_same_shape(server: Running) -> None:
    with open_socket(server.port) as raw:
        raw.sendall(b"what?\r\n\r\n")
        reply = read_reply(raw)
    assert reply.status == 400
    assert error(reply)["code"] == "invalid_http"
    assert reply.headers["x-request-id"].startswith("req-")


def test_curl_reads_a_stream(server: Running) -> None:
    done = subprocess.run(
        ["curl", "-sSN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json",
         "-H", f"Authorization: Bearer {KEYS['ann']}",
         "-d", json.dumps({**BODY, "stream": True, "ignore_eos": True})],
        capture_output=True, check=True,
    )  # fmt: skip
    *events, done_event, empty = done.stdout.decode().split("\n\n")
    assert (done_event, empty) == ("data: [DONE]", "")
    assert all(json.loads(each.removeprefix("data: "))["id"] for each in events)


def test_a_connection_stays_open_between_requests(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        for _ in range(2):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert read_reply(raw).status == 200
