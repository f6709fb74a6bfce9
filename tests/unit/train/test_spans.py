"""Blocks are timed by marks in the device's work, and written when all of them are over."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from equipoise.nn.device.clock import DeviceMarks, make_marks
from equipoise.observe.journal import EventSink
from equipoise.train.spans import DeviceSpans
from support.cuda.queue import Queue


class Kept(EventSink):
    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.phases: list[str] = []

    def write(self, kind: str, name: str, *, t: float | None = None, **fields: Any) -> None:
        self.spans.append({"name": name, "t": t, **fields})

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[None]:
        self.phases.append(name)
        yield


def test_spans_are_the_devices_and_read_at_once() -> None:
    queue, journal = Queue(), Kept()
    spans = DeviceSpans(journal, DeviceMarks(queue.event))
    for micro_batch in range(2):
        with spans.span("forward", step=3, micro_batch=micro_batch):
            pass
    assert not journal.spans and not queue.waits
    assert spans.write() == pytest.approx(0.010)
    assert queue.waits == 1
    first, second = journal.spans
    assert (first["name"], first["step"], second["micro_batch"]) == ("forward", 3, 1)
    assert first["duration_s"] == second["duration_s"] == pytest.approx(0.005)
    assert second["t"] - first["t"] == pytest.approx(0.010, abs=1e-5)
    assert journal.phases == ["forward", "forward"]


def test_a_devices_marks_count_what_passes_between_blocks() -> None:
    marks = DeviceMarks(Queue().event)
    begin, end = marks.mark(), marks.mark()
    moments = marks.read()
    assert moments.counts_idle
    assert moments.passed_s(begin, end) == moments.busy_s(begin, end) == pytest.approx(0.005)


def test_without_a_block_there_is_no_span() -> None:
    for marks in (DeviceMarks(Queue().event), make_marks(torch.device("cpu"))):
        assert DeviceSpans(EventSink(), marks).write() == 0.0
