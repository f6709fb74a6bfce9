"""The journal's writer: append-only JSON lines, flushed at every step.

Kept true (tests/unit/observe/test_journal.py)
    A killed writer leaves whole lines and at most one torn last line; an appended journal
    never joins a new event to a torn one.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from equipoise.base.errors import FaultError
from equipoise.observe.event import SCHEMA_VERSION, Kind, journal_name, seal


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _ends_torn(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@dataclass(slots=True)
class Span:
    """A block of one rank's time."""

    duration_s: float = 0.0


class Journal:
    """One rank's facts, in the order in which they happened."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / journal_name(rank)
        self.rank = rank
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torn = _ends_torn(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise FaultError(
                f"The journal {self.path} cannot be written ({error.strerror}). Make its folder "
                f"writable, or choose another with --out."
            ) from error
        if torn:
            self._file.write("\n")

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        """Append one event; ``t`` is now unless given."""
        event = {
            "v": SCHEMA_VERSION,
            "kind": kind,
            "name": name,
            "t": time.time() if t is None else t,
            "rank": self.rank,
            **fields,
        }
        self._file.write(seal(json.dumps(_finite(event), separators=(",", ":"))) + "\n")

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[Span]:
        """Append how long the block took, also when it fails; known when it has ended."""
        span, wall, start = Span(), time.time(), time.perf_counter()
        try:
            yield span
        finally:
            span.duration_s = time.perf_counter() - start
            self.write("span", name, t=wall, duration_s=span.duration_s, **fields)

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
