"""Gangs of any size: each document gets as few ranks as let all ranks end together.

Why
    The smallest group that holds a document is often too small: on the ranks that its memory
    needs, one document may outlast the rest of the step. The largest is too large: what travels
    grows with it. And a document that fits on 5 ranks need not take 8.

What it decides
    1. A document is *long* if no rank holds it alone, or if alone it would outlast a limit. It
       gets the fewest ranks that hold it and meet the limit.
    2. Gangs are placed widest and longest first, each on the ranks, or the block of neighbours,
       that are free earliest. Block widths divide the ranks, so that blocks nest and no rank
       waits for a wider gang.
    3. Short documents fill the holes before gangs, then go to the ranks that end first.
    4. While the last rank ends more than 1% above the bound, other limits are tried: fractions
       of the bound, and multiples, since with costly travel a wide gang keeps many ranks busy
       for little. Then the longest document of the last ranks gets more ranks or fewer while
       that helps.

Kept true (tests/unit/balance/groups/test_policies.py, by Hypothesis)
    What every group plan keeps (``balance.groups.plan``); near brute force on small cases.

Sources
    Ranks for a document by its work: ByteScale, arXiv:2502.21231, section 4. Longest first:
    R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.groups.layout import GroupJob, lay_out, make_job
from equipoise.balance.groups.plan import (
    Gang,
    GroupPlan,
    critical_bound,
    finish_plan,
)
from equipoise.balance.groups.require import require_fit, require_lengths
from equipoise.base.arrays import Ints

_EVEN = 1.01
"""Ratio of the last rank's end to the bound at which the search stops."""

_SHARES = (1.0, 0.5, 1.1, 1.25, 0.25, 1.5, 0.125, 2.0, 0.0625, 1 / 32, 1 / 64)
"""Limits tried, as multiples of the bound. Above 1: with costly travel, a document that ends late
on few ranks leaves the others free."""

_PATIENCE = 8
"""Consecutive attempts without a gain before the search over limits stops."""

_MOVES = 6
"""Times that the longest document of the last ranks may get more ranks or fewer."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Gangs laid out, with the widths that led to them."""

    widths: Ints
    on_blocks: bool
    gangs: tuple[Gang, ...]
    score: tuple[int, int]
    """When the last rank ends, and the rank-time of all gangs [ns]."""


def plan_gangs(
    doc_tokens: npt.ArrayLike,
    ranks: int,
    costs: GroupCosts,
    cap_tokens: int,
    *,
    aligned: bool = False,
) -> GroupPlan:
    """Give each document as few ranks as let all ranks end together.

    Args:
        doc_tokens: Length of each document, >= 1 [tokens].
        ranks: Ranks in all, >= 1.
        costs: Price of a document on any number of ranks, the same on every rank.
        cap_tokens: Most tokens that one rank holds at once [tokens].
        aligned: Use only blocks of neighbours whose size divides ``ranks``, for links that are
            fast between neighbours.

    Returns:
        The plan, with its bound.

    Raises:
        DataError: a length is not a whole number >= 1.
        LayoutError: ranks or cap below 1.
        FitError: a document does not fit on all ranks together.

    Cost: O(n log n + gangs x ranks) for each of at most ``22 + 12`` attempts, most often one.

    >>> from equipoise.cost.curve import break_even_curve
    >>> plan = plan_gangs([900, 300, 300], 5, GroupCosts(break_even_curve(float('inf'))), 400)
    >>> [(gang.ranks, gang.documents) for gang in plan.gangs]
    [((0, 1, 2), (0,)), ((3,), (1,)), ((4,), (2,))]
    """
    began = time.perf_counter()
    lengths = require_lengths(doc_tokens, ranks, cap_tokens)
    require_fit(lengths, ranks, ranks, cap_tokens, "gangs")
    gangs: tuple[Gang, ...] = ()
    bound_ns = critical_bound(lengths, ranks, costs, cap_tokens)
    if len(lengths):
        job = make_job(lengths, ranks, costs, cap_tokens, min(_SHARES) * bound_ns)
        gangs = _search(job, aligned, bound_ns).gangs
    plan_s = time.perf_counter() - began
    return finish_plan(
        "gangs", gangs, lengths, ranks, costs, cap_tokens, bound_ns=bound_ns, plan_s=plan_s
    )


def _search(job: GroupJob, aligned: bool, bound_ns: int) -> _Attempt:
    """The attempt that ends first; ties go to the least rank-time."""
    even = _EVEN * bound_ns
    best = _attempt(job, job.widths(even - job.costs.fixed_ns), aligned)
    tried, idle = {(aligned, best.widths.tobytes())}, 0
    # With free travel more ranks cost nothing: limits above 1 never help, finer ones may.
    is_free = job.costs.exchange is None
    for share in _SHARES:
        if is_free and share > 1:
            continue
        widths = job.widths(even * share)
        for on_blocks in (True,) if aligned else (False, True):
            if best.score[0] <= even or (idle >= _PATIENCE and not is_free):
                break
            chosen = _divisors_up(widths, job.ranks) if on_blocks else widths
            if (on_blocks, chosen.tobytes()) not in tried:
                tried.add((on_blocks, chosen.tobytes()))
                candidate = _attempt(job, chosen, on_blocks)
                best, idle = (candidate, 0) if candidate.score < best.score else (best, idle + 1)
    for _ in range(_MOVES):
        if best.score[0] <= even:
            break
        moved = [_attempt(job, widths, best.on_blocks) for widths in _moves(job, best)]
        candidate = min([best, *moved], key=lambda attempt: attempt.score)
        if candidate is best:
            break
        best = candidate
    return best


def _attempt(job: GroupJob, widths: Ints, on_blocks: bool) -> _Attempt:
    chosen = _divisors_up(widths, job.ranks) if on_blocks else widths
    gangs = lay_out(job, chosen, on_blocks=on_blocks)
    end = max(gang.stop_ns for gang in gangs)
    spent = sum(gang.load_ns * len(gang.ranks) for gang in gangs)
    return _Attempt(chosen, on_blocks, gangs, (end, spent))


def _divisors_up(widths: Ints, ranks: int) -> Ints:
    """Each width, or the next above it that divides the ranks.

    >>> _divisors_up(np.array([1, 3, 5]), 8).tolist()
    [1, 4, 8]
    """
    divisors = np.array([d for d in range(1, ranks + 1) if ranks % d == 0])
    divisor: Ints = divisors[np.searchsorted(divisors, widths)]
    return divisor


def _moves(job: GroupJob, attempt: _Attempt) -> list[Ints]:
    """The widths with one document of the last ranks a step wider, and a step narrower.

    It is the document that these ranks share with others for the longest time.
    """
    last = max(attempt.gangs, key=lambda gang: gang.stop_ns)
    held: Sequence[int] = [
        document
        for gang in attempt.gangs
        if not set(gang.ranks).isdisjoint(last.ranks)
        for document in gang.documents
    ]
    mine = np.flatnonzero(np.isin(job.candidates, held))
    if not len(mine):
        return []
    item = mine[int(job.times[mine, attempt.widths[mine] - 1].argmax())]
    now = int(attempt.widths[item])
    steps = [d for d in range(1, job.ranks + 1) if not attempt.on_blocks or job.ranks % d == 0]
    at = steps.index(now)
    variants = []
    for width in steps[max(0, at - 1) : at] + steps[at + 1 : at + 2]:
        if width >= job.least[item]:
            changed = attempt.widths.copy()
            changed[item] = width
            variants.append(changed)
    return variants
