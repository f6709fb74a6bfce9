"""A rank's host samples in its journal: written between steps, read back as rows.

What it decides
    One ``host`` event a second, its numbers in the order that a ``host-metrics`` event names once
    at the start, with four significant digits: some 300 bytes a second.

Kept true (tests/unit/fault/interference/test_sampler.py)
    What is read back is what was written, to four digits; rows of another version's metrics come
    back in today's order, NaN where they lack one.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.fault.interference.metrics import METRICS
from equipoise.observe.journal import EventSink
from equipoise.observe.journal_lines import parse_line

METRICS_EVENT, ROW_EVENT = "host-metrics", "host"


class HostRecord:
    """Writes rows to one journal."""

    def __init__(self, journal: EventSink) -> None:
        self._journal = journal
        self._is_named = False

    def write(self, rows: Iterable[tuple[float, Floats]]) -> None:
        """Write rows, each with the unix seconds of its end."""
        for at, row in rows:
            if not self._is_named:
                self._journal.write("instant", METRICS_EVENT, names=list(METRICS))
                self._is_named = True
            self._journal.write("scalar", ROW_EVENT, t=at, values=[_short(x) for x in row.tolist()])


def read_host(journal: Path) -> tuple[Floats, Floats]:
    """The samples of one rank's journal.

    Args:
        journal: Its file.

    Returns:
        Unix seconds [n], and rows [n, metrics] in ``METRICS``' order; NaN where unknown.

    Raises:
        DataError: a newer equipoise wrote it.
    """
    names: list[str] = []
    times: list[float] = []
    rows: list[list[float]] = []
    with journal.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            event, _ = parse_line(line, journal, number) if line.strip() else (None, False)
            if event is None:
                continue
            if event.get("name") == METRICS_EVENT:
                names = [str(each) for each in event.get("names", [])]
            elif event.get("name") == ROW_EVENT and names:
                known = dict(zip(names, event.get("values", []), strict=False))
                times.append(float(event["t"]))
                rows.append([_number(known.get(name)) for name in METRICS])
    return np.array(times), np.array(rows).reshape(-1, len(METRICS))


def _short(number: float) -> float | int | None:
    """Four significant digits, in few characters."""
    if not math.isfinite(number):
        return None
    short = float(f"{number:.4g}")
    return int(short) if short.is_integer() else short


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
