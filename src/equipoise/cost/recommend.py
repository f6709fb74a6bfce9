"""Seconds of a recommender's step, part by part, from counts and fitted rates.

Why
    On a CPU a step of a small model is mostly the fixed time of its calls, which no bandwidth
    knows. So each part has a constant beside its rates, all measured.

What it decides
    Every part is a sum of counts times rates that are never negative, fitted to shares of the
    measured seconds, so that short steps count as much as long ones::

        lookup    1, shards and copies on the rank, bytes of their passes
        exchange  exchanges among all ranks, bytes that the rank sends
        dense     1, FLOP of its samples, forward and backward
        reduce    exchanges of the dense part, and bytes of its gradient; alone there are none
        rest      1, samples of the rank: batches, and the journal

    A step takes as long as its slowest rank.

Kept true (tests/unit/cost/test_recommend.py)
    Rates that made the seconds are found again; no rate is negative; rates that are far off place
    no table.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.errors import SpecError

MOST_ERROR = 0.25
"""Mean error of rates in runs that were not fitted, up to which they place tables."""
PARTS = ("lookup", "exchange", "dense", "reduce", "rest")


@dataclass(frozen=True, slots=True)
class RankCounts:
    """What one rank does in a step."""

    shards: int
    """Shards and copies of tables that it holds."""
    table_bytes: float
    """Bytes of rows, sums and gradients that it reads and writes."""
    exchanges: int
    """Exchanges among all ranks; 0 alone."""
    sent_bytes: float
    flop: float
    """Operations of its samples through the dense part, forward and backward."""
    dense_bytes: int
    """Bytes of the dense gradient; 0 alone. Of a divided dense part, those whose sum over all ranks
    would send as much."""
    dense_exchanges: int
    """Sums and gathers of the dense part: 1 of copies, 0 alone."""
    samples: float

    def features(self, part: str) -> tuple[float, ...]:
        """The counts that a part's rates multiply."""
        return {
            "lookup": (1.0, float(self.shards), self.table_bytes),
            "exchange": (float(self.exchanges), self.sent_bytes),
            "dense": (1.0, self.flop),
            "reduce": (float(self.dense_exchanges), float(self.dense_bytes)),
            "rest": (1.0, self.samples),
        }[part]


@dataclass(frozen=True, slots=True)
class StepRates:
    """Seconds of one of each count, by part."""

    rates: Mapping[str, tuple[float, ...]]
    machine: str
    date: str
    error: float
    """Mean error over what a step took, in runs that were not fitted [share]."""
    load: float
    """Mean number of processes that wanted a core while they were measured."""

    def price(self, counts: RankCounts) -> dict[str, float]:
        """Seconds of each part of a rank's step."""
        return {
            part: math.fsum(a * b for a, b in zip(rates, counts.features(part), strict=True))
            for part, rates in self.rates.items()
        }

    def as_row(self) -> dict[str, Any]:
        """What a file keeps."""
        rates = {part: list(rates) for part, rates in self.rates.items()}
        facts = {"machine": self.machine, "date": self.date, "error": self.error, "load": self.load}
        return facts | {"rates": rates}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "StepRates":
        """Read back.

        Raises:
            SpecError: it is something else.
        """
        try:
            rates = {part: tuple(map(float, row["rates"][part])) for part in PARTS}
            numbers = float(row["error"]), float(row["load"])
            return cls(rates, str(row["machine"]), str(row["date"]), *numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"The rates of recommenders are damaged ({error}). Measure them again: equipoise "
                "calibrate run.toml."
            ) from error


@dataclass(frozen=True, slots=True)
class TableRates:
    """What passes over rows and exchanges are taken to cost where tables are placed.

    Unless they were measured, only their ratio means something.
    """

    memory_bytes_per_s: float = 1e10
    link_bytes_per_s: float = 2e9
    shard_s: float = 0.0
    """Fixed seconds of a shard: those of its calls."""
    date: str = ""
    """When they were measured; empty: they are assumed."""

    @classmethod
    def fitted(cls, measured: StepRates | None) -> "TableRates":
        """Those of measured steps, if these tell them; the assumed ones if not.

        Rates that are more than a quarter off place no table, nor do bytes that had no part in
        what steps took.
        """
        if measured is None or measured.error > MOST_ERROR:
            return cls()
        _, shard_s, pass_s = measured.rates["lookup"]
        _, sent_s = measured.rates["exchange"]
        if not (pass_s and sent_s):
            return cls()
        return cls(1 / pass_s, 1 / sent_s, shard_s, measured.date)

    @property
    def words(self) -> str:
        """Where they come from."""
        return f"rates of {self.date}" if self.date else "assumed rates"


def fit_rates(
    counts: Sequence[RankCounts], seconds: Sequence[Mapping[str, float]]
) -> dict[str, tuple[float, ...]]:
    """The rates of each part that were closest to measured seconds.

    Args:
        counts: Of each measured rank.
        seconds: Of its parts, by name [s].
    """
    fitted = {}
    for part in PARTS:
        rows = [
            (each.features(part), spent[part])
            for each, spent in zip(counts, seconds, strict=True)
            if spent[part] > 0
        ]
        if not rows:
            fitted[part] = (0.0,) * len(counts[0].features(part))
            continue
        table = np.array([features for features, _ in rows])
        fitted[part] = tuple(_fit(table, np.array([spent for _, spent in rows])).tolist())
    return fitted


def _fit(features: Floats, seconds: Floats) -> Floats:
    """Rates of least squared error over the seconds, none negative: the best of all supports."""
    scaled, goal = features / seconds[:, None], np.ones(len(seconds))
    count = features.shape[1]
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            columns = scaled[:, chosen]
            norms = np.linalg.norm(columns, axis=0)
            if (norms == 0).any():
                continue
            solved = np.linalg.lstsq(columns / norms, goal, rcond=None)[0] / norms
            off = float(((columns @ solved - goal) ** 2).sum())
            if (solved >= 0).all() and off < least - 1e-12:
                best, least = np.zeros(count), off
                best[list(chosen)] = solved
    return best
