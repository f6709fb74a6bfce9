"""By how much steps of the cheapest policies are slower than steps of the best single one.

Why
    Prices are forecasts. What they cost where they are wrong is the regret: the time of a step in
    which every micro-batch had the policy of the lowest price, over that of the best policy tried.

What it decides
    Medians of seconds: over the steps without a try, and over each policy's tries; the first two
    steps of a session are slow and count for nothing. Steps differ in their documents, so a
    regret below zero means no more than that the choice was not worse.

Kept true (tests/unit/balance/expert/test_regret.py)
    Zero where all steps take the same time; unknown before a policy has been tried.
"""

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.balance.expert.auto import TRIAL_STEPS, trial_of

_SLOW_STEPS = 2


class PolicyTimes:
    """Seconds of steps by what chose their policies."""

    def __init__(self, policies: Sequence[str]) -> None:
        self._policies, self._step = list(policies), 0
        self._chosen_s: deque[float] = deque(maxlen=TRIAL_STEPS)
        self._tried_s: dict[str, deque[float]] = {}

    def add(
        self,
        chosen: Sequence[Mapping[str, int]],
        priced: Sequence[Mapping[str, int]],
        step_s: float,
    ) -> dict[str, Any]:
        """What a journal says of a step.

        Args:
            chosen: By layer, micro-batches of each policy.
            priced: By layer, the sum of each policy's prices [rows].
            step_s: Its seconds.
        """
        tried = trial_of(self._step, self._policies)
        self._step += 1
        micro_batches = sum(map(Counter, chosen), Counter[str]())
        if self._step > _SLOW_STEPS:
            if not tried:
                self._chosen_s.append(step_s)
            elif micro_batches[tried]:  # else these ranks cannot obey it
                self._tried_s.setdefault(tried, deque(maxlen=TRIAL_STEPS)).append(step_s)
        return {
            "chosen": {name: count for name, count in micro_batches.items() if count},
            "priced": dict(sum(map(Counter, priced), Counter[str]())),
            "tried": tried,
            "regret": self.regret,
        }

    @property
    def regret(self) -> float | None:
        """Median seconds of a step by price over those of the best policy, minus 1."""
        if not self._chosen_s or not self._tried_s:
            return None
        best_s = min(statistics.median(each) for each in self._tried_s.values())
        return statistics.median(self._chosen_s) / best_s - 1.0
