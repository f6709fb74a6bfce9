"""How columns become what a model reads: values to rows of tables, numbers to mean 0.

Why
    Who serves a model has its requests and not its training data. What training learned of the
    columns lies in the run's folder, as ``columns.json``.

What it decides
    A value is looked up as its text, as training read it: 196, "196" and a Parquet integer are one
    value; null is "nan". A value that training did not have is left out of its bag, and counted. A
    bag is a list, whose values may have blanks, or words separated by blanks. Numbers are shifted
    and scaled in float64, then rounded to float32.

Kept true (tests/unit/recsys/rank/test_coding.py)
    Coded, the rows of a file are its samples to the bit; what is wrong is refused by its column.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Floats
from equipoise.base.durable import write_whole
from equipoise.base.errors import CheckpointError, DataError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_json, reason
from equipoise.base.shown import listed, shorten
from equipoise.recsys.jagged import KeyedJagged

COLUMNS = "columns.json"
"""The file of a run's folder that says what row each value is."""
_MOST = float(np.finfo(np.float32).max)
_MOST_SHARED = 1 << 22
"""Values of a shared column over all candidates: each of them gets all of the column's."""


@dataclass(frozen=True, slots=True)
class NumberScale:
    """The mean and the deviation of a column of numbers in training."""

    mean: float
    deviation: float

    @classmethod
    def measure(cls, training: Floats) -> "NumberScale":
        """The scale of a column's training part; a constant has deviation 1.

        Without that, rounding of the mean would be a deviation: 190 times 0.1 has 1e-17.

        >>> NumberScale.measure(np.full(190, 0.1))
        NumberScale(mean=0.1, deviation=1.0)
        """
        if training.min() == training.max():
            return cls(float(training[0]), 1.0)
        deviation = float(training.std())
        return cls(float(training.mean()), deviation if deviation > 0 else 1.0)

    def apply(self, column: Floats) -> tuple[Floats, int | None]:
        """The column in deviations from the mean, and the first place that float32 cannot hold."""
        with np.errstate(over="ignore"):
            scaled = (column - self.mean) / self.deviation
        bad = np.flatnonzero(~(np.abs(scaled) <= _MOST))
        return scaled, int(bad[0]) if len(bad) else None


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Samples as a model reads them."""

    jagged: KeyedJagged
    numbers: Tensor
    """float32 [B, numbers]."""
    unknown: int
    """Values that training did not have."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.jagged.samples

    @property
    def held_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(each.nbytes for each in (self.jagged.lengths, self.jagged.values, self.numbers))


