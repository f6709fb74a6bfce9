"""Rows of conversations: every malformed one is refused in one sentence, with its place."""

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.errors import DataError
from equipoise.data.cache.store import prepare
from equipoise.data.chat.rows import (
    Conversation,
    Pair,
    RowError,
    pick_columns,
    read_row,
    require_roles,
)
from equipoise.data.progress import SilentProgress
from equipoise.spec.run.spec import DataSpec

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def refusal(row: dict[str, Any], kind: str = "messages", field: str = "text") -> str:
    with pytest.raises(RowError) as caught:
        read = read_row(pick_columns(row, kind, field))
        assert isinstance(read, Conversation)
        require_roles(read.messages, "{{ messages[0]['observation'] }}")
    return str(caught.value)


MESSAGES = 'Give a list of messages, each with "role" and "content".'
REFUSED = [
    (
        {"message": [USER]},
        'has no column "messages" among its 1 (message). Nearest: "message". Set data.field to '
        "the column that holds the messages.",
    ),
    ({"messages": "Hi"}, f'has text in "messages". {MESSAGES}'),
    ({"messages": {"role": "user"}}, f'has an object in "messages". {MESSAGES}'),
    ({"messages": 3}, f'has the number 3 in "messages". {MESSAGES}'),
    ({"messages": []}, 'has an empty list in "messages". Add messages, or remove the row.'),
    (
        {"messages": ["Hi"]},
        'message 1 is text. Write it as {"role": "...", "content": "..."}.',
    ),
    (
        {"messages": [USER, {"role": "assistant", "contents": "Hello"}]},
        'message 2 has no "content" among its keys (role, contents). Add it.',
    ),
    (
        {"messages": [{"role": "user", "content": None}]},
        'message 1 has null in "content". Write one, or remove the message.',
    ),
    ({}, "is an empty object. Write a row, or remove it."),
    (
        {"messages": [{"content": "Hi"}]},
        'message 1 has no "role" among its keys (content). Add it.',
    ),
    (
        {"messages": [{"role": 7, "content": "Hi"}]},
        'message 1 has the number 7 in "role". Give text.',
    ),
    (
        {"messages": [{"role": "user", "content": True}]},
        'message 1 has a boolean in "content". Give text.',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]},
        'message 1 has a part "image" in its content, and only parts of text are read: '
        '{"type": "text", "text": "..."}. Give the content as one string.',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        'message 1 has a part without "text" in its content. Add it.',
    ),
    (
        {"messages": [USER, {"role": "asistant", "content": "Hello"}]},
        'message 2 has the role "asistant", which the chat template does not name. Nearest: '
        '"assistant".',
    ),
    (
        {"messages": [USER, ANSWER], "tools": "[oops"},
        'has text in "tools" that is not JSON. Give a list of tools.',
    ),
    (
        {"messages": [USER, ANSWER], "tools": [1]},
        'has the number 1 in its list of "tools". Give JSON schemas.',
    ),
    ({"messages": None}, 'has null in "messages". Write one, or remove the row.'),
]


@pytest.mark.parametrize(("row", "sentence"), REFUSED)
def test_malformed_messages_are_refused(row: dict[str, Any], sentence: str) -> None:
    assert refusal(row) == sentence


PAIRS = [
    (
        {"prompt": "Hi", "answer": "Hello"},
        'has no column "completion" among its 2 (prompt, answer). Nearest: "prompt". Name the '
        'columns "prompt" and "completion".',
    ),
    (
        {"prompt": "Hi", "completion": None},
        'has null in "completion". Write one, or remove the row.',
    ),
    (
        {"prompt": 1, "completion": 2},
        'has the number 1 in "prompt" and the number 2 in "completion". Give text in both, or a '
        "list of messages in both.",
    ),
    (
        {"prompt": "Hi", "completion": ""},
        'has an empty "completion". Write one, or remove the row.',
    ),
    (
        {"prompt": "Hi", "completion": [ANSWER]},
        'has text in "prompt" and a list in "completion". Give text in both, or a list of '
        "messages in both.",
    ),
    (
        {"prompt": "Hi", "completion": "Hello", "tools": [{}]},
        'has "tools" beside a prompt that is text, which no template writes out. Give the prompt '
        "as messages, or remove the tools.",
    ),
    ({"prompt": 1, "completion": [ANSWER]}, f'has the number 1 in "prompt". {MESSAGES}'),
]


@pytest.mark.parametrize(("row", "sentence"), PAIRS)
def test_malformed_pairs_are_refused(row: dict[str, Any], sentence: str) -> None:
    assert refusal(row, "prompt-completion") == sentence


def test_sharegpt_becomes_messages() -> None:
    row = {
        "id": 1,
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
        ],
    }
    assert read_row(pick_columns(row, "messages", "text")) == Conversation((USER, ANSWER))


def test_columns_are_named_or_usual() -> None:
    talk = Conversation((USER, ANSWER))
    for name, field in (("messages", "text"), ("conversations", "text"), ("chat", "chat")):
        row = {name: [USER, ANSWER], "other": 1}
        assert read_row(pick_columns(row, "messages", field)) == talk
    row = {"prompt": [USER], "completion": [ANSWER], "tools": "[]"}
    assert read_row(pick_columns(row, "prompt-completion", "text")) == Conversation(
        talk.messages, None, 1
    )
    assert read_row({"prompt": "a", "completion": "b"}) == Pair("a", "b")
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    read = read_row({"messages": [USER, called]})
    assert isinstance(read, Conversation)
    assert read.messages[1] == called
    require_roles([{"role": "observation"}], "{% if role == 'observation' %}")


def test_a_wrong_row_is_named_by_its_file_and_line(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n" + "\n\n".join(map(json.dumps, rows)) + "\n")
    spec = DataSpec(
        source="jsonl",
        path=str(file),
        format="prompt-completion",
        tokenizer=str(tokenizer),
        cache=str(tmp_path / "cache"),
    )
    for workers in (1, 2):
        with pytest.raises(DataError) as caught:
            prepare(spec, tmp_path, progress=SilentProgress(), workers=workers)
        assert str(caught.value) == (
            f'{file}:4 has an empty "completion". Write one, or remove the row.'
        )
