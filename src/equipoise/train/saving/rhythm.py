"""How often a run saves: every n steps, or as its failures and the cost of its saves make best.

What it decides
    With ``checkpoint.every_steps = "auto"`` the first save is due after the second step of a
    session, since the first step is slower than the others. Each save is then measured, and the
    next one is due after Young's and Daly's interval: what saving costs and what a failure loses
    are least together at ``sqrt(2 x cost x time between failures)``. A save costs the time for
    which training stood still, and on a CPU also the processor time of the thread that writes. The
    next save never begins before the last one can be on the disk.

    All ranks compute from the same numbers, those of the slowest rank.

Kept true (tests/unit/train/test_rhythm.py)
    Any two ranks that learn the same agree; a dearer save is rarer.

Sources
    Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from equipoise.base.units import format_seconds
from equipoise.sim.faults import FaultOptions, best_interval

_FIRST_STEPS = 2
"""Steps of a session until its first save, which measures what saves cost."""

_REMEMBERED = 15
"""Saves and steps over which medians are taken."""

_NEWS = 1.25
"""An interval that has changed by more than this factor is worth a sentence."""


@dataclass(slots=True)
class Rhythm:
    """When the next save of a run is due; the same on all ranks.

    Args:
        every: ``checkpoint.every_steps``.
        rank_mtbf_s: Mean time between failures of one rank [s].
        world: Ranks.
    """

    every: int | Literal["auto"]
    rank_mtbf_s: float
    world: int
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _interval: int | None = None
    _said: int | None = None
    _last: int = 0

    @property
    def step_s(self) -> float:
        """The median of the last steps of this rank [s]; 0 before the first."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def is_due(self, step: int, *, is_under_way: bool) -> bool:
        """Whether to save after this step."""
        if self.every != "auto":
            return step % self.every == 0
        return not is_under_way and step >= self._last + (self._interval or _FIRST_STEPS)

    def begin(self, step: int) -> None:
        """Count from this step: a save of it begins, or it was loaded."""
        self._last = step

    def note(self, step_s: float) -> None:
        """Note how long a step took on this rank."""
        self._steps_s.append(step_s)

    def learn(self, cost_s: float, written_s: float, step_s: float) -> dict[str, float] | None:
        """Choose the interval after a save, by its measurements on the slowest rank.

        Returns:
            What was decided, for the journal; None if ``every`` is a number.
        """
        if self.every != "auto" or step_s <= 0:
            return None
        self._costs_s.append(cost_s)
        cost_s = statistics.median(self._costs_s)
        options = FaultOptions(self.rank_mtbf_s, cost_s, restart_s=0.0)
        best = best_interval(step_s, self.world, options)
        self._interval = max(best, math.ceil(written_s / step_s))
        return {
            "every_steps": self._interval,
            "cost_s": cost_s,
            "written_s": written_s,
            "step_s": step_s,
            "mtbf_s": self.rank_mtbf_s / self.world,
        }

    def news(self, decided: dict[str, float]) -> str:
        """A sentence, if the interval is new or has changed by much."""
        interval = round(decided["every_steps"])
        known, factor = self._said, _NEWS
        if known is not None and max(interval / known, known / interval) <= factor:
            return ""
        self._said = interval
        steps = "every step" if interval == 1 else f"every {interval:,} steps"
        return (
            f"A save costs {format_seconds(decided['cost_s'])} and a failure is assumed every "
            f"{format_seconds(decided['mtbf_s'])} (checkpoint.rank_mtbf_hours = "
            f"{self.rank_mtbf_s / 3600:g}, ranks: {self.world:,}), so the run saves {steps}, "
            f"{format_seconds(interval * decided['step_s'])} apart."
        )
