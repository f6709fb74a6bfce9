"""Up to which predicted time prompts fill an iteration.

What it decides
    Up to ``iteration_s``, or to some times what the decodes take alone if that is longer; to
    ``prefill_iteration_s`` where nothing decodes and so nobody waits for a next token, as far as
    longer iterations are faster. Where several tenants have shares, the limit of ``turns.py``
    holds instead while any of them decodes.
"""

from equipoise.schedule.batching.decodes import Decodes
from equipoise.schedule.batching.settings import BatchSettings, ServingPrice, single_s
from equipoise.schedule.batching.totals import decodes_s
from equipoise.schedule.batching.turns import DECODE_TIMES

_LEAST_TIMES = 16
"""Several prompts fill an iteration up to this many times what a single token takes: more would
hardly be faster, and the first would wait longer for the last."""

_DECODE_TIMES_OF_OTHERS = 2
"""Less than ``DECODE_TIMES``, where several tenants are here that have no shares: nobody's prompts
may slow others more."""


def prompts_budget_s(
    settings: BatchSettings,
    price: ServingPrice,
    decodes: Decodes,
    *,
    requests: int,
    tenants: int,
    limit_s: float | None,
) -> float:
    """Up to where prompts fill an iteration [s].

    Args:
        settings: Times of the engine.
        price: Of iterations.
        decodes: Of this iteration, and those that rest.
        requests: How many are here, whatever their state.
        tenants: How many they are of.
        limit_s: That of ``turns.py``, where it holds.
    """
    if len(decodes):
        if limit_s is not None:
            return limit_s
        if len(decodes) == requests:  # there is nothing to fill it with
            return settings.iteration_s
        times = DECODE_TIMES if tenants == 1 else _DECODE_TIMES_OF_OTHERS
        return max(settings.iteration_s, times * decodes_s(decodes, price))
    if requests <= 1:
        return settings.prefill_iteration_s
    long_s = _LEAST_TIMES * single_s(price)
    return max(settings.iteration_s, min(long_s, settings.prefill_iteration_s))
