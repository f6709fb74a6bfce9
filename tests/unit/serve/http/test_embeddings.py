"""Embeddings, asked by OpenAI's own client: the vectors of each input by itself."""

import base64
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from equipoise.serve.http.keys import hash_key, make_key
from equipoise.serve.http.tenants import Tenant, Tenants
from support.serving.engine import END, small_decoder
from support.serving.http.raw import ask
from support.serving.http.scrape import scraped
from support.serving.http.served import MODEL, Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(iteration_s=3e-3, prefill_iteration_s=3e-3) as server:  # long inputs in chunks
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def embedded(ids: list[int]) -> torch.Tensor:
    """The last token's hidden state after the last norm, of length 1, by the decoder itself."""
    decoder = small_decoder()
    with torch.no_grad():
        x_tD = decoder.run_layers(decoder.begin(torch.tensor(ids)), [len(ids)], decoder.layers)
        x_D = decoder.norm(x_tD)[-1]
    return x_D / x_D.norm()


def test_vectors_are_those_of_each_input_by_itself(server: Running, client: openai.OpenAI) -> None:
    encode = server.state.model.tokenizer.encode
    texts = ["Hello world", "a", "🙂 wörld " * 20, "Hello world"]
    many = client.embeddings.create(model=MODEL, input=texts)
    assert (many.object, many.model) == ("list", MODEL)
    assert [each.index for each in many.data] == [0, 1, 2, 3]
    assert many.usage.prompt_tokens == many.usage.total_tokens == sum(map(len, map(encode, texts)))
    for each, text in zip(many.data, texts, strict=True):
        assert torch.tensor(each.embedding).sub(embedded(encode(text))).abs().max() < 1e-5
        assert math.hypot(*each.embedding) == pytest.approx(1.0)
    ids = client.embeddings.create(model=MODEL, input=[encode(text) for text in texts])
    for given, text in zip(ids.data, many.data, strict=True):
        assert given.embedding == pytest.approx(text.embedding, abs=1e-6)
    one = client.embeddings.create(model=MODEL, input=encode("a"), encoding_format="float")
    assert one.data[0].embedding == pytest.approx(many.data[1].embedding, abs=1e-6)


def test_base64_holds_the_same_numbers(server: Running) -> None:
    def post(form: str) -> Any:
        body = {"input": "Hello", "encoding_format": form}
        return json.loads(
            ask(server.port, "POST", "/v1/embeddings", json.dumps(body).encode()).body
        )

    numbers = post("float")["data"][0]["embedding"]
    packed = base64.b64decode(post("base64")["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(packed) // 4}f", packed)) == pytest.approx(numbers, abs=1e-6)
    assert len(numbers) == server.state.model.width


def test_more_inputs_than_are_computed_together() -> None:
    """Also more than wait in the queue, and more than their tenant may have at a time."""
    key, few = make_key(), Tenant("few", concurrency=3)
    tenants = Tenants({"few": few}, {hash_key(key): few})
    with running(tenants, most_sequences=8, queued_requests=40) as server:
        inputs = [[at % 200 + 5, 9] for at in range(100)]
        answer = server.client(key).embeddings.create(model=MODEL, input=inputs)
        assert server.state.limits["few"].running == 0
        said = scraped(server, {"Authorization": f"Bearer {key}"})
    for each, ids in zip(answer.data, inputs, strict=True):
        assert torch.tensor(each.embedding).sub(embedded(ids)).abs().max() < 1e-5
    assert said["equipoise_prompt_tokens_total", "few"] == answer.usage.prompt_tokens == 200
    assert said["equipoise_request_success_total", "stop"] == 100


def test_the_prefix_cache_is_used(server: Running) -> None:
    prompt = [*range(30, 130)]
    before = scraped(server)["equipoise_prefix_cache_hits_total", ""]
    first, again = (server.client().embeddings.create(model=MODEL, input=prompt) for _ in range(2))
    assert scraped(server)["equipoise_prefix_cache_hits_total", ""] - before == 96
    assert again.data[0].embedding == pytest.approx(first.data[0].embedding, abs=1e-5)


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "Missing parameter: 'input'.", "input", "missing_required_parameter"),
    ({"input": ""}, "'input' has an empty text. Leave it out.", "input", "invalid_value"),
    ({"input": ["a", ""]}, "'input' has an empty text. Leave it out.", "input", "invalid_value"),
    (
        {"input": []},
        "'input' must be a text, a list of texts, token ids, or a list of lists of token ids.",
        "input",
        "invalid_value",
    ),
    ({"input": [[]]}, "'input' has a list without a token id.", "input", "invalid_value"),
    (
        {"input": ["a"] * 2049},
        "'input' must have at most 2,048 inputs; it has 2,049.",
        "input",
        "invalid_value",
    ),
    (
        {"input": [280]},
        "'input' has token 280, and the model's tokens are 0 to 279.",
        "input",
        "invalid_value",
    ),
    (
        {"input": [END] * 513},
        "The model's context is 512 tokens; the input has 513 tokens. Shorten the input.",
        "input",
        "context_length_exceeded",
    ),
    (
        {"input": "é" * 9000},
        "The model's context is 512 tokens; the input has 18,000 tokens. Shorten the input.",
        "input",
        "context_length_exceeded",
    ),
    (
        {"input": "a", "dimensions": 8},
        "'dimensions' must be 32, the width of tiny, or left out: the model was not trained to "
        "have its vectors cut.",
        "dimensions",
        "invalid_value",
    ),
    (
        {"input": "a", "encoding_format": "int8"},
        "'encoding_format' must be 'float' or 'base64', not \"int8\".",
        "encoding_format",
        "invalid_value",
    ),
    (
        {"input": "a", "dimension": 32},
        "Unknown parameter: 'dimension'. Nearest: 'dimensions'.",
        "dimension",
        "unknown_parameter",
    ),
]


@pytest.mark.parametrize(("body", "message", "param", "code"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(
    server: Running, body: dict[str, Any], message: str, param: str, code: str
) -> None:
    reply = ask(server.port, "POST", "/v1/embeddings", json.dumps(body).encode())
    assert reply.status == 400
    assert json.loads(reply.body)["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }


def test_an_input_as_long_as_the_context_and_the_models_own_dimensions(
    client: openai.OpenAI,
) -> None:
    answer = client.embeddings.create(model=MODEL, input=[7] * 512, dimensions=32)
    assert answer.usage.prompt_tokens == 512
