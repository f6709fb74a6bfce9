"""Completions, asked by OpenAI's own client: text, streams, scores, usage."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.serve.http import send
from equipoise.serve.http.send import encode, encode_long
from support.serving.http.served import MODEL, Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def test_an_answer_has_the_shape_that_the_client_expects(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello world", temperature=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint == "fp_tiny"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.choices[0].logprobs is None
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens <= 16
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "n": 3, "top_p": 0.9},
    {"seed": 5, "stop": ["e", "or"]},
    {"seed": 6, "echo": True},
    {"seed": 7, "logprobs": 3},
    {"seed": 8, "logprobs": 2, "echo": True, "n": 2},
    {"seed": 9, "frequency_penalty": 1.5, "presence_penalty": -1, "logit_bias": {"70": 5}},
    {"seed": 10, "extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2}},
    {"seed": 11, "extra_body": {"ignore_eos": True, "min_tokens": 4}},
    {"seed": 12, "logprobs": 1, "stop": "a"},
]


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: ",".join(each))
@pytest.mark.parametrize("prompt", ["Hello 🙂 wörld", [[40, 41, 42], [7]]], ids=["text", "ids"])
def test_a_stream_joined_is_the_answer(
    client: openai.OpenAI, settings: dict[str, Any], prompt: Any
) -> None:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 24, **settings}
    whole = client.completions.create(**asked)
    chunks = [
        *client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        mine = [each for c in chunks for each in c.choices if each.index == choice.index]
        assert "".join(each.text for each in mine) == choice.text
        assert [each.finish_reason for each in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
        if choice.logprobs is not None:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [x for each in mine for x in getattr(each.logprobs, name)]
                expected = getattr(choice.logprobs, name)
                if name in ("tokens", "text_offset"):
                    assert joined == expected


def test_every_chunk_has_the_usage_so_far_if_asked(client: openai.OpenAI) -> None:
    """As guidellm asks every server."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=5, seed=3, stream=True, stream_options=options,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    usages = [each.usage for each in chunks]
    assert len({each.prompt_tokens for each in usages}) == 1
    counts = [each.completion_tokens for each in usages]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-2:] == [5, 5]


def test_the_same_seed_gives_the_same_text_and_answers_differ(client: openai.OpenAI) -> None:
    def texts(**settings: Any) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=20, n=4, **settings
        )
        return [choice.text for choice in answer.choices]

    assert texts(seed=1) == texts(seed=1)
    assert len(set(texts(seed=1))) > 1
    assert texts(seed=-5) == texts(seed=-5) != texts(seed=1)


def test_echo_scores_every_token_of_the_prompt_but_the_first(client: openai.OpenAI) -> None:
    text = "Hello 🙂 world"
    answer = client.completions.create(
        model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text == text
    assert choice.finish_reason == "length"
    scores = choice.logprobs
    assert scores is not None
    assert scores.token_logprobs[0] is None
    assert all(each <= 0 for each in scores.token_logprobs[1:])
    assert len(scores.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0
    for token, at in zip(scores.tokens, scores.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[at : at + len(token)] == token
    assert any(each.startswith("bytes:\\x") for each in scores.tokens)


def test_echo_without_an_answer_and_without_scores(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a b", "c"], max_tokens=0, echo=True)
    assert [choice.text for choice in answer.choices] == ["a b", "c"]


def test_scores_of_an_echo_are_those_of_generation(client: openai.OpenAI) -> None:
    generated = client.completions.create(
        model=MODEL, prompt=[40, 41, 42], max_tokens=8, seed=3, logprobs=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    scores = generated.choices[0].logprobs.token_logprobs
    ids = client.post(
        "/completions",
        body={"model": MODEL, "prompt": [40, 41, 42], "max_tokens": 8, "seed": 3, "logprobs": 0},
        cast_to=object,
    )
    assert ids
    assert len(scores) == 8


def test_best_of_sends_the_likeliest(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 10, "seed": 2}
    every = client.completions.create(**asked, n=4, logprobs=0)
    means = [
        sum(each.logprobs.token_logprobs) / len(each.logprobs.token_logprobs)
        for each in every.choices
        if each.finish_reason == "length"
    ]
    best = client.completions.create(**asked, n=1, best_of=4, logprobs=0)
    assert len(best.choices) == 1
    assert best.usage.completion_tokens == every.usage.completion_tokens
    mine = best.choices[0].logprobs.token_logprobs
    if best.choices[0].finish_reason == "length":
        assert sum(mine) / len(mine) == pytest.approx(max(means), rel=1e-5)


def test_a_logit_bias_forces_and_forbids(client: openai.OpenAI) -> None:
    forced = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=5, logit_bias={"66": 100}, logprobs=0
    )
    assert len(set(forced.choices[0].logprobs.tokens)) == 1
    free = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=5, temperature=0, logprobs=0
    )
    first = free.choices[0].logprobs.tokens[0]
    tokens = client.post(
        f"{str(client.base_url).removesuffix('/v1/')}/tokenize",
        body={"prompt": first}, cast_to=object,
    )["tokens"]  # fmt: skip
    if len(tokens) == 1:
        other = client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=5, temperature=0, logprobs=0,
            logit_bias={str(tokens[0]): -100},
        )  # fmt: skip
        assert first not in other.choices[0].logprobs.tokens


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    prompt = list(range(20, 80))
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < len(prompt)


def test_a_stop_string_is_never_in_the_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hello e", "max_tokens": 60, "seed": 1}
    free = client.completions.create(**asked, extra_body={"ignore_eos": True})
    text = free.choices[0].text
    stop = text[20:23]
    cut = client.completions.create(**asked, stop=stop, extra_body={"ignore_eos": True})
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_stop_string_in_the_prompt_ends_nothing(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "seed": 3, "logit_bias": {"40": 100}}
    answer = client.completions.create(prompt="END", stop="END", echo=True, **asked)
    assert answer.choices[0].text.startswith("END")
    assert answer.choices[0].finish_reason == "length"


def test_many_scores_are_written_beside_other_answers_and_are_the_same(
    client: openai.OpenAI,
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hello 🙂 " * 40, "max_tokens": 3, "seed": 2}
    asked |= {"echo": True, "logprobs": 2, "n": 2}
    whole = client.completions.create(**asked)
    chunks = [*client.completions.create(**asked, stream=True)]
    for choice in whole.choices:
        mine = [each for c in chunks for each in c.choices if each.index == choice.index]
        assert "".join(each.text for each in mine) == choice.text
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens) > 256
        for name in ("tokens", "text_offset"):
            joined = [x for each in mine for x in getattr(each.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=15)
@given(value=JSON, times=st.sampled_from([1, 256, 257]))
def test_what_is_written_in_slices_is_the_same(value: Any, times: int) -> None:
    value = {"choices": [value], "all": [value] * times}
    assert encode_long(value) == encode(value)


def test_rows_of_many_numbers_are_written_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    longest, write = 0, send._json

    def noted(value: Any) -> str:
        nonlocal longest
        text = write(value)
        longest = max(longest, len(text))
        return text

    rows = [{"index": at, "embedding": (0.5,) * 400} for at in range(300)]
    expected = encode({"data": rows})
    monkeypatch.setattr(send, "_json", noted)
    assert encode_long({"data": rows}) == expected
    assert longest < 10_000
