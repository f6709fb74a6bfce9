"""Rows with parts: what is read, and the whole text of each refusal."""

from pathlib import Path
from typing import Any

import pytest

from equipoise.data.chat.rows import RowError
from equipoise.data.modality.rows import pick_parts

FORM = '{"parts": [{"image": "cat.png"}, {"text": "A cat."}]}'


def test_paths_start_at_the_folder_of_the_row() -> None:
    row = {"id": 3, "parts": [{"text": "See "}, {"image": "a/b.png"}, {"audio": "/c.wav"}]}
    assert pick_parts(row, "text", Path("/data")) == {
        "parts": [{"text": "See "}, {"image": "/data/a/b.png"}, {"audio": "/c.wav"}]
    }
    assert pick_parts({"parts": [{"image": "~$cat.png"}]}, "text", Path("/data")) == {
        "parts": [{"image": "/data/~$cat.png"}]
    }
    assert pick_parts({"x": [{"text": "a"}]}, "x", Path()) == {"parts": [{"text": "a"}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"part": []},
            'has no column "parts" among its 1 (part). Nearest: "part". Write the row as ' + FORM,
        ),
        ({}, 'has no column "parts" among its 0 (none). Write the row as ' + FORM),
        ({"parts": []}, f'has [] in "parts". Write the row as {FORM}'),
        ({"parts": "a"}, f'has "a" in "parts". Write the row as {FORM}'),
        (
            {"parts": ["a"]},
            'part 1 is "a", not an object with one key. Write it as {"text": "..."}, '
            '{"image": "FILE"} or {"audio": "FILE"}',
        ),
        (
            {"parts": [{"text": "a"}, {"imag": "b"}]},
            'part 2 has the key "imag", which is none of text, image, audio. Nearest: "image"',
        ),
        ({"parts": [{"image": ""}]}, 'part 1 has "" in "image". Give text'),
        ({"parts": [{"text": 3}]}, 'part 1 has 3 in "text". Give text'),
    ],
)
def test_wrong_rows_are_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError) as refused:
        pick_parts(row, "text", Path())
    assert str(refused.value) == said + "."
