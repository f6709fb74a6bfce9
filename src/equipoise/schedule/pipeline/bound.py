"""A lower bound on the makespan of any schedule of these prices.

What it decides
    The larger of two bounds. A rank cannot begin before the first micro-batch reaches it, then
    has all its work to do, and its last input gradient must still travel back to the first
    stage. And no micro-batch finishes before it has gone down all stages and back.

Kept true (tests/unit/schedule/pipeline/test_replay.py, by Hypothesis)
    No strategy's makespan is below it.
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.pipeline.prices import PipelinePrices


def bound_pipeline(prices: PipelinePrices, rank_of: Ints) -> int:
    """Lower bound on the makespan [ns].

    Cost: O(stages x micro-batches), in NumPy.
    """
    if not prices.forward_ns.size:
        return 0
    travels = np.concatenate(([0], (np.diff(rank_of) != 0).astype(np.int64)))
    hops = travels[:, None] * prices.hop_ns
    arrives = np.cumsum(hops, axis=0) + np.cumsum(prices.forward_ns, axis=0) - prices.forward_ns
    returns = np.cumsum(hops, axis=0) + np.cumsum(prices.input_ns, axis=0) - prices.input_ns
    there_and_back = prices.forward_ns.sum(0) + prices.input_ns.sum(0) + 2 * hops.sum(0)
    best = int((there_and_back + prices.weight_ns[0]).max())
    both = prices.forward_ns + prices.input_ns
    for rank in range(int(rank_of.max()) + 1):
        mine = rank_of == rank
        begins = int(arrives[mine].min())
        last = int((returns + prices.weight_ns[0])[mine].min())
        best = max(best, begins + int((both + prices.weight_ns)[mine].sum()))
        if not mine[0]:
            best = max(best, begins + int(both[mine].sum()) + last)
    return best
