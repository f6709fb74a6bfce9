"""How long one rank has waited for others, where it waits.

Why
    A rank that is late makes all others late, so their seconds look alike. Who waits least is the
    cause, and only the exchanges themselves know who waits.

What it decides
    Blocks that only exchange are timed: the gathers and sums of ``parallel.zero`` on a CPU, and
    ``Mail.wait``. Bytes on their way count as waiting. DTensor's own collectives, those of experts,
    and all of a device run elsewhere and are not timed.

Kept true (tests/multi/fault/test_slow.py)
    Of two ranks that meet in every layer, the one that sleeps between does not wait.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from equipoise.observe.machine import run_delay_s


@dataclass(slots=True)
class WaitMeter:
    """Adds up one rank's waits."""

    waited_s: float = 0.0
    delay_s: float = 0.0
    """The part in which the rank could have gone on, and other programs had its core; may be NaN
    [s]."""

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count the block."""
        began, delayed_s = time.perf_counter(), run_delay_s()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began
            self.delay_s += run_delay_s() - delayed_s
