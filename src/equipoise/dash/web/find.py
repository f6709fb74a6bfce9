"""Find the runs below the folders that a dashboard was given, again and again.

What it decides
    A run is a folder with ``journal/rank-*.jsonl``. Runs may lie up to three folders deep, as the
    sides of a comparison do, and may appear and vanish while one looks.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from equipoise.base.errors import DataError, SpecError

_DEPTH = 3
_MOST_FOLDERS = 2_000
"""Folders that one look visits."""


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Folders of runs, each once, those of one folder in order of their names."""
    runs: dict[Path, Path] = {}
    left = _MOST_FOLDERS
    for folder in folders:
        for run, is_run in _walk(folder):
            left -= 1
            if is_run:
                runs.setdefault(run.resolve(), run)
            if left <= 0:
                break
    return list(runs.values())


def require_place_of_runs(folder: Path) -> None:
    """Refuse a folder that cannot be meant: not there, or full of something else than runs.

    A folder that is empty or holds only folders may be where runs will appear.

    Raises:
        SpecError: no such folder, or it is a file.
        DataError: it holds files and no run.
    """
    if not folder.exists():
        raise SpecError(
            f"No such folder: {folder}. Give the folder of a run, or one in which runs are."
        )
    if not folder.is_dir():
        raise SpecError(f"{folder} is a file. Give the folder of a run, or one in which runs are.")
    try:
        with os.scandir(folder) as entries:
            file = next((entry.name for entry in entries if _is_other_file(entry)), None)
    except PermissionError:
        raise SpecError(f"{folder} cannot be read. Ask its owner for permission.") from None
    if file and not (folder / "resolved.json").is_file() and not find_runs([folder]):
        raise DataError(
            f"{folder} holds no run but other files, such as {file}. Give the folder of a run, or "
            "one in which runs are or will be."
        )


def _is_other_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file() and not entry.name.startswith(".")


def _walk(folder: Path, depth: int = _DEPTH) -> Iterator[tuple[Path, bool]]:
    """Every folder, and whether it is a run; what lies inside a run is not looked at."""
    is_run = any((folder / "journal").glob("rank-*.jsonl"))
    yield folder, is_run
    if is_run or not depth:
        return
    try:
        with os.scandir(folder) as entries:
            # Links last: what they lead to is known by its own path if it lies here, too.
            inside = sorted((each.is_symlink(), each.name) for each in entries if each.is_dir())
    except OSError:  # vanished, or not ours to read
        return
    for _, name in inside:
        if not name.startswith("."):
            yield from _walk(folder / name, depth - 1)
