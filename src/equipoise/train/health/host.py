"""Whether a rank's host explains that it has become slow: its samples beside its own steps.

Why
    Whether a slow rank or its neighbour is to blame can only be said from what its own host did,
    and rank 0, which names slow ranks, does not have that.

What it decides
    Steps and samples are laid together second by second. The usual seconds are those in which a
    step took as long for its work as most did; the last few are compared with them
    (``fault.interference.verdict``). The answer is one number, which travels with those that ranks
    exchange in every step anyway: 8 bytes of each rank.

Kept true (tests/unit/train/test_host_watch.py)
    A program that takes a rank's core is called its neighbour, a rank that computes longer is not;
    the number carries the answer whole.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.fault.interference.journaled import HostRecord
from equipoise.fault.interference.metrics import Resource
from equipoise.fault.interference.sampler import HostSampler
from equipoise.fault.interference.verdict import HostVerdict, Whose, verdict
from equipoise.observe.journal import EventSink
from equipoise.train.health.own import OwnClock, OwnParts

_RECENT, _USUAL, _LEAST_USUAL = 3, 120, 3
"""Seconds that are judged, that are remembered as usual, and that must be known before."""

_WARM_UP = 1
"""Seconds at the start that count for nothing."""

_EVEN = 1.05
"""Times the usual, up to which a second is usual itself."""

_ANSWERS: tuple[tuple[Whose, Resource | None], ...] = (
    ("unknown", None),
    ("nobody", None),
    ("this rank", None),
    ("its neighbour on the host", "cpu"),
    ("its neighbour on the host", "memory"),
    ("its neighbour on the host", "disk"),
    ("its neighbour on the host", "network"),
)

_USED: dict[Resource, str] = {
    "cpu": "have its cores",
    "memory": "use up the memory's bandwidth",
    "disk": "keep the disk busy",
    "network": "use the network",
}


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """What a rank's host says about its lost time."""

    whose: Whose = "unknown"
    resource: Resource | None = None
    neighbour_share: float = 0.0
    """Share of the lost time that neighbours explain, 0 to 1."""

    @property
    def number(self) -> float:
        """For the exchange of ranks."""
        return _ANSWERS.index((self.whose, self.resource)) + self.neighbour_share / 2

    @classmethod
    def read(cls, number: float) -> "HostAnswer":
        """From another rank's number.

        >>> HostAnswer.read(HostAnswer("its neighbour on the host", "disk", 1.0).number)
        HostAnswer(whose='its neighbour on the host', resource='disk', neighbour_share=1.0)
        """
        at = int(number)
        return cls(*_ANSWERS[at], neighbour_share=round(2 * (number - at), 6))

    @property
    def is_known(self) -> bool:
        """Whether somebody is to blame."""
        return self.whose not in ("unknown", "nobody")

    @property
    def sentence(self) -> str:
        """For the user; empty if nobody is to blame."""
        if self.resource is not None:
            return (
                f"Its neighbours on the host explain {self.neighbour_share:.0%} of that: other "
                f"programs {_USED[self.resource]}."
            )
        if self.whose == "this rank":
            return "Its neighbours on the host do not explain it: it is this rank's own doing."
        return ""


@dataclass(slots=True)
class _Second:
    """Samples, and the steps that ended since the ones before."""

    rows: list[Floats]
    own_s: float
    work_s: float
    steps: int

    @property
    def price(self) -> float:
        """Own seconds for each predicted one."""
        return self.own_s / self.work_s


class HostWatch:
    """Watches one rank's host beside its steps, and journals the samples.

    Args:
        journal: This rank's.
        sampler: Of its host.
        own: The clock whose numbers ranks exchange.
    """

    def __init__(self, journal: EventSink, sampler: HostSampler, own: OwnClock) -> None:
        self._record, self._sampler, self._own = HostRecord(journal), sampler, own
        self._open = _Second([], 0.0, 0.0, 0)
        self._seconds = 0
        self._recent: deque[_Second] = deque()
        self._usual: deque[_Second] = deque(maxlen=_USUAL)

    def look(self, parts: OwnParts, predicted_s: float) -> None:
        """Take a finished step of this rank into account, and the samples up to its end.

        Args:
            parts: What it spent.
            predicted_s: Of its documents.
        """
        rows = self._sampler.take()
        self._record.write(rows)
        spent_s = parts.data_s + parts.compute_s + parts.communication_s
        if np.isfinite(spent_s) and predicted_s > 0:
            self._open.own_s += spent_s
            self._open.work_s += predicted_s
            self._open.steps += 1
        self._open.rows += [row for _, row in rows]
        if rows and self._open.steps:
            self._close()
            self._own.host = self.answer().number

    def _close(self) -> None:
        """Begin another second; the one that is not recent any more is usual, if it was even."""
        second, self._open = self._open, _Second([], 0.0, 0.0, 0)
        self._seconds += 1
        if self._seconds <= _WARM_UP:
            return
        self._recent.append(second)
        if len(self._recent) > _RECENT:
            oldest = self._recent.popleft()
            if len(self._usual) < _LEAST_USUAL or oldest.price <= _EVEN * self._price:
                self._usual.append(oldest)

    @property
    def _price(self) -> float:
        return float(np.median([each.price for each in self._usual]))

    def answer(self) -> HostAnswer:
        """Who made the last seconds slow."""
        if len(self._usual) < _LEAST_USUAL:
            return HostAnswer()
        steps = sum(each.steps for each in self._recent)
        work_s = sum(each.work_s for each in self._recent) / steps
        price = float(np.median([each.price for each in self._recent]))
        made: HostVerdict = verdict(
            work_s * price, work_s * self._price, _rows(self._recent), _rows(self._usual)
        )
        return HostAnswer(made.whose, made.resource, round(made.neighbour_share, 6))


def _rows(seconds: deque[_Second]) -> Floats:
    return np.array([row for each in seconds for row in each.rows])
