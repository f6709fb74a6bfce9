"""The clocks that measure a rank's computing: of one block, and of all moments of a step.

What it decides
    On a CPU, the processor time of the computing thread: it stands still while the rank waits for
    a message or another program has the core, so prices measured on a busy machine hold for a step
    that runs alone. Threads that share one operator spin while they wait for each other, so one
    thread's time is the operator's.

    On an accelerator the host only launches kernels. ``busy_clock`` reads wall-clock time while
    the device is idle. ``Marks`` never waits in between: each mark is an event in the
    device's queue, and all are read together when the work is over::

        host     mark  launch launch  mark  launch launch  mark   read ........ here
        device        [kernels      ][     ][kernels           ][  ]
                      0                     1                    2

Kept true (tests/unit/nn/device/test_clock.py)
    Neither sleep nor other threads count on a CPU; marks of a device are read once, after its last.

Sources
    ``torch.cuda.Event``: ``elapsed_time`` is what passed on the device between two events.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from equipoise.base.arrays import Ints


def busy_clock(device: torch.device) -> Callable[[], float]:
    """A function that reads a device's computing time [s]; only differences mean anything."""
    return wall_clock(device) if device.type == "cuda" else time.thread_time


def wall_clock(device: torch.device) -> Callable[[], float]:
    """A function that reads the wall clock when a device has done all that was launched [s]."""

    def read() -> float:
        await_device(device)
        return time.perf_counter()

    return read


def await_device(device: torch.device) -> None:
    """Wait until a device has done all that was launched; a host that computes itself has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """When the marks of a stretch of work were passed."""

    at_ns: Ints
    """By a clock that the ranks of a machine share, and that does not jump meanwhile [ns]."""
    busy_ns: Ints
    """Computing time so far; only differences mean anything [ns]."""
    counts_idle: bool
    """Whether computing time also counts what passes while the device has nothing to do."""

    def passed_s(self, begin: int, end: int) -> float:
        """Seconds between two marks."""
        return int(self.at_ns[end] - self.at_ns[begin]) * 1e-9

    def busy_s(self, begin: int, end: int) -> float:
        """Computing seconds between two marks."""
        return int(self.busy_ns[end] - self.busy_ns[begin]) * 1e-9


class Marks(Protocol):
    """Marks moments in a rank's work without waiting for it."""

    def mark(self) -> int:
        """Mark the end of what was asked for so far; the number of the mark, from 0."""

    def read(self) -> Moments:
        """Wait until the last mark has been passed; when each was."""


def make_marks(device: torch.device) -> Marks:
    """Marks on the device that a rank computes on."""
    return DeviceMarks(_cuda_event) if device.type == "cuda" else HostMarks()


class HostMarks:
    """Marks where the host itself computes."""

    def __init__(self) -> None:
        # One moment by the shared clock; the rest by one that never jumps.
        self._begin_ns = time.time_ns() - time.perf_counter_ns()
        self._marks: list[tuple[int, int]] = []

    def mark(self) -> int:
        """Mark this moment."""
        self._marks.append((time.perf_counter_ns(), time.thread_time_ns()))
        return len(self._marks) - 1

    def read(self) -> Moments:
        """When each mark was made."""
        at_ns, busy_ns = np.array(self._marks, dtype=np.int64).reshape(-1, 2).T
        return Moments(at_ns + self._begin_ns, busy_ns, counts_idle=False)


class DeviceEvent(Protocol):
    """A place in a device's queue, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Put it behind everything that was launched."""

    def synchronize(self) -> None:
        """Wait until the device is past it."""

    def elapsed_time(self, end_event: Any) -> float:
        """What passed on the device from this event to another [ms]."""


def _cuda_event() -> DeviceEvent:
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)
    return event


class DeviceMarks:
    """Marks in the queue of the current stream."""

    def __init__(self, make_event: Callable[[], DeviceEvent]) -> None:
        self._make_event = make_event
        self._events: list[DeviceEvent] = []

    def mark(self) -> int:
        """Put a mark behind everything that was launched so far."""
        event = self._make_event()
        event.record()
        self._events.append(event)
        return len(self._events) - 1

    def read(self) -> Moments:
        """Wait for the last mark, which is passed when the wait ends; the others came before it."""
        if not self._events:
            return Moments(np.zeros(0, np.int64), np.zeros(0, np.int64), counts_idle=True)
        last = self._events[-1]
        last.synchronize()
        end_ns = time.time_ns()
        before = [round(event.elapsed_time(last) * 1e6) for event in self._events]
        at_ns = end_ns - np.array(before, dtype=np.int64)
        return Moments(at_ns, at_ns, counts_idle=True)
