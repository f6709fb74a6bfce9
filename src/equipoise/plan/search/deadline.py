"""An answer at any time: when it is due, even in the middle of an evaluation.

Why
    One price of a long window on a hundred context ranks takes ten seconds, and nobody knows that
    before. Checking the clock between prices does not keep a promise of time.

What it decides
    How an evaluation is stopped: by an alarm of the operating system, which raises ``TimeOver``
    wherever this thread is. What was being computed is lost, so caches that may be half filled are
    not used again (``plan.search.search``). Alarms ring in the main thread only; without them the
    clock is checked between evaluations.

    Where Python prints and loses what is raised (finalizers, callbacks of the garbage collector),
    and where half a job would be left behind, the alarm waits and rings again.

Kept true (tests/unit/plan/search/test_deadline.py)
    A call that never ends is stopped, though it swallow the first alarm; one that ends in time
    returns what it would; no alarm is left behind.
"""

import contextlib
import gc
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

Clock = Callable[[], float]
"""Seconds that only grow."""

_Answer = TypeVar("_Answer")

_LEAST_S = 1e-6
"""An alarm of 0 s never rings."""

_ENDLESS_S = 1e8
"""Three years; an alarm that is much later overflows the system's clock."""

_WHOLE = ("importlib", "_frozen_importlib", "logging", "numba", "weakref", "_weakrefset")
"""Packages whose functions are not stopped. What weakref's raise is printed and lost, and so is
what logging's do in a fork of this process."""

_AGAIN_S = 0.02
"""Until a stop is tried again."""


class TimeOver(BaseException):
    """The answer is due. No ``except Exception`` may keep it."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment by a clock."""

    until_s: float = math.inf
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> "Deadline":
        """The moment some seconds from now."""
        return cls(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self.until_s - self.clock())

    def is_over(self) -> bool:
        """Whether the moment has passed."""
        return self.clock() > self.until_s

    def part(self, share: float) -> "Deadline":
        """The moment at which a share of what is left has passed.

        >>> Deadline(10.0, clock=lambda: 2.0).part(0.5).until_s
        6.0
        """
        return Deadline(self.clock() + share * self.left_s, self.clock)

    @contextlib.contextmanager
    def stops(self) -> Iterator[None]:
        """Stop the block when the moment comes.

        Raises:
            TimeOver: it came.
        """
        left_s, is_main = self.left_s, threading.current_thread() is threading.main_thread()
        if left_s > _ENDLESS_S or not is_main or not hasattr(signal, "setitimer"):
            yield
            return
        if left_s == 0.0:
            raise TimeOver
        begin, before = time.monotonic(), signal.signal(signal.SIGALRM, _ring)
        others_s, again_s = signal.setitimer(signal.ITIMER_REAL, max(left_s, _LEAST_S), _AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # a ring in this frame is not raised
            signal.signal(signal.SIGALRM, before)
            if others_s:  # an alarm that somebody else had set
                rings_s = others_s - (time.monotonic() - begin)
                signal.setitimer(signal.ITIMER_REAL, max(rings_s, _LEAST_S), again_s)

    def attempt(self, call: Callable[[], _Answer]) -> _Answer | None:
        """What a call returns, or None if it has not by then."""
        try:
            with self.stops():
                return call()
        except TimeOver:
            return None


NEVER = Deadline()


def _ring(_: int, frame: FrameType | None) -> None:
    """Raise, unless it would be lost or leave something half done: the next ring tries again."""
    if frame is None or frame.f_globals.get("__name__") == "contextlib" or _is_underway():
        return
    lost = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    lost.add(Deadline.stops.__wrapped__.__code__)  # type: ignore[attr-defined]
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _WHOLE or frame.f_code in lost or frame.f_code.co_name == "__del__":
            return
        frame = frame.f_back
    raise TimeOver


def _is_underway() -> bool:
    """Whether a ring was heard, or a generator is closed: what either stopped is cleaned up."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, TimeOver | GeneratorExit):
        error = error.__context__
    return error is not None
