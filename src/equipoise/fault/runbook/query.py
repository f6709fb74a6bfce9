"""Queries of a guide: a line that asks the journal, or a server's metrics, for a number.

What it decides
    ``NAME = AGGREGATE [FIELD] of KIND EVENT [where EXPRESSION] [over last N UNIT] [by FIELD]``
    asks; ``NAME = EXPRESSION`` computes from what was asked. Events and fields are those of
    ``observe.catalog``, so that a misspelt one is refused instead of counted as zero.

Kept true (tests/unit/fault/runbook/test_flaws.py)
    A query of an unknown event or field, or of a field of the wrong kind, is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from equipoise.base.nearest import nearest
from equipoise.fault.runbook.expression import (
    SAID,
    Expression,
    GuideError,
    ValueKind,
    parse_expression,
)
from equipoise.fault.runbook.metric_names import METRICS
from equipoise.observe.catalog import COMMON, EVENTS, find_events
from equipoise.observe.event import Kind

Unit = Literal["steps", "s", "min", "h"]
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
METRIC = "metric"

_AGGREGATE = re.compile(r"count|rate|sum|min|max|mean|first|last|p\d{1,2}")
_QUERY = re.compile(
    r"(?P<aggregate>count|rate|sum|min|max|mean|first|last|p\d{1,2})"
    r"(?:\s+(?P<field>[a-z_]+(?:\.[a-z_0-9]+)*))?"
    r"\s+of\s+(?P<kind>[a-z]+)\s+(?P<event>[a-z_*][\w:*-]*)"
    r"(?:\s+where\s+(?P<where>.+?))?"
    r"(?:\s+over\s+last\s+(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+))?"
    r"(?:\s+by\s+(?P<by>[a-z_]+))?"
)
_NAME = re.compile(r"(?P<name>[a-z]\w*)\s*=(?!=)\s*(?P<rest>.+)", re.DOTALL)
_RESERVED = {"exit_code"}


@dataclass(frozen=True, slots=True)
class Events:
    """Some events of a journal: those of a kind and a name that fulfil a condition."""

    kind: str
    """A kind of the journal, or ``metric``."""
    name: str
    """A name, ``*`` for each of the kind, or that of a metric."""
    where: Expression | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """One line that asks, or computes."""

    line: int
    text: str
    name: str
    """What the value is called."""
    events: Events | None = None
    """None where it computes from values."""
    aggregate: str = ""
    field: str = ""
    """Dotted below an object; empty where events are counted."""
    window: tuple[float, Unit] | None = None
    by: str = ""
    expression: Expression | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names that it reads: values, and fields of its events."""
        where = self.events.where if self.events is not None else None
        own = (each.names for each in (where, self.expression) if each is not None)
        return frozenset().union(*own)


def fields_of(events: Events) -> dict[str, ValueKind]:
    """The fields of some events, by the kind of their values."""
    if events.kind == METRIC:
        return {}
    fields: dict[str, ValueKind] = dict(COMMON)
    for each in find_events(events.kind, events.name):
        fields |= each.fields
    return fields


def parse_events(text: str) -> Events:
    """Read ``KIND EVENT [where EXPRESSION]``.

    Raises:
        GuideError: unknown events, or a condition that cannot be read.

    >>> parse_events("instant late").name
    'late'
    """
    shape = re.fullmatch(r"([a-z]+)\s+([a-z_*][\w:*-]*)(?:\s+where\s+(.+))?", text.strip())
    if shape is None:
        raise GuideError(
            f'"{text.strip()}" cannot be read. Write KIND EVENT, and where CONDITION if need be, '
            f'as in: fault error where type == "HungError".'
        )
    kind, name, where = shape.groups()
    _require_events(kind, name)
    return Events(kind, name, None if where is None else parse_expression(where))


def parse_query(text: str, line: int) -> Query:
    """Read one line of a query block.

    Raises:
        GuideError: what cannot be read, or names an event or a field that nobody writes.

    >>> parse_query("slow = max busy_s of scalar step over last 50 steps by rank", 1).by
    'rank'
    """
    named = _NAME.fullmatch(text.strip())
    if named is None:
        raise GuideError(
            f'"{text.strip()}" sets nothing. Begin with a name in lower case and =, as in: '
            f"late = count of instant late."
        )
    name, rest = named["name"], named["rest"].strip()
    if name in _RESERVED:
        raise GuideError(f"`{name}` is set by actions. Choose another name.")
    if not re.match(rf"(?:{_AGGREGATE.pattern})\b.*\bof\s", rest):
        return Query(line, text.strip(), name, expression=parse_expression(rest))
    shape = _QUERY.fullmatch(rest)
    if shape is None:
        raise GuideError(
            f'"{rest}" cannot be read. A query is: AGGREGATE [FIELD] of KIND EVENT '
            f"[where CONDITION] [over last N steps|s|min|h] [by FIELD]."
        )
    kind, event = shape["kind"], shape["event"]
    _require_events(kind, event)
    where = None if shape["where"] is None else parse_expression(shape["where"])
    window: tuple[float, Unit] | None = None
    if shape["count"] is not None:
        if shape["unit"] not in get_args(Unit):
            raise GuideError(f"A window is in steps, s, min or h, not in {shape['unit']}.")
        window = float(shape["count"]), cast("Unit", shape["unit"])
        if not window[0]:
            raise GuideError("A window of 0 holds nothing.")
    query = Query(
        line,
        text.strip(),
        name,
        Events(kind, event, where),
        shape["aggregate"],
        shape["field"] or "",
        window,
        shape["by"] or "",
    )
    _require_fields(query)
    return query


