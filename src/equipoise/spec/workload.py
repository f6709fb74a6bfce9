"""Document lengths: from a named distribution or a file, as arrays of tokens.

Sources
    Each file of ``spec/lengths`` names where its quantiles come from in its first line.
"""

import csv
import json
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import DataError
from equipoise.base.nearest import nearest

Lengths = npt.NDArray[np.int64]

_FOLDER = resources.files("equipoise.spec") / "lengths"


def distribution_names() -> list[str]:
    """Names of the embedded length distributions.

    >>> distribution_names()
    ['pretrain-128k', 'prolong', 'python-stdlib', 'wikipedia']
    """
    return sorted(entry.name.removesuffix(".csv") for entry in _FOLDER.iterdir())


def draw_lengths(name: str, documents: int, *, seed: int = 0) -> Lengths:
    """Draw document lengths [tokens] from an embedded distribution.

    Args:
        name: One of ``distribution_names()``.
        documents: How many to draw.
        seed: The same seed draws the same lengths.

    Raises:
        DataError: there is no such distribution; names the nearest.
    """
    if name not in distribution_names():
        raise DataError(
            f'No length distribution is called "{name}". Nearest: '
            f"{nearest(name, distribution_names())}. All: {', '.join(distribution_names())}."
        )
    lines = (_FOLDER / f"{name}.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines if line and line[0].isdigit()]
    quantiles = np.array([float(row[0]) for row in rows])
    tokens = np.array([max(1.0, float(row[1])) for row in rows])
    # Not Philox, whose stream of the same seed orders documents: lengths would come sorted.
    drawn = np.random.Generator(np.random.PCG64(seed)).random(documents)
    lengths: Lengths = np.rint(np.exp(np.interp(drawn, quantiles, np.log(tokens)))).astype(np.int64)
    return lengths


def read_lengths(file: Path) -> Lengths:
    """Document lengths [tokens] of a CSV, JSON-lines or plain text file, one a line.

    A CSV or JSON line may hold more; the column ``tokens``, else ``length``, is read.

    Raises:
        DataError: no such file, a line that is no positive whole number, or no line at all.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(
            f"There is no lengths file {file}, and no distribution of that name. Distributions: "
            f"{', '.join(distribution_names())}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text ({error}).") from None
    found = []
    for number, text in _values(file, lines):
        try:
            tokens = int(text)
        except ValueError:
            tokens = 0
        if tokens < 1:
            raise DataError(
                f"{file}:{number}  {text!r} is not a document length. Give each document one "
                f"whole number of tokens, 1 or more."
            )
        found.append(tokens)
    if not found:
        raise DataError(f"{file} holds no document lengths. Give one whole number a line.")
    return np.array(found, dtype=np.int64)


def _values(file: Path, lines: list[str]) -> list[tuple[int, str]]:
    """Line number and text of each length."""
    kept = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    if file.suffix == ".jsonl":
        return [(number, _from_json(line)) for number, line in kept]
    if not kept or kept[0][1].split(",")[0].strip().lstrip("-").isdigit():
        return [(number, line.split(",")[0].strip()) for number, line in kept]
    header = [name.strip() for name in next(csv.reader([kept[0][1]]))]
    column = next((header.index(name) for name in ("tokens", "length") if name in header), 0)
    rows = [(number, next(csv.reader([line]))) for number, line in kept[1:]]
    return [(number, row[column].strip() if column < len(row) else "") for number, row in rows]


def _from_json(line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, dict):
        value = value.get("tokens", value.get("length", ""))
    return str(value)
