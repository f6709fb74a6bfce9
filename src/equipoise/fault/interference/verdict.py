"""Whose fault a slow rank is: its own, or that of its neighbours on the host.

Why
    A rank that is late is replaced or given up; a rank with a noisy neighbour would be just as
    late on its next visit, and its replacement as well.

What it decides
    The time that a step takes longer is accounted for, by what the rank's own counters say:

    ========== ====================================== ==========================================
    part       what it is                             whose it is
    ========== ====================================== ==========================================
    ready      ready to run, but not running; or the  a neighbour's if others had its cores or
               core was taken from the whole machine  the machine's; else its own threads'
    computing  more processor time for the same work  a neighbour's as far as the same small
                                                      probe took longer too; else its own
    waiting    neither: asleep, or blocked            a neighbour's if the disk was busier and
                                                      not by this rank, or if more went over the
                                                      network though this rank took fewer steps
    ========== ====================================== ==========================================

    The verdict is the side that has the larger part.

Kept true (tests/unit/fault/interference/test_verdict.py)
    A sleep, a busy loop and threads of its own are the rank's; a neighbour on its core, on the
    memory bus, on the disk and on the network is the neighbour's.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Flags, Floats
from equipoise.base.units import format_seconds
from equipoise.fault.interference.metrics import METRICS, Resource

Whose = Literal["nobody", "this rank", "its neighbour on the host", "unknown"]

_SLOW = 1.05
"""A step that takes this many times as long as usual is slow."""
_OTHERS_SHARE = 0.1
"""Share of the rank's cores that others took, from which they are what it waited for."""
_BUSIER = 1.5
"""Times as much traffic or disk time as usual, from which it is somebody's."""

_AT = {name: at for at, name in enumerate(METRICS)}


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """Who made a rank slow, and by which resource."""

    whose: Whose
    resource: Resource | None
    """What the neighbour used up; None where it is not one."""
    slower: float
    """Seconds of a step over the usual ones, at least 0 [ratio - 1]."""
    neighbour_share: float
    """Share of the lost time that neighbours explain, 0 to 1."""
    text: str
    """One sentence, without the rank's name."""


def verdict(step_s: float, usual_step_s: float, rows: Floats, usual_rows: Floats) -> HostVerdict:
    """Say whose fault it is that a rank's steps take longer than usual.

    Args:
        step_s: Seconds of a step of this rank now, without waiting for other ranks.
        usual_step_s: The same of steps with as much work, before it became slow.
        rows: What its sampler saw meanwhile, float64 [seconds, metrics] in ``METRICS``' order.
        usual_rows: What it saw during the usual steps.

    Returns:
        "nobody" if the steps are not slow; "unknown" without rows of both times.
    """
    slower = max(0.0, step_s / usual_step_s - 1)
    if step_s < _SLOW * usual_step_s:
        return HostVerdict("nobody", None, slower, 0.0, "its steps take as long as usual")
    how = f"a step takes {format_seconds(step_s)} instead of {format_seconds(usual_step_s)}"
    now, usual = _Seconds(rows, step_s), _Seconds(usual_rows, usual_step_s)
    if not now.says_enough or not usual.says_enough:
        return HostVerdict("unknown", None, slower, 0.0, f"{how}; its host was not sampled")
    lost_s = step_s - usual_step_s
    own, others = _account(now, usual, lost_s)
    total = sum(own.values()) + sum(others.values())
    share = sum(others.values()) / total if total else 0.0
    if share > 0.5:
        resource = max(others, key=lambda each: others[each])
        text = f"{how}, {_WORDS[resource]} for {format_seconds(others[resource])} of that"
        return HostVerdict("its neighbour on the host", resource, slower, share, text)
    part = max(own, key=lambda each: own[each])
    text = (
        f"{how}, {part} for {format_seconds(own[part])} of that, which its neighbours do not "
        f"explain"
    )
    return HostVerdict("this rank", None, slower, share, text)


_WORDS: dict[Resource, str] = {
    "cpu": "ready to run while others had its cores",
    "memory": "computing the same work while others used the memory's bandwidth",
    "disk": "waiting while others kept the disk busy",
    "network": "waiting while others used the network",
}