def kind_of(query: Query, kinds: Mapping[str, ValueKind]) -> ValueKind:
    """The kind of a query's value, given those of values set before it.

    Raises:
        GuideError: its condition or its expression does not hold together.
    """
    if query.expression is not None:
        return query.expression.kind(kinds)
    if query.events is None:
        return "any"
    if query.events.where is not None:
        require_condition(query.events, kinds)
    if query.aggregate not in ("first", "last") or query.events.kind == METRIC:
        return "numbers" if query.by else "number"
    kind = _field_kind(query.field, fields_of(query.events))
    return {"number": "numbers", "text": "texts"}.get(kind, "any") if query.by else kind  # type: ignore[return-value]


def require_condition(events: Events, kinds: Mapping[str, ValueKind]) -> None:
    """Refuse a condition on events that does not hold together.

    Raises:
        GuideError: an unknown name, or values that do not go together.
    """
    if events.where is None:
        return
    kind = events.where.kind({**kinds, **fields_of(events)})
    if kind not in ("flag", "any"):
        raise GuideError(f"`{events.where.text}` is {SAID[kind]}, not a condition.")


def _require_events(kind: str, name: str) -> None:
    if kind == METRIC:
        if name not in METRICS:
            raise GuideError(f"A server has no metric {name}. Nearest: {nearest(name, METRICS)}.")
        return
    kinds = [*get_args(Kind), METRIC]
    if kind not in kinds:
        raise GuideError(
            f"A journal has no events of kind {kind}. Nearest: {nearest(kind, kinds)}. All: "
            f"{', '.join(kinds)}."
        )
    if not find_events(kind, name):
        names = [each.name for each in EVENTS if each.kind == kind]
        raise GuideError(
            f"No {kind} is called {name}. Nearest: {nearest(name, names)}. All: {', '.join(names)}."
        )


def _require_fields(query: Query) -> None:
    events = query.events
    if events is None:
        return
    if events.kind == METRIC:
        _require_metric(query, events)
        return
    fields = fields_of(events)
    if query.aggregate in ("count", "rate"):
        if query.field:
            raise GuideError(f"{query.aggregate} counts events, so it takes no field.")
    elif not query.field:
        raise GuideError(f"{query.aggregate} of what? Name a field: {', '.join(fields)}.")
    elif query.aggregate not in ("first", "last"):
        kind = _field_kind(query.field, fields)
        if kind not in ("number", "any"):
            raise GuideError(
                f"{query.aggregate} takes numbers, and {query.field} is {SAID[kind]}. Use first or "
                f"last."
            )
    if query.field:
        _field_kind(query.field, fields)
    if query.by:
        kind = _field_kind(query.by, fields)
        if kind not in ("number", "text", "list"):
            raise GuideError(f"Events cannot be grouped by {query.by}, which is {SAID[kind]}.")
    if query.window is not None and query.window[1] == "steps" and "step" not in fields:
        raise GuideError(
            f"{events.kind} {events.name} has no step, so a window of steps holds none. Give s, "
            f"min or h."
        )


def _require_metric(query: Query, events: Events) -> None:
    kind = METRICS[events.name]
    if query.field or query.window is not None or query.by or events.where is not None:
        raise GuideError("A metric is one look at a server: no field, where, over or by.")
    wanted = ("mean", "count", "sum") if kind == "histogram" else ("last",)
    is_quantile = query.aggregate.startswith("p") and kind == "histogram"
    if query.aggregate not in wanted and not is_quantile:
        more = " or a percentile, as p99" if kind == "histogram" else ""
        raise GuideError(
            f"{events.name} is a {kind}: ask for {', '.join(wanted)}{more}, not for "
            f"{query.aggregate}."
        )


def _field_kind(path: str, fields: Mapping[str, ValueKind]) -> ValueKind:
    name, *below = path.split(".")
    if name not in fields:
        raise GuideError(
            f"No such field: {name}. Nearest: {nearest(name, fields)}. All: {', '.join(fields)}."
        )
    if below and fields[name] != "object":
        raise GuideError(f"{name} is {SAID[fields[name]]}, with nothing below it.")
    return "any" if below else fields[name]


def wanted_events(queries: Iterable[Query]) -> set[tuple[str, str]]:
    """Kinds and names of all events that queries read."""
    return {
        (each.kind, each.name)
        for query in queries
        if query.events is not None
        for each in find_events(query.events.kind, query.events.name)
    }
