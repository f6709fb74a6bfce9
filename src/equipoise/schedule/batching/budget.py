"""Up to which predicted time prompts fill an iteration.

What it decides
    Up to ``iteration_s``, or to some times what the decodes take alone if that is longer, and the
    more times the more requests wait for a first token; to
    ``prefill_iteration_s`` where nothing decodes and so nobody waits for a next token, as far as
    longer iterations are faster. Where several tenants have shares, the limit of ``turns.py``
    holds instead while any of them decodes.
"""

from equipoise.schedule.batching.limit import DECODE_TIMES
from equipoise.schedule.batching.settings import BatchSettings, ServingPrice, single_s
from equipoise.spec.serving import IterationWork

_LEAST_TIMES = 16
"""Several prompts fill an iteration up to this many times what a single token takes: more would
hardly be faster, and the first would wait longer for the last."""

_DECODE_TIMES_OF_OTHERS = 2
"""Less than ``DECODE_TIMES``, where several tenants are here that have no shares: nobody's prompts
may slow others more."""

_MOST_WAITING = 3
"""Each request that waits for its first token adds ``DECODE_TIMES``, and no more than these do: a
longer iteration does more of their prompts in a second, and the more wait, the more that is worth.
Measured, SmolLM2-135M on two cores, eight at a time with prompts of 256: a fifth more tokens."""


class PromptsBudget:
    """How long an iteration may become as prompts are added to its decodes."""

    def __init__(
        self,
        settings: BatchSettings,
        price: ServingPrice,
        decodes: IterationWork,
        requests: int,
        tenants: int,
    ) -> None:
        """Begin with the decodes alone.

        Args:
            settings: Times of the engine.
            price: Of iterations.
            decodes: Those of this iteration.
            requests: How many are here, whatever their state.
            tenants: How many they are of.
        """
        self._settings, self._price, self._decodes = settings, price, decodes
        self._requests, self._tenants = requests, tenants
        self._budget_s: float | None = None

    def holds(self, seconds: float) -> bool:
        """Whether an iteration may take this long."""
        if self._budget_s is None:
            self._budget_s = self._find_s()
        return seconds <= self._budget_s

    def _find_s(self) -> float:
        settings, decodes = self._settings, self._decodes
        if decodes.sequences:
            if decodes.sequences == self._requests:  # there is nothing to fill it with
                return settings.iteration_s
            times = _DECODE_TIMES_OF_OTHERS
            if self._tenants == 1:
                waiting = self._requests - decodes.sequences
                times = DECODE_TIMES * min(waiting, _MOST_WAITING)
            return max(settings.iteration_s, times * self._price.iteration_s(decodes))
        if self._requests <= 1:
            return settings.prefill_iteration_s
        long_s = _LEAST_TIMES * single_s(self._price)
        return max(settings.iteration_s, min(long_s, settings.prefill_iteration_s))
