"""Conversations, asked by OpenAI's own client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.chat.template import CHATML
from support.serving.engine import byte_level
from support.serving.http.served import MODEL, Running, running

TALK: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "Hello 🙂"}]},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def test_a_conversation_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=TALK, max_completion_tokens=8, temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs is None
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nHello 🙂<|im_end|>\n"
    ids = byte_level().encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids
    assert "im_start" in CHATML
    assert answer.usage.prompt_tokens == len(ids)


def test_what_asks_for_nothing_changes_nothing(client: openai.OpenAI) -> None:
    """Among it a message's type, which lm-eval sends."""

    def ask(talk: list[Any], **fields: Any) -> tuple[str | None, int]:
        answer = client.chat.completions.create(
            model=MODEL, messages=talk, max_tokens=4, temperature=0, extra_body=fields
        )
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    typed = [{**each, "type": "text"} for each in TALK]
    typed[0]["role"] = "developer"  # which the template does not name
    asked = {"reasoning_effort": "none", "verbosity": "medium", "moderation": None, "tools": []}
    assert ask(typed, **asked) == ask(TALK)


def test_parts_of_a_message_are_lines(client: openai.OpenAI) -> None:
    def count(content: Any) -> int:
        talk = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=1)
        return answer.usage.prompt_tokens

    parts = [{"type": "text", "text": text} for text in ("he", "llo")]
    assert count(parts) == count("he\nllo") != count("hello")


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 4, "n": 3},
    {"seed": 5, "logprobs": True, "top_logprobs": 3},
    {"seed": 6, "logprobs": True, "stop": ["e", " "]},
    {"seed": 7, "extra_body": {"ignore_eos": True}, "logprobs": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: ",".join(each))
def test_a_stream_joined_is_the_answer(client: openai.OpenAI, settings: dict[str, Any]) -> None:
    asked = {"model": MODEL, "messages": TALK, "max_tokens": 24, **settings}
    whole = client.chat.completions.create(**asked)
    chunks = [
        *client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        mine = [each for c in chunks for each in c.choices if each.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert all(each.delta.role is None for each in mine[1:])
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert [each.finish_reason for each in mine] == [
            *[None] * (len(mine) - 1),
            choice.finish_reason,
        ]
        if choice.logprobs is not None:
            joined = [x for each in mine if each.logprobs for x in each.logprobs.content]
            assert [x.bytes for x in joined] == [x.bytes for x in choice.logprobs.content]


def test_bytes_of_scored_tokens_join_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=TALK, max_tokens=60, seed=3, logprobs=True, top_logprobs=2,
        extra_body={"ignore_eos": True}, logit_bias={"0": -100},
    )  # fmt: skip
    choice = answer.choices[0]
    data = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
    assert data.decode("utf-8", "replace") == choice.message.content
    for each in choice.logprobs.content:
        assert len(each.top_logprobs) == 2
        assert each.top_logprobs[0].logprob >= each.logprob - 1e-6


def test_an_emoji_keeps_its_bytes_in_a_stream(client: openai.OpenAI) -> None:
    forced = byte_level().encode("🙂").ids
    assert len(forced) == 4
    answer = client.chat.completions.create(
        model=MODEL, messages=TALK, max_tokens=40, seed=1, logprobs=True, stream=True,
        logit_bias={str(token): 100 for token in forced},
    )  # fmt: skip
    chunks = [each for each in answer if each.choices]
    scored = [
        x for c in chunks for each in c.choices if each.logprobs for x in each.logprobs.content
    ]
    assert len(scored) == 40
    assert all(len(each.bytes) == 1 and each.token for each in scored)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert b"".join(bytes(x.bytes) for x in scored).decode("utf-8", "replace") == text


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "'tools' is not supported by this server. Leave it out.",
    ),
    (
        {"reasoning_effort": "low"},
        "reasoning_effort",
        "'reasoning_effort' is not supported by this server. Leave it out.",
    ),
    (
        {"prompt_cache_options": {"mode": "explicit"}},
        "prompt_cache_options",
        "'prompt_cache_options' is not supported by this server. Leave it out.",
    ),
    (
        {"messages": [{"role": "user", "content": "a" * 600}]},
        "messages",
        "The model's context is 512 tokens; the prompt has 650 tokens. Shorten the prompt or ask "
        "for fewer.",
    ),
    (
        {"response_format": {"type": "json_object"}},
        "response_format",
        '\'response_format\' must be {"type": "text"}: answers in JSON are not enforced. Ask for '
        "JSON in a message.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "'messages[0].content' must be text, or a list of parts {type: text, text: ...}: the model "
        "reads only text.",
    ),
    (
        {"messages": [{"role": "wizard", "content": "a"}]},
        "messages[0].role",
        "'messages[0].role' must be 'system', 'developer', 'user', 'assistant' or 'tool', not "
        '"wizard".',
    ),
    ({"messages": []}, "messages", "'messages' must have at least 1 entry."),
    (
        {"top_logprobs": 3},
        "top_logprobs",
        "top_logprobs needs logprobs: true. Give both or neither.",
    ),
    (
        {"max_completion_tokens": 600},
        "max_completion_tokens",
        "The model's context is 512 tokens; the prompt has 94 tokens and the answer may have 600 "
        "(max_completion_tokens), together 694. Shorten the prompt or ask for fewer.",
    ),
]


@pytest.mark.parametrize(("settings", "param", "message"), REFUSED)
def test_what_cannot_be_done_is_refused_clearly(
    client: openai.OpenAI, settings: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": MODEL, "messages": TALK, **settings})
    assert refused.value.body == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": refused.value.code,
    }
