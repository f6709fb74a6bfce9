"""What a guide's queries are answered from: a run's journals, or a server's metrics.

What it decides
    Of a step that was computed twice the later line counts, as everywhere. Windows end at the
    newest line, not now: a run may have ended days ago. A field that an event lacks is left out,
    and an aggregate of nothing is unknown, but for a count, which is 0.
    With each answer goes its evidence: how many events it is from, and the lines that decided it.

Kept true (tests/unit/fault/runbook/test_source.py, by Hypothesis)
    Aggregates are NumPy's of the same numbers; a resumed step counts once.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import DataError
from equipoise.fault.runbook.expression import Value
from equipoise.fault.runbook.metric_names import METRICS
from equipoise.fault.runbook.query import METRIC, SECONDS, Events, Query, Unit
from equipoise.observe.catalog import find_events
from equipoise.observe.event import journal_name
from equipoise.observe.journal_lines import Event, journal_files, parse_line
from equipoise.observe.prometheus import Samples, histogram

_SHOWN_LINES = 4


@dataclass(frozen=True, slots=True)
class Evidence:
    """A value that a step used, and where it is from."""

    name: str
    text: str
    """The line of the guide."""
    value: Value
    events: int = 0
    """How many it is from."""
    lines: tuple[str, ...] = ()
    """Lines that decided it, as ``journal/rank-00001.jsonl:12``, four at most."""


class QuerySource(Protocol):
    """QuerySource queries; several may be asked at once."""

    def answer(self, query: Query, values: Mapping[str, Value]) -> Evidence:
        """The value of a query, given values set before it."""


@dataclass(frozen=True, slots=True)
class _Line:
    event: Event
    number: int
    """Its place in its journal, from 1."""

    @property
    def where(self) -> str:
        return f"journal/{journal_name(self.event['rank'])}:{self.number}"


class JournalSource:
    """The events of a run that some queries ask for.

    Args:
        folder: The run's.
        wanted: Kinds and names of the events to keep; others are read and forgotten.

    Raises:
        SpecError, DataError: no such folder, not a run, or a journal that cannot be read.
    """

    def __init__(self, folder: Path, wanted: Iterable[tuple[str, str]]) -> None:
        keep = {*wanted, ("scalar", "step"), ("instant", "start")}
        self._by_event: dict[tuple[str, str], list[_Line]] = {}
        self.newest_step = 0
        self.newest_s = self.oldest_s = math.nan
        self.start: Event | None = None
        """The newest session's."""
        self.torn_lines = 0
        for rank, path in journal_files(folder).items():
            self._read(rank, path, keep)
        for lines in self._by_event.values():
            lines.sort(key=lambda line: (line.event["rank"], line.number))

    def _read(self, rank: int, path: Path, keep: set[tuple[str, str]]) -> None:
        own: dict[Any, _Line] = {}
        newest_s = math.nan
        try:
            with path.open("rb") as file:
                for number, text in enumerate(file, start=1):
                    if not text.strip():
                        continue
                    event, is_torn = parse_line(text, path, number)
                    self.torn_lines += is_torn
                    if event is None:
                        continue
                    event["rank"] = rank
                    if _is_number(t := event.get("t")):
                        newest_s = t
                        self.oldest_s = t if math.isnan(self.oldest_s) else min(self.oldest_s, t)
                    key = event.get("kind"), event.get("name")
                    if key not in keep:
                        continue
                    own[_same(event, number)] = _Line(event, number)
                    if rank == 0 and key == ("scalar", "step"):
                        self.newest_step = event.get("step") or 0
                    if rank == 0 and key == ("instant", "start"):
                        self.start = event
        except OSError as fault:
            raise DataError(
                f"{path} cannot be read: {explain_refusal(fault, path)}. Make it readable, or "
                f"copy it again from where the run was written."
            ) from fault
        self.newest_s = float(np.fmax(self.newest_s, newest_s))
        for line in own.values():
            self._by_event.setdefault((line.event["kind"], line.event["name"]), []).append(line)

    def answer(self, query: Query, values: Mapping[str, Value]) -> Evidence:
        """The value of a query."""
        if query.events is None or query.events.kind == METRIC:
            return _computed(query, values)
        lines = self._select(query.events, query.window, values)
        if not query.by:
            value, deciding = _aggregate(query, lines, self._extent_s(query))
            return _evidence(query, value, lines, deciding)
        groups: dict[Any, list[_Line]] = {}
        for line in lines:
            keys = line.event.get(query.by)
            for key in keys if isinstance(keys, list) else [keys]:
                if isinstance(key, int | float | str):
                    groups.setdefault(key, []).append(line)
        table: dict[Any, Value] = {}
        shown: list[_Line] = []
        for key in sorted(groups, key=lambda each: (isinstance(each, str), each)):
            table[key], deciding = _aggregate(query, groups[key], self._extent_s(query))
            shown += deciding[:1]
        return _evidence(query, table, lines, shown)

    def events(self, kind: str, name: str) -> list[Event]:
        """All events of a kind and a name, in the order of ranks and lines."""
        return [line.event for line in self._lines(kind, name)]

    def _select(
        self, events: Events, window: tuple[float, Unit] | None, values: Mapping[str, Value]
    ) -> list[_Line]:
        lines = self._lines(events.kind, events.name)
        if window is not None:
            lines = [line for line in lines if self._is_recent(line.event, window)]
        where = events.where
        if where is None:
            return lines
        return [line for line in lines if where.value({**values, **line.event}) is True]

    def _lines(self, kind: str, name: str) -> list[_Line]:
        names = [each.name for each in find_events(kind, name)]
        return [line for each in names for line in self._by_event.get((kind, each), [])]

    def _is_recent(self, event: Event, window: tuple[float, str]) -> bool:
        count, unit = window
        if unit == "steps":
            step = event.get("step")
            return step is not None and self.newest_step - count < step <= self.newest_step
        t = event.get("t")
        return _is_number(t) and t > self.newest_s - count * SECONDS[unit]

    def _extent_s(self, query: Query) -> float:
        """Seconds over which a rate counts."""
        whole_s = self.newest_s - self.oldest_s
        if query.window is None or query.window[1] == "steps":
            return whole_s
        return min(whole_s, query.window[0] * SECONDS[query.window[1]])


