"""The fields of every body, strictly typed; an unknown one is refused by name.

What it decides
    What OpenAI's API has and this server cannot do is a known field with one allowed value: the
    one that asks for nothing. Any other is refused with the reason. Further fields, which other
    servers have too, are ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``,
    ``ignore_eos``, ``stop_token_ids`` and ``cache_salt``.

Sources
    OpenAI's API reference, "Completions", "Chat Completions" and "Embeddings"; vLLM 0.32,
    "OpenAI-Compatible Server", extra parameters.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

_STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, frozen=True, validate_default=True
)

MOST_SEQUENCES = 128
"""Most answers of one request: prompts times ``n`` or ``best_of``."""
MOST_MESSAGES = 4_096
"""Most turns of a conversation."""
_MOST_INPUTS = 2_048
"""As OpenAI has it."""
_MOST_STOPS = 4
_LONGEST_STOP = 1_000
_MOST_BIASES = 1_024
"""Tokens whose logits one request may change: every token of its answers pays for all of them."""
_WIDEST = 2**63


def _require_unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is not text.") from None
    return text


class StreamOptions(BaseModel):
    """What a stream says beside its text."""

    model_config = _STRICT
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    @model_validator(mode="after")
    def _judge_parts(self) -> "StreamOptions":
        if self.include_obfuscation:
            raise ValueError("has include_obfuscation, which is not supported. Leave it out.")
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError(
                "has continuous_usage_stats, which needs include_usage: true. Give both or neither."
            )
        return self


class Body(BaseModel):
    """Fields of all bodies that ask for text."""

    model_config = _STRICT
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=_WIDEST)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Any = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Any = None
    seed: Annotated[int, Field(ge=-_WIDEST, lt=_WIDEST)] | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_WIDEST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=_WIDEST)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=128)] | None = (
        None
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: int | None = None

    @field_validator("stop", mode="after")
    @classmethod
    def _judge_stop(cls, stop: Any) -> tuple[str, ...]:
        stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
            raise ValueError("must be text, or a list of texts.")
        if len(stops) > _MOST_STOPS:
            raise ValueError(f"must have at most {_MOST_STOPS} texts; it has {len(stops):,}.")
        if any(not 0 < len(each) <= _LONGEST_STOP for each in stops):
            raise ValueError(f"must have texts of 1 to {_LONGEST_STOP:,} characters.")
        return tuple(map(_require_unicode, stops))

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _judge_bias(cls, biases: Any) -> Mapping[int, float]:
        if biases is None:
            return {}
        if not isinstance(biases, dict):
            raise ValueError("must be an object of token ids and numbers from -100 to 100.")
        if len(biases) > _MOST_BIASES:
            raise ValueError(f"must have at most {_MOST_BIASES:,} tokens; it has {len(biases):,}.")
        judged = {}
        for token, bias in biases.items():
            if not (token.isascii() and token.isdigit() and len(token) < 12):
                raise ValueError(f"has the key {json.dumps(token[:20])}, which is not a token id.")
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise ValueError(f"must be a number from -100 to 100 for token {token}.")
            if int(token) in judged:
                raise ValueError(f"has token {int(token)} twice. Give it once.")
            judged[int(token)] = float(bias)
        return judged

    @field_validator("cache_salt", mode="after")
    @classmethod
    def _judge_salt(cls, salt: str | None) -> str | None:
        return salt if salt is None else _require_unicode(salt)

    @field_validator("priority", mode="after")
    @classmethod
    def _judge_priority(cls, priority: int | None) -> int | None:
        if priority:
            raise ValueError(
                "must be 0: who is served first follows from the tenants' shares. Leave it out."
            )
        return priority

    @model_validator(mode="after")
    def _judge_options(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true. Give both or neither.")
        return self


Prompts = tuple[str | tuple[int, ...], ...]
"""Texts, or token ids."""


def _judge_prompts(prompt: Any) -> Prompts:
    """The prompts that a field holds: a text, token ids, or a list of either."""
    match prompt:
        case str():
            return (_require_unicode(prompt),)
        case [int(), *_] if _are_ids(prompt):
            return (tuple(prompt),)
        case [str(), *_] if all(isinstance(each, str) for each in prompt):
            return tuple(map(_require_unicode, prompt))
        case [[*_], *_] if all(isinstance(each, list) and _are_ids(each) for each in prompt):
            if not all(prompt):
                raise ValueError("has a list without a token id.")
            return tuple(map(tuple, prompt))
    raise ValueError("must be a text, a list of texts, token ids, or a list of lists of token ids.")


def _are_ids(ids: Sequence[Any]) -> bool:
    return all(type(each) is int and 0 <= each < _WIDEST for each in ids)


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: Any
    suffix: Literal[""] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    @field_validator("prompt", mode="after")
    @classmethod
    def _judge_prompt(cls, prompt: Any) -> Prompts:
        return _judge_prompts(prompt)

    @field_validator("suffix", mode="before")
    @classmethod
    def _judge_suffix(cls, suffix: Any) -> Any:
        if suffix:
            raise ValueError("is not supported: the model continues text and fills no gaps.")
        return suffix

    @model_validator(mode="after")
    def _judge_numbers(self) -> "CompletionBody":
        best, n = self.best_of, self.n or 1
        if best is not None and best < n:
            raise ValueError(f"best_of is {best} and n is {n}. best_of must be at least n.")
        if best is not None and best > n and self.stream:
            raise ValueError(
                "best_of cannot be streamed: the best is known at the end. Leave stream out."
            )
        if not self.max_tokens and self.max_tokens is not None and not self.echo:
            raise ValueError("max_tokens is 0, so there is no answer. Ask for 1, or give echo.")
        return self


_ONLY_TEXT = "must be text, or a list of parts {type: text, text: ...}: the model reads only text."


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = _STRICT
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any
    name: str | None = None
    tool_call_id: str | None = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    tool_calls: Any = None
    function_call: Any = None
    type: Annotated[Literal["text"] | None, Field(exclude=True)] = None
    """lm-eval sends it; no chat template reads it."""

    @field_validator("content", mode="after")
    @classmethod
    def _judge_content(cls, content: Any) -> str:
        if isinstance(content, list):
            texts = []
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text":
                    raise ValueError(_ONLY_TEXT)
                text = part.get("text")
                if not isinstance(text, str) or set(part) != {"type", "text"}:
                    raise ValueError(_ONLY_TEXT)
                texts.append(text)
            return _require_unicode("\n".join(texts))  # as vLLM and llama.cpp have it
        if not isinstance(content, str):
            raise ValueError(_ONLY_TEXT)
        return _require_unicode(content)

    @field_validator("name", "tool_call_id", mode="after")
    @classmethod
    def _judge_name(cls, name: str | None) -> str | None:
        return name if name is None else _require_unicode(name)

    @field_validator("tool_calls", "function_call", "audio", "refusal", "annotations")
    @classmethod
    def _judge_rest(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported: messages are text. Leave it out.")
        return None


_Talk = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]


_NOTHING_ASKED = {"reasoning_effort": "none", "verbosity": "medium"}
"""Values of fields that change nothing, beside their absence."""


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    messages: _Talk
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_WIDEST)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: str | None = None
    moderation: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None

    @field_validator(
        "tools",
        "functions",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "store",
        "metadata",
        "moderation",
        "prompt_cache_options",
    )
    @classmethod
    def _judge_absent(cls, value: Any, info: ValidationInfo) -> None:
        if value and value != _NOTHING_ASKED.get(str(info.field_name)):
            raise ValueError("is not supported by this server. Leave it out.")

    @field_validator("tool_choice", "function_call")
    @classmethod
    def _judge_choice(cls, value: Any) -> None:
        if value not in (None, "none", "auto"):
            raise ValueError("is not supported by this server: there are no tools. Leave it out.")

    @field_validator("response_format")
    @classmethod
    def _judge_format(cls, value: Any) -> None:
        if value is not None and value != {"type": "text"}:
            raise ValueError(
                'must be {"type": "text"}: answers in JSON are not enforced. Ask for JSON in a '
                "message."
            )

    @field_validator("modalities")
    @classmethod
    def _judge_modalities(cls, value: Any) -> None:
        if value not in (None, ["text"]):
            raise ValueError('must be ["text"].')

    @field_validator("service_tier")
    @classmethod
    def _judge_tier(cls, value: Any) -> None:
        if value not in (None, "auto", "default"):
            raise ValueError('must be "auto" or "default".')

    @model_validator(mode="after")
    def _judge_numbers(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true. Give both or neither.")
        if self.max_tokens == 0:
            raise ValueError("max_tokens must be at least 1.")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError(
                "max_tokens is the old name of max_completion_tokens. Give one of them."
            )
        return self


class EmbeddingsBody(BaseModel):
    """``POST /v1/embeddings``."""

    model_config = _STRICT
    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    @field_validator("input", mode="after")
    @classmethod
    def _judge_input(cls, given: Any) -> Prompts:
        inputs = _judge_prompts(given)
        if len(inputs) > _MOST_INPUTS:
            raise ValueError(f"must have at most {_MOST_INPUTS:,} inputs; it has {len(inputs):,}.")
        if not all(inputs):
            raise ValueError("has an empty text. Leave it out.")
        return inputs


class TokenizeBody(BaseModel):
    """``POST /tokenize``: a text, or a conversation."""

    model_config = _STRICT
    model: str | None = None
    prompt: str | None = None
    messages: _Talk | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @field_validator("prompt", mode="after")
    @classmethod
    def _judge_prompt(cls, prompt: str | None) -> str | None:
        return prompt if prompt is None else _require_unicode(prompt)

    @model_validator(mode="after")
    def _judge_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Give prompt or messages, one of them.")
        return self


class DetokenizeBody(BaseModel):
    """``POST /detokenize``."""

    model_config = _STRICT
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=_WIDEST)]], FailFast()]
