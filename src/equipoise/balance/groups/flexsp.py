"""FlexSP: in each micro-batch, groups of different sizes, chosen by mixed-integer programming.

Why
    With one sequence-parallel degree, short documents pay the all-to-all of the group that the
    longest one needs. Groups of 1, 2, 4, ... ranks side by side give long documents a wide
    group and keep short ones where links are fast.

What it decides
    1. *Micro-batches*: documents sorted by length, cut into M runs of nearly equal tokens, for
       M from the fewest that memory allows to four more (the Blaster).
    2. *Buckets*: in each micro-batch at most 16 lengths, by dynamic programming.
    3. *Groups*: powers of two, and which documents each one runs, so that the slowest group is
       fast. A heuristic bounds the exact search and is kept if that finds nothing better.
    The M with the least total time wins. Micro-batches run one after the other: the published
    system gathers parameters over all ranks in every layer, so all ranks meet.

Kept true (tests/unit/balance/groups/test_flexsp.py, by Hypothesis)
    What every group plan keeps (``balance.groups.plan``); sizes are powers of two; plans are
    repeatable, never slower than the heuristic's, and within 2% of brute force on small cases.

Sources
    FlexSP, arXiv:2412.01523, sections 4 and 5; the published costs are
    ``balance.groups.cost.FLEXSP_7B_A100``.
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from equipoise.balance.groups.batch import GroupBatch, Groups
from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.groups.plan import (
    Gang,
    GroupPlan,
    finish_plan,
    make_gang,
)
from equipoise.balance.groups.require import require_fit, require_lengths
from equipoise.base.arrays import Ints

_MORE_BATCHES = 4
"""Counts of micro-batches tried beyond the first that fits: section 5 of the paper."""


def plan_flexsp(
    doc_tokens: npt.ArrayLike,
    ranks: int,
    costs: GroupCosts,
    cap_tokens: int,
    *,
    buckets: int = 16,
    nodes: int = 16,
) -> GroupPlan:
    """Groups of powers of two in each micro-batch, by FlexSP.

    The first four arguments and the errors are those of ``plan_gangs``; without SciPy also
    ModuleNotFoundError, if ``nodes`` is above 0. The exact search sees at most ``buckets``
    different lengths in a micro-batch and ends after ``nodes`` nodes: a count, not a clock, so that
    every rank arrives at the same plan.

    Returns:
        The plan, with a barrier before each micro-batch but the first.

    Cost: ``5 x micro-batches`` exact searches of ``buckets x 2 x ranks`` integers each.

    >>> from equipoise.cost.curve import break_even_curve
    >>> plan = plan_flexsp([900, 300, 300], 8, GroupCosts(break_even_curve(10_000)), 400)
    >>> [(len(gang.ranks), gang.documents) for gang in plan.gangs]
    [(8, (0,)), (4, (1,)), (4, (2,))]
    """
    began = time.perf_counter()
    lengths = require_lengths(doc_tokens, ranks, cap_tokens)
    widest = 1 << (ranks.bit_length() - 1)
    require_fit(lengths, widest, ranks, cap_tokens, "flexsp")
    best: list[Groups] = []
    if len(lengths):
        best = _best_batches(lengths, ranks, costs, cap_tokens, buckets, nodes)
    gangs: list[Gang] = []
    barriers = []
    for groups in best:
        if gangs:
            barriers.append(len(gangs))
        gangs += _place(groups, lengths, costs)
    plan_s = time.perf_counter() - began
    return finish_plan(
        "flexsp", gangs, lengths, ranks, costs, cap_tokens, barriers=barriers, plan_s=plan_s
    )


def _best_batches(
    lengths: Ints, ranks: int, costs: GroupCosts, cap: int, buckets: int, nodes: int
) -> list[Groups]:
    """The division into micro-batches with the least total time."""
    order = np.lexsort((np.arange(len(lengths)), -lengths))
    count = max(1, -(-int(lengths.sum()) // (ranks * cap)))
    best: list[Groups] = []
    best_ns, left = 0, 1 + _MORE_BATCHES
    solved: dict[tuple[int, int], Groups] = {}  # by run of documents
    # With one document a micro-batch every count fits, so the search ends.
    while count <= len(lengths) and left:
        runs = cut_evenly(lengths[order], count)
        batches = [GroupBatch(lengths, order[a:b], ranks, costs, cap) for a, b in runs]
        known = [batch.greedy() for batch in batches]
        chosen = [groups for groups in known if groups is not None]
        count += 1
        if len(chosen) < len(batches):
            continue
        left -= 1
        total = sum(batch.slowest(groups) for batch, groups in zip(batches, chosen, strict=True))
        hope = sum(batch.bound_ns for batch in batches)
        for at, (run, batch) in enumerate(zip(runs, batches, strict=True)):
            if nodes < 1 or (best and hope >= best_ns):
                break
            before = batch.slowest(chosen[at])
            if run not in solved:
                solved[run] = batch.improve(chosen[at], buckets, nodes)
            chosen[at] = solved[run]
            total -= before - batch.slowest(chosen[at])
            hope += batch.slowest(chosen[at]) - batch.bound_ns
        if not best or total < best_ns:
            best, best_ns = chosen, total
    return best


def cut_evenly(lengths: Ints, runs: int) -> list[tuple[int, int]]:
    """Consecutive runs ``[first, stop)`` of nearly equal tokens, none empty.

    Each run ends nearest to an equal share of the remaining tokens.

    >>> cut_evenly(np.array([9, 3, 3, 2]), 3)
    [(0, 1), (1, 2), (2, 4)]
    """
    ends = np.cumsum(lengths)
    bounds, first, taken = [], 0, 0
    for left in range(runs, 0, -1):
        wanted = taken + (int(ends[-1]) - taken) / left
        stop = int(np.searchsorted(ends, wanted, side="right"))
        if stop < len(ends) and ends[stop] - wanted < wanted - (ends[stop - 1] if stop else 0):
            stop += 1
        stop = len(ends) if left == 1 else min(max(stop, first + 1), len(ends) - left + 1)
        bounds.append((first, stop))
        first, taken = stop, int(ends[stop - 1])
    return bounds


def _place(groups: Sequence[tuple[int, list[int]]], lengths: Ints, costs: GroupCosts) -> list[Gang]:
    """Put the widest groups first, so that powers of two lie on aligned neighbours."""
    gangs, first = [], 0
    for size, documents in sorted(groups, key=lambda group: (-group[0], group[1])):
        gangs.append(make_gang(range(first, first + size), documents, lengths, costs))
        first += size
    return gangs