class _Seconds:
    """What a step consists of on average, from rates per second and the step's length."""

    def __init__(self, rows: Floats, step_s: float) -> None:
        known = np.isfinite(rows)
        self._is_known: Flags = np.asarray(known.any(axis=0))
        self._mean = np.where(known, rows, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        self._step_s = step_s

    @property
    def says_enough(self) -> bool:
        """Whether it is known when the rank ran and when it was ready to."""
        return bool(self._is_known[[_AT["own_busy"], _AT["own_delay"]]].all())

    def rate(self, name: str) -> float:
        """A metric's mean."""
        return float(self._mean[_AT[name]])

    def of_step(self, name: str) -> float:
        """Seconds of it in a step, at most the step's."""
        return min(self._step_s, self.rate(name) * self._step_s)


def _account(
    now: _Seconds, usual: _Seconds, lost_s: float
) -> tuple[dict[str, float], dict[Resource, float]]:
    """The lost seconds by what the rank did in them, and by what neighbours used up."""
    own: dict[str, float] = {"computing": 0.0, "waiting": 0.0, "held up by its own threads": 0.0}
    others: dict[Resource, float] = {"cpu": 0.0, "memory": 0.0, "disk": 0.0, "network": 0.0}

    stolen_s = max(0.0, now.of_step("steal") - usual.of_step("steal"))
    delay_s, usual_delay_s = now.of_step("own_delay"), usual.of_step("own_delay")
    # Whoever computes more beside the same neighbours waits more for the core, by its own doing.
    more = max(0.0, now.of_step("own_busy") / max(usual.of_step("own_busy"), 1e-9) - 1)
    ready_s = min(lost_s, max(0.0, delay_s - usual_delay_s))
    by_more_s = min(ready_s, more * usual_delay_s)
    stolen_s = min(stolen_s, max(0.0, lost_s - ready_s))
    own["computing"] += by_more_s
    others["cpu"] += stolen_s
    if now.rate("seat_others") >= _OTHERS_SHARE:
        others["cpu"] += ready_s - by_more_s
    else:
        own["held up by its own threads"] += ready_s - by_more_s

    left_s = lost_s - ready_s - stolen_s
    longer_s = min(left_s, max(0.0, now.of_step("own_busy") - usual.of_step("own_busy")))
    # The probes are the same work at any time, so what they lost the rank's work lost too.
    probed = {
        "memory": max(_ratio(now, usual, "probe_stream"), _ratio(now, usual, "probe_random")),
        "cpu": _ratio(now, usual, "probe_compute"),
    }
    slowest: Resource = "memory" if probed["memory"] >= probed["cpu"] else "cpu"
    by_others_s = min(longer_s, max(0.0, probed[slowest] - 1) * usual.of_step("own_busy"))
    others[slowest] += by_others_s
    own["computing"] += longer_s - by_others_s

    waiting_s = max(0.0, left_s - longer_s)
    culprit = _blocked_by(now, usual)
    if culprit is None:
        own["waiting"] += waiting_s
    else:
        others[culprit] += waiting_s
    return own, others


def _ratio(now: _Seconds, usual: _Seconds, name: str) -> float:
    before = usual.rate(name)
    return now.rate(name) / before if before > 0 else 1.0


def _blocked_by(now: _Seconds, usual: _Seconds) -> Resource | None:
    """What others kept busy while the rank was neither running nor ready."""
    moved = now.rate("disk_read") + now.rate("disk_written")
    own_moved = now.rate("own_read") + now.rate("own_written")
    busier = now.rate("disk_busy") >= max(0.2, _BUSIER * usual.rate("disk_busy"))
    if busier and own_moved < 0.5 * moved:
        return "disk"
    traffic = [each.rate("loop_packets") + each.rate("link_packets") for each in (now, usual)]
    # This rank sends as much in a step as before, so fewer steps mean less, not more.
    if traffic[0] >= max(1000.0, _BUSIER * traffic[1]):
        return "network"
    return None