@dataclass(frozen=True, eq=False)
class Coding:
    """The columns of a run."""

    ids: tuple[str, ...] = ()
    bags: tuple[str, ...] = ()
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of each column of ids or bags; the first is row 1."""
    numbers: Mapping[str, NumberScale] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that a sample has."""
        return (*self.ids, *self.bags, *self.numbers)

    @cached_property
    def _rows(self) -> dict[str, dict[str, int]]:
        return {
            name: {word: row for row, word in enumerate(words, start=1)}
            for name, words in self.words.items()
        }

    def as_facts(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "ids": list(self.ids),
            "bags": list(self.bags),
            "words": {name: list(words) for name, words in self.words.items()},
            "numbers": {name: [each.mean, each.deviation] for name, each in self.numbers.items()},
        }

    def code(self, context: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]) -> Coded:
        """Samples of one request: what they share, and a list for each column that differs.

        Raises:
            DataError: a column is missing, unknown, doubled, of another length, or holds what it
                cannot.

        >>> coding = Coding(ids=("user", "film"), words={"user": ["u1"], "film": ["a", "b"]})
        >>> coded = coding.code({"user": "u1"}, {"film": ["b", "a", "new"]})
        >>> coded.jagged.values.tolist(), coded.unknown
        ([1, 1, 1, 2, 1], 1)
        """
        count = self._require_columns(context, candidates)
        lengths: list[Tensor] = []
        values: list[Tensor] = []
        unknown, names = 0, (*self.ids, *self.bags)
        for name in names:
            is_shared = name in context
            given = [context[name]] if is_shared else candidates[name]
            bags = self._look_up(name, given, is_bag=name in self.bags)
            rows = [row for bag in bags for row in bag if row]
            own = torch.tensor(rows, dtype=torch.int64)
            sizes = torch.tensor([len(bag) - bag.count(0) for bag in bags], dtype=torch.int32)
            missed = sum(map(len, bags)) - len(rows)
            if is_shared:
                if len(rows) * count > _MOST_SHARED:
                    raise DataError(
                        f'The column "{name}" has {len(rows):,} values in context for {count:,} '
                        f"candidates, {len(rows) * count:,} in all, and a request may have "
                        f"{_MOST_SHARED:,}. Ask for fewer candidates at a time."
                    )
                own, sizes, missed = own.repeat(count), sizes.repeat(count), missed * count
            unknown += missed
            lengths.append(sizes)
            values.append(own)
        jagged = KeyedJagged(
            names,
            torch.cat(lengths).view(len(names), count) if names else torch.zeros(0, count).int(),
            torch.cat(values) if names else torch.zeros(0).long(),
        )
        columns = []
        for name, scale in self.numbers.items():
            is_shared = name in context
            column = _as_numbers(name, [context[name]] if is_shared else candidates[name])
            scaled, bad = scale.apply(column)
            if bad is not None:
                raise DataError(
                    f'The column "{name}" has {column[bad]:g} at place {bad:,}: training\'s mean '
                    f"is {scale.mean:g} and its deviation {scale.deviation:g}, so float32 cannot "
                    "hold it. Give a number nearer to training's."
                )
            columns.append(np.repeat(scaled, count) if is_shared else scaled)
        table = np.stack(columns, axis=1) if columns else np.zeros((count, 0))
        return Coded(jagged, torch.from_numpy(table.astype(np.float32)), unknown)

    def _require_columns(
        self, context: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]
    ) -> int:
        """Candidates of a request whose columns are those of the model."""
        for name in (*context, *candidates):
            if name not in self.names:
                raise DataError(
                    f'The model has no column "{shorten(name, 60)}" among its {len(self.names)} '
                    f'({listed(self.names)}). Nearest: "{nearest(name[:60], list(self.names))}".'
                )
        for name in self.names:
            if name in context and name in candidates:
                raise DataError(
                    f'The column "{name}" is both in context and in candidates. Give it once.'
                )
            if name not in context and name not in candidates:
                raise DataError(
                    f'The column "{name}" is missing. Give it in context, or in candidates with a '
                    "value for each."
                )
        sizes = {name: len(column) for name, column in candidates.items()}
        if len(set(sizes.values())) > 1:
            counts = listed([f"{name} {size:,}" for name, size in sizes.items()])
            raise DataError(f"Columns of candidates have different lengths: {counts}.")
        return next(iter(sizes.values()), 1)

    def _look_up(self, name: str, column: Sequence[Any], *, is_bag: bool) -> list[tuple[int, ...]]:
        """Rows of each sample's values of a column; 0 for what training did not have."""
        known = self._rows[name]
        if not is_bag:
            for at, value in enumerate(column):
                if isinstance(value, list | dict | ListText):
                    raise DataError(
                        f'The column "{name}" has one value a sample, and a list or object at '
                        f"place {at:,}. Give a text or a number."
                    )
            return [(known.get(text_of(value), 0),) for value in column]
        bags = []
        for at, value in enumerate(column):
            if isinstance(value, dict) or (
                isinstance(value, list) and any(isinstance(each, list | dict) for each in value)
            ):
                raise DataError(
                    f'The column "{name}" has a list of values a sample, and something else at '
                    f"place {at:,}. Give a list of texts or numbers."
                )
            bags.append(tuple(known.get(word, 0) for word in words_of(value)))
        return bags


class ListText(str):
    """A list of a column, its values separated by blanks; ``words`` has each as it is."""

    __slots__ = ("words",)
    words: tuple[str, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> "ListText":
        """The values as texts."""
        words = tuple(map(text_of, values))
        made = cls(" ".join(words))
        made.words = words
        return made


def words_of(bag: Any) -> list[str]:
    """The values of a bag: of a list each that is not blank, of a text its words.

    >>> words_of(["Film Noir", "", 3]), words_of("Film Noir")
    (['Film Noir', '3'], ['Film', 'Noir'])
    """
    if isinstance(bag, list):
        bag = ListText.of(bag)
    if not isinstance(bag, ListText):
        return text_of(bag).split()
    return [word for word in bag.words if word.strip()]


def text_of(value: Any) -> str:
    """A value as training has it."""
    return "nan" if value is None else value if isinstance(value, str) else str(value)


def _as_numbers(name: str, column: Sequence[Any]) -> Floats:
    """A column as finite float64.

    Raises:
        DataError: names the first place that is none.
    """
    for at, value in enumerate(column):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(
                f'The column "{name}" has numbers, and {shorten(json.dumps(value), 60)} at place '
                f"{at:,}. Give a number."
            )
        if not abs(value) <= _MOST:
            raise DataError(
                f'The column "{name}" has a number at place {at:,} that is NaN or beyond float32. '
                "Give another."
            )
    return np.array(column, dtype=np.float64)


def write_coding(folder: Path, coding: Coding) -> None:
    """Keep what training learned of the columns in a run's folder."""
    write_whole(folder / COLUMNS, json.dumps(coding.as_facts()))


def read_coding(folder: Path) -> Coding:
    """What ``write_coding`` kept.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    file = folder / COLUMNS
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no {COLUMNS}, which says what row each value is: an earlier version "
            "trained it. Run the same `equipoise train` again; what is trained stays, and the file "
            "is written."
        )
    try:
        facts = read_json(file)
        ids, bags = (tuple(map(str, facts[key])) for key in ("ids", "bags"))
        return Coding(
            ids,
            bags,
            {name: [*map(str, facts["words"][name])] for name in (*ids, *bags)},
            {
                name: NumberScale(float(mean), float(deviation))
                for name, (mean, deviation) in facts["numbers"].items()
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not what a run writes"
        raise CheckpointError(
            f"{file} cannot be read: {why}. Run the same `equipoise train` again, which writes it."
        ) from None
