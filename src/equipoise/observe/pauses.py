"""Pauses of this process that have a known reason: Python collects garbage.

Why
    A collection stops a rank for a tenth of a second at a moment that no other rank shares. It
    says nothing about the rank.

What it decides
    Collections are written down between steps, never while one runs: it may interrupt the journal
    itself.

Kept true (tests/unit/observe/test_pauses.py)
    Every collection in the thread that watches counts; long ones are spans in the journal.
"""

import gc
import threading
import time
from typing import Any, Self

from equipoise.observe.journal import EventSink

_LEAST_SPAN_S = 1e-3
"""Shorter collections are counted, and not written down."""


class GarbagePauses:
    """Adds up the collections in the thread that enters it, while the block lasts."""

    def __init__(self) -> None:
        self.paused_s = 0.0
        self._thread = 0
        self._began = 0.0
        self._long: list[tuple[float, float, int]] = []
        """Start [unix seconds], duration [s] and generation."""

    def write(self, journal: EventSink, step: int) -> None:
        """Journal the long collections since the last call as spans of a step."""
        spans, self._long = self._long, []
        for began, took_s, generation in spans:
            journal.write(
                "span", "garbage", t=began, duration_s=took_s, step=step, generation=generation
            )

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.perf_counter()
            return
        took_s = time.perf_counter() - self._began
        self.paused_s += took_s
        if took_s >= _LEAST_SPAN_S:
            self._long.append((time.time() - took_s, took_s, int(info["generation"])))
