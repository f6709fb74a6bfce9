"""Several token caches as one: the sources of a mixture, each tokenized once and kept apart.

What it decides
    A mixture's folder holds only a list of caches and weights. Other weights, another order or
    one source more tokenize nothing again; all of it is part of the mixture's digest.

Kept true (tests/unit/data/cache/test_mixed.py)
    Documents, tokens and names are those of the sources, one after another.
"""

import bisect
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.digest import digest
from equipoise.base.read import read_json
from equipoise.data.cache.verified import damaged

MIX = "mix.json"
"""The only file of a mixture's folder."""

_FORMAT = 1


class ManyTokens:
    """Tokens of several sources, one after another, read in slices."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """Tokens of a slice without a step, verified as each source verifies them."""
        first, stop, _ = span.indices(len(self))
        index = bisect.bisect_right(self._ends, first)
        runs: list[NDArray[Any]] = []
        while index < len(self._parts) and (first < stop or not runs):
            begin = self._ends[index] - len(self._parts[index])
            runs.append(self._parts[index][first - begin : max(first, stop) - begin])
            first = self._ends[index]
            index += 1
        return np.concatenate(runs) if runs else self._parts[0][:0]


def write_mix(cache: Path, folders: Sequence[Path], weights: Sequence[float]) -> Path:
    """Write a mixture's folder, whole or not at all, and return it."""
    rows = [
        {"folder": folder.name, "weight": weight}
        for folder, weight in zip(folders, weights, strict=True)
    ]
    data = {"format": _FORMAT, "sources": rows}
    target = cache / f"mix-{digest(data)}"
    if not target.is_dir():
        building = cache / f"{target.name}.building-{os.getpid()}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        (building / MIX).write_text(json.dumps(data | {"digest": digest(data)}, indent=1) + "\n")
        try:
            building.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(building, ignore_errors=True)
    return target


def read_mix(folder: Path) -> tuple[list[Path], tuple[float, ...]]:
    """The caches and weights of a mixture.

    Raises:
        DataError: its file was changed.
    """
    file = folder / MIX
    try:
        data = read_json(file)
        known = data.pop("digest")
        folders = [folder.parent / str(row["folder"]) for row in data["sources"]]
        weights = tuple(float(row["weight"]) for row in data["sources"])
        is_whole = known == digest(data) and data["format"] == _FORMAT and bool(folders)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise damaged(file, "its bytes have changed since it was written")
    return folders, weights
