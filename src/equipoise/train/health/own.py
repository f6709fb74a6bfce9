"""What one rank spends on a step itself: neither waiting for others nor pausing for a known reason.

What it decides
    Seconds on the wall, less those of a ``comm.meter.WaitMeter`` and of ``GarbagePauses``. Where
    ranks wait for each other in collectives that no meter knows (of tensors and experts), the
    computing seconds of the processor stand for a rank's own, and a rank that sleeps goes unseen.
    On a device with such layouts, and with pipelines or ZeRO 2 and 3 there, nothing is known.

Kept true (tests/multi/fault/test_slow.py)
    Of two ranks that meet in every layer, the one that sleeps between spends more.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from equipoise.comm.meter import WaitMeter
from equipoise.observe.machine import run_delay_s
from equipoise.observe.pauses import GarbagePauses


@dataclass(frozen=True, slots=True)
class Moment:
    """Clocks at a moment [s]; only differences mean anything."""

    wall_s: float
    waited_s: float
    paused_s: float

    def own_since(self, other: "Moment") -> float:
        """What the rank spent itself since an earlier moment [s]."""
        waited_s = self.waited_s - other.waited_s
        return max(0.0, self.wall_s - other.wall_s - waited_s - (self.paused_s - other.paused_s))


@dataclass(frozen=True, slots=True)
class OwnParts:
    """A rank's own seconds of a step, by part."""

    data_s: float
    compute_s: float
    communication_s: float
    core_s: float
    """``compute_s`` without the time in which other programs had its core."""
    host: float = 0.0
    """A ``health.host.HostAnswer`` as a number: what its host says to its last seconds."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The begin of a step."""

    moment: Moment
    delay_s: float
    data_s: float
    """What had been spent on its data by then."""


class OwnClock:
    """Reads one rank's clocks.

    Args:
        meters: What it waits.
        pauses: Its known pauses; none are known unless given.
        is_metered: Whether all waits within micro-batches are in the meters.
        has_processor: Whether it computes on a processor, whose own clock stands in then.
    """

    def __init__(
        self,
        meters: Sequence[WaitMeter],
        pauses: GarbagePauses | None = None,
        *,
        is_metered: bool = True,
        has_processor: bool = True,
    ) -> None:
        self._meters, self.pauses = tuple(meters), pauses
        self._is_metered, self._has_processor = is_metered, has_processor
        self.host = 0.0
        """What is passed on with the next step's parts."""
        self.data_s = 0.0
        """Packing and reading data since the last ``take`` [s]."""
        self.communication_s = 0.0
        """Exchanging since then, besides waiting [s]."""

    def now(self) -> Moment:
        """The clocks at this moment."""
        paused_s = 0.0 if self.pauses is None else self.pauses.paused_s
        waited_s = sum(meter.waited_s for meter in self._meters)
        return Moment(time.perf_counter(), waited_s, paused_s)

    def begin(self) -> Begun:
        """The begin of a step."""
        return Begun(self.now(), self._delay_s(), self.data_s)

    def _delay_s(self) -> float:
        """When others had this thread's core outside of waits, so far [s]; NaN if unknown."""
        if not self._has_processor:
            return math.nan
        return run_delay_s() - sum(meter.delay_s for meter in self._meters)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the block as packing or reading data."""
        begun = self.now()
        yield
        self.data_s += self.now().own_since(begun)

    def exchanged(self, since: Moment) -> None:
        """Count what has passed since a moment as exchanging, if all waits in it are known."""
        if self._is_metered and self._has_processor:
            self.communication_s += self.now().own_since(since)

    def take(self, begun: Begun, busy_s: float) -> OwnParts:
        """The parts of a step up to here, where this rank has computed; begins the next.

        Args:
            begun: The begin of the step.
            busy_s: Computing seconds of this rank's device.
        """
        delay_s = self._delay_s() - begun.delay_s
        compute_s = self.now().own_since(begun.moment) - (self.data_s - begun.data_s)
        if not self._is_metered:
            compute_s = busy_s if self._has_processor else math.nan
        compute_s = max(0.0, compute_s)
        core_s = compute_s if math.isnan(delay_s) else max(busy_s, compute_s - delay_s)
        core_s = min(core_s, compute_s)
        parts = OwnParts(self.data_s, compute_s, self.communication_s, core_s, self.host)
        self.data_s = self.communication_s = 0.0
        return parts
