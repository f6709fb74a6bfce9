"""Bodies: what is refused, and with which words."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import model_validator

from equipoise.serve.http.body import judge
from equipoise.serve.http.fault import HttpError
from equipoise.serve.http.fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

REFUSED: list[tuple[dict[str, Any], str | None, str, str]] = [
    (
        {"prompt": "a", "max_token": 3},
        "max_token",
        "unknown_parameter",
        "Unknown parameter: 'max_token'. Nearest: 'max_tokens'.",
    ),
    ({}, "prompt", "missing_required_parameter", "Missing parameter: 'prompt'."),
    (
        {"prompt": 3},
        "prompt",
        "invalid_value",
        "'prompt' must be a text, a list of texts, token ids, or a list of lists of token ids.",
    ),
    (
        {"prompt": "a", "temperature": "hot"},
        "temperature",
        "invalid_type",
        "'temperature' must be a number, not \"hot\".",
    ),
    (
        {"prompt": "a", "temperature": 2.5},
        "temperature",
        "invalid_value",
        "'temperature' must be at most 2; it is 2.5.",
    ),
    (
        {"prompt": "a", "temperature": float("nan")},
        "temperature",
        "invalid_value",
        "'temperature' must be a finite number, not NaN.",
    ),
    ({"prompt": "a", "top_p": 0}, "top_p", "invalid_value", "'top_p' must be above 0; it is 0."),
    ({"prompt": "a", "n": 0}, "n", "invalid_value", "'n' must be at least 1; it is 0."),
    ({"prompt": "a", "n": True}, "n", "invalid_type", "'n' must be a whole number, not true."),
    (
        {"prompt": "a", "n": 3, "best_of": 2},
        "best_of",
        "invalid_value",
        "best_of is 2 and n is 3. best_of must be at least n.",
    ),
    (
        {"prompt": "a", "n": 1, "best_of": 2, "stream": True},
        "best_of",
        "invalid_value",
        "best_of cannot be streamed: the best is known at the end. Leave stream out.",
    ),
    (
        {"prompt": "a", "stop": list("abcde")},
        "stop",
        "invalid_value",
        "'stop' must have at most 4 texts; it has 5.",
    ),
    (
        {"prompt": "a", "stop": ""},
        "stop",
        "invalid_value",
        "'stop' must have texts of 1 to 1,000 characters.",
    ),
    (
        {"prompt": "a", "logit_bias": {"x": 1}},
        "logit_bias",
        "invalid_value",
        "'logit_bias' has the key \"x\", which is not a token id.",
    ),
    (
        {"prompt": "a", "logit_bias": {"5": 101}},
        "logit_bias",
        "invalid_value",
        "'logit_bias' must be a number from -100 to 100 for token 5.",
    ),
    (
        {"prompt": "a", "logit_bias": {str(token): 1 for token in range(1_025)}},
        "logit_bias",
        "invalid_value",
        "'logit_bias' must have at most 1,024 tokens; it has 1,025.",
    ),
    (
        {"prompt": "a", "logit_bias": {"5": 1, "05": 2}},
        "logit_bias",
        "invalid_value",
        "'logit_bias' has token 5 twice. Give it once.",
    ),
    (
        {"prompt": "a", "max_tokens": 0},
        "max_tokens",
        "invalid_value",
        "max_tokens is 0, so there is no answer. Ask for 1, or give echo.",
    ),
    (
        {"prompt": "a", "suffix": "b"},
        "suffix",
        "invalid_value",
        "'suffix' is not supported: the model continues text and fills no gaps.",
    ),
    (
        {"prompt": "a", "stream_options": {"include_usage": True}},
        "stream_options",
        "invalid_value",
        "stream_options needs stream: true. Give both or neither.",
    ),
    (
        {"prompt": "a", "stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
        "unknown_parameter",
        "Unknown parameter: 'stream_options.usage'. Nearest: 'include_usage'.",
    ),
    (
        {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options",
        "invalid_value",
        "'stream_options' has continuous_usage_stats, which needs include_usage: true. Give both "
        "or neither.",
    ),
    (
        {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options",
        "invalid_value",
        "'stream_options' has include_obfuscation, which is not supported. Leave it out.",
    ),
    (
        {"prompt": "a", "priority": 3},
        "priority",
        "invalid_value",
        "'priority' must be 0: who is served first follows from the tenants' shares. Leave it out.",
    ),
    (
        {"prompt": "\ud800"},
        "prompt",
        "invalid_value",
        "'prompt' has half of a surrogate pair, which is not text.",
    ),
    (
        {"prompt": "a", "\ud800": 1},
        None,
        "invalid_value",
        "The name of a field has half of a surrogate pair, which is not text.",
    ),
    (
        {"prompt": "a", "stream": True, "stream_options": {"\ud800": 1}},
        "stream_options",
        "invalid_value",
        "'stream_options' has half of a surrogate pair, which is not text.",
    ),
    (
        {"prompt": "a", "logit_bias": {"\ud800": 1}},
        "logit_bias",
        "invalid_value",
        "'logit_bias' has the key \"\\ud800\", which is not a token id.",
    ),
    (
        {"prompt": "a", "n": 0, "top_p": 2, "logprobs": 21},
        "top_p",
        "invalid_value",
        "'top_p' must be at most 1; it is 2. 'n' must be at least 1; it is 0. 'logprobs' must be "
        "at most 20; it is 21.",
    ),
]


@pytest.mark.parametrize(("value", "param", "code", "message"), REFUSED)
def test_what_is_wrong_is_said_by_name(
    value: dict[str, Any], param: str | None, code: str, message: str
) -> None:
    with pytest.raises(HttpError) as refused:
        judge(value, CompletionBody)
    assert refused.value.status == 400
    assert refused.value.body == {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": param,
            "code": code,
        }
    }


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_names_in_a_conversation_are_text(field: str) -> None:
    message = {"role": "user", "content": "a", field: "\ud800"}
    with pytest.raises(HttpError) as refused:
        judge({"messages": [message]}, ChatBody)
    assert refused.value.status == 400 and refused.value.param == f"messages[0].{field}"
    assert refused.value.message == (
        f"'messages[0].{field}' has half of a surrogate pair, which is not text."
    )


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_have_four_forms(prompt: Any, read: Any) -> None:
    assert judge({"prompt": prompt}, CompletionBody).prompt == read


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [[1], "a"], [True], [-1], [[1], []], [1.0]])
def test_mixed_or_empty_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(HttpError):
        judge({"prompt": prompt}, CompletionBody)


def test_what_asks_for_nothing_is_let_through() -> None:
    body = judge(
        {
            "messages": [{"role": "assistant", "content": "a", "refusal": None, "tool_calls": []}],
            "tools": None,
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "service_tier": "auto",
            "modalities": ["text"],
            "store": False,
        },
        ChatBody,
    )
    assert body.messages[0].content == "a"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KINDS = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


@settings(max_examples=50)
@given(st.sampled_from(KINDS), st.data())
def test_whatever_the_value_it_is_read_or_refused(kind: Any, data: st.DataObject) -> None:
    names = st.sampled_from([*kind.model_fields]) | st.text(max_size=6)
    value = data.draw(st.dictionaries(names, JSON, max_size=6))
    try:
        judge(value, kind)
    except HttpError as refused:
        assert refused.status == 400
        assert refused.message


def test_what_asks_for_nothing_is_let_by() -> None:
    nothing = dict.fromkeys(("audio", "prediction", "verbosity", "web_search_options", "tools"))
    nothing |= {"metadata": {}, "store": False, "tool_choice": "none", "modalities": ["text"]}
    talk = [{"role": "user", "content": "a"}]
    hints = {"prompt_cache_key": "b", "prompt_cache_retention": "24h", "safety_identifier": "c"}
    assert judge({"messages": talk, **nothing, **hints}, ChatBody).messages[0].content == "a"


def judged_fields(value: dict[str, Any], kind: Any) -> list[int]:
    """How many fields are judged each time."""
    sizes = list[int]()

    class Noted(kind):  # type: ignore[misc]
        @model_validator(mode="before")
        @classmethod
        def _note(cls, given: Any) -> Any:
            sizes.append(len(given))
            return given

    with pytest.raises(HttpError):
        judge(value, Noted)
    return sizes


def test_thousands_of_faults_are_counted_and_the_first_described() -> None:
    strange = {f"k{at}": 1 for at in range(2_000)}
    messages = [{"role": "user", "content": "a", **strange}, *[{"role": "x"}] * 2_000]
    for value, kind, message in (
        (
            {"prompt": "a", "n": 0, **strange},
            CompletionBody,
            "'n' must be at least 1; it is 0. Unknown parameter: 'k0'. Nearest: 'top_k'. Unknown "
            "parameter: 'k1'. Nearest: 'top_k'. Unknown parameter: 'k2'. Nearest: 'top_k'. Unknown "
            "parameter: 'k3'. Nearest: 'top_k'. There are 1,996 more faults.",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}] * 70 + [{"role": "x"}] * 600},
            ChatBody,
            "There are 1,200 faults.",
        ),
    ):
        with pytest.raises(HttpError) as refused:
            judge(value, kind)
        assert refused.value.message == message
    with pytest.raises(HttpError) as refused:
        judge({"messages": messages}, ChatBody)
    assert refused.value.param == "messages[0].k0"
    assert refused.value.message.endswith("There are 5,995 more faults.")
    assert judged_fields({"prompt": "a", **strange}, CompletionBody) == [65]
    spread = [{"role": "user", "content": "a", "k0": 1, "k1": 1}] * 900
    with pytest.raises(HttpError) as refused:
        judge({"messages": spread}, ChatBody)
    assert refused.value.param == "messages[0].k0"
    assert refused.value.message.endswith("There are 1,795 more faults.")
    tokens = {"tokens": ["a"] * 3_000}  # the first one says enough, and the rest costs time
    with pytest.raises(HttpError) as refused:
        judge(tokens, DetokenizeBody)
    assert refused.value.message == "'tokens[0]' must be a whole number, not \"a\"."
