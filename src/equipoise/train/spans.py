"""Blocks of a step that the rank's device computes, timed where they run and written once.

Why
    On an accelerator the host is ahead of the device: what it spends in a block is how long the
    launching takes. Waiting for the device in every block would measure it, and slow the step.

What it decides
    A block is two marks in the device's work (``nn.device.clock``). They are read when all blocks
    are over, and only then the spans are journaled.

Kept true (tests/unit/train/test_spans.py)
    Spans are those of the device; none is written before the last block is over.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from equipoise.nn.device.clock import Marks
from equipoise.observe.journal import EventSink


class DeviceSpans:
    """Spans of one rank's device, from its journal's point of view all at once."""

    def __init__(self, journal: EventSink, marks: Marks) -> None:
        self._journal, self._marks = journal, marks
        self._blocks: list[tuple[str, int, int, dict[str, Any]]] = []

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[None]:
        """Time what the device is asked for in the block; the journal is in it meanwhile."""
        begin = self._marks.mark()
        with self._journal.phase(name, **fields):
            yield
        self._blocks.append((name, begin, self._marks.mark(), fields))

    def write(self) -> float:
        """Wait for the device, journal every span; their computing seconds together."""
        moments = self._marks.read()
        for name, begin, end, fields in self._blocks:
            at_s = float(moments.at_ns[begin]) * 1e-9
            passed_s = moments.passed_s(begin, end)
            self._journal.write("span", name, t=at_s, duration_s=passed_s, **fields)
        return sum(moments.busy_s(begin, end) for _, begin, end, _ in self._blocks)
