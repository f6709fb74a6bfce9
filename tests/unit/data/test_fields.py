"""Fields by their path: keys with dots, places in lists, and how far a wrong path goes."""

from typing import Any

import pytest

from equipoise.data.fields import MissingFieldError, walk

ROW: dict[str, Any] = {
    "text": "a",
    "payload": {"text": "b", "deep.er": {"text": "c"}, "none": None},
    "payload.text": "d",
    "turns": [{"content": "e"}, {"content": "f"}],
    "empty": {},
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text", "a"),
        ("payload.text", "d"),  # a key that itself has dots comes first
        ("payload.deep.er.text", "c"),
        ("payload.none", None),
        ("turns.0.content", "e"),
        ("turns.-1.content", "f"),
    ],
)
def test_a_path_is_followed(path: str, value: object) -> None:
    assert walk(ROW, path) == value


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "txt",
            'has no field "txt" among its 5 (text, payload, payload.text, turns, empty). Nearest: '
            '"text".',
        ),
        (
            "payload.txt",
            'has no field "payload.txt" among its 3 in "payload" (text, deep.er, none). Nearest: '
            '"payload.text".',
        ),
        ("text.more", 'has no field "text.more": "text" is neither an object nor a list.'),
        (
            "payload.none.x",
            'has no field "payload.none.x": "payload.none" is neither an object nor a list.',
        ),
        ("turns.2.content", 'has no field "turns.2.content": "turns" is a list of 2.'),
        ("empty.a", 'has no field "empty.a" among its 0 in "empty" ().'),
    ],
)
def test_a_path_that_leads_nowhere(path: str, text: str) -> None:
    with pytest.raises(MissingFieldError) as caught:
        walk(ROW, path)
    assert str(caught.value) == text
