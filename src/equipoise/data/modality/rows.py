"""Rows of a corpus whose documents have parts: texts, image files and sound files.

What it decides
    A row has one column, ``parts``, a list of objects with one key each: ``text``, ``image`` or
    ``audio``. A file's path starts at the folder of the file that names it. A wrong row is never
    left out.

Kept true (tests/unit/data/modality/test_rows.py)
    The whole text of each refusal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.base.nearest import nearest
from equipoise.base.read import user_path
from equipoise.base.shown import listed, shown
from equipoise.data.chat.rows import PARTS, Row, RowError

TEXT = "text"
_KEYS = (TEXT, "image", "audio")
_FORM = '{"parts": [{"image": "cat.png"}, {"text": "A cat."}]}'


def pick_parts(row: Row, field: str, folder: Path) -> Row:
    """The parts of a row, with the paths of files whole.

    Args:
        row: As it was read.
        field: ``data.field``; ``text`` stands for the column ``parts``.
        folder: Where relative paths start.

    Returns:
        One column, ``parts``: objects with one key each.

    Raises:
        RowError: it is malformed.
    """
    name = PARTS if field == TEXT else field
    if name not in row:
        hint = f' Nearest: "{nearest(name, list(row))}".' if row else ""
        raise RowError(
            f'has no column "{name}" among its {len(row)} ({listed(row) or "none"}).{hint} Write '
            f"the row as {_FORM}."
        )
    parts = row[name]
    if not isinstance(parts, list) or not parts:
        raise RowError(f'has {shown(parts)} in "{name}". Write the row as {_FORM}.')
    return {PARTS: [_read_part(part, at, folder) for at, part in enumerate(parts, start=1)]}


def _read_part(part: Any, at: int, folder: Path) -> Mapping[str, str]:
    if not isinstance(part, Mapping) or len(part) != 1:
        raise RowError(
            f"part {at} is {shown(part)}, not an object with one key. Write it as "
            '{"text": "..."}, {"image": "FILE"} or {"audio": "FILE"}.'
        )
    ((key, value),) = part.items()
    if key not in _KEYS:
        raise RowError(
            f"part {at} has the key {shown(key)}, which is none of {', '.join(_KEYS)}. Nearest: "
            f'"{nearest(str(key), _KEYS)}".'
        )
    if not isinstance(value, str) or "\0" in value or not value:
        raise RowError(f'part {at} has {shown(value)} in "{key}". Give text.')
    return {key: value if key == TEXT else str(folder / user_path(value))}
