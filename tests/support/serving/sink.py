"""A journal in memory of what an engine decides."""

from typing import Any

from equipoise.observe.event import Kind
from equipoise.observe.journal import EventSink


class KeptEvents(EventSink):
    """Events by name, in their order."""

    def __init__(self) -> None:
        self.events = list[tuple[str, dict[str, Any]]]()

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        del kind, t
        self.events.append((name, fields))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for each, fields in self.events if each == name]
