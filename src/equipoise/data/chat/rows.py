"""Rows of a corpus as conversations, or as prompts with completions; anything else is refused.

What it decides
    Which columns a format reads, and what a message is: a role, and text (``content``, one string
    or a list of parts that are text) or calls of tools. ShareGPT's ``conversations`` with ``from``
    and ``value`` become messages. A prompt and its completion are two strings, or two lists of
    messages.

    A wrong row is never left out: a typo in a key would otherwise train on an empty answer.

Kept true (tests/unit/data/chat/test_rows.py)
    The whole text of each refusal.

Sources
    Formats: OpenAI's chat completions; TRL 1.16, "Dataset formats and types".
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.base.nearest import nearest
from equipoise.base.read import parse_json
from equipoise.base.shown import listed, shorten, shown
from equipoise.data.fields import MissingFieldError, walk

Message = Mapping[str, Any]
"""One turn of a conversation: role, content and whatever else its template reads."""

Row = Mapping[str, Any]
"""The columns of a row that its format reads, by name."""

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")

_SPEAKERS = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "function_response": "tool"}
"""ShareGPT's names of roles."""

_TOOLS = "tools"
_MESSAGES = ("messages", "conversations")
_PAIR = ("prompt", "completion")
PARTS = "parts"
"""Column of rows whose documents have images and sound; see ``data.modality.rows``."""


class RowError(Exception):
    """A row is not what its format says; with the reason and the fix, for a sentence."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and which of them are there to be learned from."""

    messages: tuple[Message, ...]
    tools: Sequence[Any] | None = None
    asked: int | None = None
    """Messages of the prompt, where all that follows is its completion."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its completion, as text."""

    prompt: str
    completion: str


def columns_of(kind: str, field: str) -> tuple[str, ...]:
    """The columns that a format reads; of a text its one column.

    >>> columns_of("messages", "text"), columns_of("messages", "chat")
    (('messages', 'conversations', 'tools'), ('chat', 'tools'))
    """
    if kind == "text":
        return (field,)
    if kind == "messages":
        return (*(_MESSAGES if field == "text" else (field,)), _TOOLS)
    return (*_PAIR, _TOOLS)


def read_columns(kind: str, field: str, names: Sequence[str]) -> list[str]:
    """The columns of a table that a format reads; of a nested field, the outermost.

    >>> read_columns("messages", "chat.turns", ["id", "chat", "tools"])
    ['chat', 'tools']
    """
    wanted = columns_of(kind, field)
    outer = [each if each in names else each.partition(".")[0] for each in wanted]
    return [each for each in outer if each in names]


def pick_columns(row: Row, kind: str, field: str) -> Row:
    """The columns of a row that its format reads.

    Raises:
        RowError: it lacks one.
    """
    names = columns_of(kind, field)
    picked = {name: row[name] for name in names if row.get(name) is not None}
    if kind == "messages" and field != "text" and field not in picked:
        try:
            picked[field] = walk(row, field)
        except MissingFieldError as error:
            raise RowError(
                f"{error} Set data.field to the column that holds the messages."
            ) from None
    wanted = _PAIR if kind != "messages" else names[:-1]
    is_whole = all(each in picked for each in wanted) if kind != "messages" else len(picked)
    if is_whole and set(picked) != {_TOOLS}:
        return picked
    missing = next(each for each in wanted if each not in picked)
    if missing in row:
        raise RowError(f'has null in "{missing}". Write one, or remove the row.')
    if not row:
        raise RowError("is an empty object. Write a row, or remove it.")
    hint = "" if not any(row) else f' Nearest: "{shorten(nearest(missing, row))}".'
    raise RowError(
        f'has no column "{missing}" among its {len(row)} ({listed(row)}).{hint} '
        + (
            "Set data.field to the column that holds the messages."
            if kind == "messages"
            else 'Name the columns "prompt" and "completion".'
        )
    )


def texts_of(row: Row) -> str:
    """All strings of a row's columns, to train a tokenizer on."""
    if PARTS in row:
        return "".join(part.get("text", "") for part in row[PARTS])
    return "".join(value for name, value in row.items() if isinstance(value, str))