class MetricsSource:
    """One look at a server's metrics."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def answer(self, query: Query, values: Mapping[str, Value]) -> Evidence:
        """The value of a query."""
        if query.events is None:
            return _computed(query, values)
        name = query.events.name
        if METRICS.get(name) == "histogram":
            seen = histogram(self._samples, name)
            value = None if seen is None or not seen.count else _of_histogram(query.aggregate, seen)
            count = 0 if seen is None else int(seen.count)
            return Evidence(query.name, query.text, _known(value), count, (f"metric {name}",))
        shown = f"{name}_total" if METRICS.get(name) == "counter" else name
        values_of = self._samples.get(shown, {}).values()
        value = math.fsum(values_of) if values_of else None
        return Evidence(query.name, query.text, _known(value), len(values_of), (f"metric {shown}",))


def _of_histogram(aggregate: str, seen: Any) -> float:
    if aggregate.startswith("p"):
        return float(seen.quantile(int(aggregate[1:]) / 100))
    return float({"count": seen.count, "sum": seen.sum, "mean": seen.sum / seen.count}[aggregate])


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(event: Event, number: int) -> Any:
    """What a later line with the same key replaces; the line's own number if nothing is."""
    kind, name, step = event["kind"], event["name"], event.get("step")
    described = find_events(kind, name)
    if step is None or not described or not described[0].is_per_step:
        return number
    return kind, name, step, event.get("micro_batch"), event.get("stage")


def _computed(query: Query, values: Mapping[str, Value]) -> Evidence:
    value = None if query.expression is None else query.expression.value(values)
    return Evidence(query.name, query.text, value)


def _evidence(
    query: Query, value: Value, lines: Sequence[_Line], deciding: Sequence[_Line]
) -> Evidence:
    shown = tuple(dict.fromkeys(line.where for line in deciding[:_SHOWN_LINES]))
    return Evidence(query.name, query.text, value, len(lines), shown)


def _field(event: Event, path: str) -> Value:
    value: Any = event
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _aggregate(
    query: Query, lines: Sequence[_Line], extent_s: float
) -> tuple[Value, Sequence[_Line]]:
    """The value, and the lines that decided it."""
    aggregate = query.aggregate
    ends = [*lines[:1], *lines[-1:]] if len(lines) > 1 else lines
    if aggregate == "count":
        return float(len(lines)), ends
    if aggregate == "rate":
        return (len(lines) / extent_s if extent_s > 0 else None), ends
    given = [
        (value, line) for line in lines if (value := _field(line.event, query.field)) is not None
    ]
    if not given:
        return None, ()
    if aggregate in ("first", "last"):
        return _at_end(given, is_first=aggregate == "first")
    numbers = [(float(value), line) for value, line in given if _is_number(value)]
    if not numbers:
        return None, ()
    values = [value for value, _ in numbers]
    if aggregate in ("sum", "mean"):
        total = math.fsum(values)
        return total if aggregate == "sum" else total / len(values), ends
    answer = (
        _OF_NUMBERS[aggregate](values) if aggregate in _OF_NUMBERS else _rank(values, aggregate)
    )
    nearest = min(numbers, key=lambda each: abs(each[0] - answer))
    return answer, [nearest[1]]


_OF_NUMBERS: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "max": max}


def _rank(values: Sequence[float], aggregate: str) -> float:
    """A percentile, linear between neighbours, as NumPy's."""
    return float(np.percentile(values, int(aggregate[1:])))


def _at_end(
    given: Sequence[tuple[Value, _Line]], *, is_first: bool
) -> tuple[Value, Sequence[_Line]]:
    """The first or last value: by lines within a rank, by time among ranks."""
    ends: dict[int, tuple[Value, _Line]] = {}
    for value, line in given:
        rank = line.event["rank"]
        if not is_first or rank not in ends:
            ends[rank] = value, line
    choose = min if is_first else max
    value, line = choose(ends.values(), key=lambda each: _time(each[1].event))
    return float(value) if type(value) is int else value, [line]


def _time(event: Event) -> float:
    t = event.get("t")
    return float(t) if _is_number(t) and math.isfinite(t) else 0.0
