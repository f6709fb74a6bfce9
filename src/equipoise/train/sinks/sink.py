"""What a sink is: opened for a run, given named figures of steps, closed."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_IDS = "sinks.json"
"""File of a run's folder with the names under which sinks know it."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run that a sink shows."""

    folder: Path
    name: str
    config: Mapping[str, Value]
    """The value of every key, by its dotted name."""

    def known_id(self, sink: str) -> str:
        """The name under which a sink knew this run before; empty if it never saw it."""
        try:
            return str(json.loads((self.folder / _IDS).read_text())[sink])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def keep_id(self, sink: str, name: str) -> None:
        """Remember that name, so that a resumed run goes on in the same one."""
        file = self.folder / _IDS
        ids: dict[str, str] = {}
        with suppress(OSError, ValueError):
            ids = json.loads(file.read_text())
        partial = file.with_name(f".{_IDS}-{os.getpid()}")
        partial.write_text(json.dumps({**ids, sink: name}) + "\n")
        partial.replace(file)


class Sink(Protocol):
    """An open sink. Whatever it raises, the run goes on."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a step, by names such as ``train/loss``."""

    def close(self) -> None:
        """Write out what is pending."""