def read_row(row: Row) -> Conversation | Pair:
    """What a row holds.

    Args:
        row: As ``pick_columns`` returns it.

    Raises:
        RowError: it is malformed.
    """
    tools = _read_tools(row.get(_TOOLS))
    if not set(_PAIR) <= set(row):
        name = next(name for name in row if name != _TOOLS)
        return Conversation(_read_messages(row[name], name), tools)
    prompt, completion = (row[name] for name in _PAIR)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise RowError('has an empty "completion". Write one, or remove the row.')
        if tools is not None:
            raise RowError(
                'has "tools" beside a prompt that is text, which no template writes out. Give the '
                "prompt as messages, or remove the tools."
            )
        return Pair(prompt, completion)
    kinds = {type(prompt), type(completion)}
    if str in kinds or list not in kinds:
        raise RowError(
            f'has {_kind(prompt)} in "prompt" and {_kind(completion)} in "completion". Give text '
            "in both, or a list of messages in both."
        )
    asked = _read_messages(prompt, "prompt")
    return Conversation(asked + _read_messages(completion, "completion"), tools, len(asked))


def _read_tools(value: Any) -> Sequence[Any] | None:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            raise RowError('has text in "tools" that is not JSON. Give a list of tools.') from None
    if not value:
        return None
    if not isinstance(value, list):
        raise RowError(f'has {_kind(value)} in "tools". Give a list of JSON schemas.')
    for each in value:
        if not isinstance(each, Mapping):
            raise RowError(f'has {_kind(each)} in its list of "tools". Give JSON schemas.')
    return list(value)


def _read_messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise RowError(
            f'has {_kind(value)} in "{name}". Give a list of messages, each with "role" and '
            '"content".'
        )
    if not value:
        raise RowError(f'has an empty list in "{name}". Add messages, or remove the row.')
    return tuple(_read_message(each, f"message {at}") for at, each in enumerate(value, start=1))


def _read_message(given: Any, name: str) -> Message:
    if not isinstance(given, Mapping):
        raise RowError(
            f'{name} is {_kind(given)}. Write it as {{"role": "...", "content": "..."}}.'
        )
    value = dict(given)
    if "role" not in value and "from" in value:
        speaker = value["from"]
        rest = {key: each for key, each in value.items() if key not in ("from", "value")}
        role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
        value = {"role": role, **({"content": value["value"]} if "value" in value else {}), **rest}
    for key in ("role", "content"):
        if value.get(key) is None and not (key == "content" and _says_otherwise(value)):
            if key in value:
                raise RowError(f'{name} has null in "{key}". Write one, or remove the message.')
            others = ", ".join(map(str, value)) or "none"
            raise RowError(f'{name} has no "{key}" among its keys ({others}). Add it.')
    role, content = value["role"], value.get("content")
    if not isinstance(role, str):
        raise RowError(f'{name} has {_kind(role)} in "role". Give text.')
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                given = part.get("type") if isinstance(part, Mapping) else part
                raise RowError(
                    f"{name} has a part {shown(given)} in its content, and only parts of text are "
                    'read: {"type": "text", "text": "..."}. Give the content as one string.'
                )
            if not isinstance(part.get("text"), str):
                raise RowError(f'{name} has a part without "text" in its content. Add it.')
    elif content is not None and not isinstance(content, str):
        raise RowError(f'{name} has {_kind(content)} in "content". Give text.')
    return value


def _says_otherwise(message: Message) -> bool:
    """Whether a message says something without content: calls of tools, or reasoning."""
    return bool(message.get("tool_calls") or message.get("function_call"))


def require_roles(messages: Iterable[Message], template: str) -> None:
    """Refuse a role that neither everybody knows nor the template names.

    Raises:
        RowError: a role is most likely a typo.
    """
    for at, message in enumerate(messages, start=1):
        role = message["role"]
        if role in ROLES or f"'{role}'" in template or f'"{role}"' in template:
            continue
        raise RowError(
            f"message {at} has the role {shown(role)}, which the chat template does not name. "
            f'Nearest: "{nearest(role, ROLES)}".'
        )


def without_nulls(value: Any) -> Any:
    """A value of an Arrow column, whose structs hold a null for each key that a row lacks.

    >>> without_nulls([{"role": "user", "tool_calls": None}])
    [{'role': 'user'}]
    """
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {str: "text", list: "a list", dict: "an object", bool: "a boolean"}
    return names.get(type(value), f"the number {json.dumps(value, default=str)}")
