"""Gangs of any size: each document as few ranks as let all ranks end together.

Why
    The smallest group that holds a document is often too small: on just the ranks that its
    memory needs, one document may outlast everything else of the step. The largest is too
    large: what travels grows with it. And a document that 5 ranks hold need not be given 8.

What it decides
    1. A document is *long* if no rank holds it alone, or if alone it would outlast a share of
       the mean. It gets the fewest ranks for which neither is so.
    2. Gangs are placed widest and longest first, each on the ranks that are free earliest, or
       on the block of neighbours that is. Of blocks the widths divide the ranks, so that they
       nest and no rank waits for a wider gang.
    3. Short documents go into the holes before gangs, then to the rank that ends first.
    4. While the last rank ends more than 1% above the ideal, documents of half that share are
       long, too; then the last rank's own longest document gets more ranks, while that helps.

Kept true (tests/unit/balance/test_groups.py, by Hypothesis)
    What every group plan keeps (balance.groups_plan); near brute force on small cases.

Sources
    Ranks for a document by its work: ByteScale, arXiv:2502.21231, section 4. Longest first:
    R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balance.groups_cost import GroupCosts
from equipoise.balance.groups_layout import Job, lay_out, make_job
from equipoise.balance.groups_plan import (
    Gang,
    GroupPlan,
    finish_plan,
)
from equipoise.balance.groups_require import require_fit, require_lengths
from equipoise.cost.work import Ints

_EVEN = 1.01
"""Last rank over ideal at which nothing further is tried."""

_FINEST = 6
"""Documents are long down to ``2 ** -_FINEST`` of a rank's mean work, and no further."""

_WIDENINGS = 8
"""Times that the last rank's longest document is given more ranks."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Gangs laid out, and how they were asked for."""

    widths: Ints
    on_blocks: bool
    gangs: tuple[Gang, ...]
    score: tuple[int, int]
    """When the last rank ends, and the rank-seconds of all [ns]."""


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
        aligned: Only blocks of neighbours whose size divides ``ranks``, for links that are
            fast between neighbours; else any ranks.

    Returns:
        The plan, with its bound.

    Raises:
        DataError: a length is no whole number of 1 or more.
        LayoutError: ranks or cap below 1.
        FitError: a document does not fit all ranks together.

    Cost: O(n log n + gangs x ranks) for each of at most ``2 x 7 + 8`` attempts.

    >>> from equipoise.cost.curve import break_even_curve
    >>> plan = plan_gangs([900, 300, 300], 5, GroupCosts(break_even_curve(float('inf'))), 400)
    >>> [(gang.ranks, gang.documents) for gang in plan.gangs]
    [((0, 1, 2), (0,)), ((3,), (1,)), ((4,), (2,))]
    """
    began = time.perf_counter()
    lengths = require_lengths(doc_tokens, ranks, cap_tokens)
    require_fit(lengths, ranks, ranks, cap_tokens, "gangs")
    gangs: tuple[Gang, ...] = ()
    if len(lengths):
        job = make_job(lengths, ranks, costs, cap_tokens, 2.0**-_FINEST)
        gangs = _search(job, aligned).gangs
    plan_s = time.perf_counter() - began
    return finish_plan("gangs", gangs, lengths, ranks, costs, cap_tokens, plan_s=plan_s)


def _search(job: Job, aligned: bool) -> _Attempt:
    """The attempt that ends first; of equals, the one of least rank-seconds."""
    mean = float(job.alone_ns.sum()) / job.ranks
    best = _attempt(job, job.widths(_EVEN * mean), aligned)
    tried = {(best.on_blocks, best.widths.tobytes())}
    for finer in range(_FINEST + 1):
        widths = job.widths(_EVEN * mean * 2.0**-finer)
        for on_blocks in (True,) if aligned else (False, True):
            if best.score[0] <= _EVEN * mean:
                return best
            chosen = _divisors_up(widths, job.ranks) if on_blocks else widths
            if (on_blocks, chosen.tobytes()) not in tried:
                tried.add((on_blocks, chosen.tobytes()))
                best = min(best, _attempt(job, chosen, on_blocks), key=lambda it: it.score)
    for _ in range(_WIDENINGS):
        wider = _widen_last(job, best)
        if best.score[0] <= _EVEN * mean or wider is None:
            break
        found = _attempt(job, wider, best.on_blocks)
        if found.score >= best.score:
            break
        best = found
    return best


def _attempt(job: Job, widths: Ints, on_blocks: bool) -> _Attempt:
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
    found: Ints = divisors[np.searchsorted(divisors, widths)]
    return found


def _widen_last(job: Job, attempt: _Attempt) -> Ints | None:
    """The widths with one rank more for the longest document of the ranks that end last."""
    last = max(attempt.gangs, key=lambda gang: gang.stop_ns)
    held: Sequence[int] = [
        document
        for gang in attempt.gangs
        if not set(gang.ranks).isdisjoint(last.ranks)
        for document in gang.documents
    ]
    mine = np.flatnonzero(np.isin(job.candidates, held) & (attempt.widths < job.ranks))
    if not len(mine):
        return None
    share = job.times[mine, attempt.widths[mine] - 1]
    wider = attempt.widths.copy()
    wider[mine[int(share.argmax())]] += 1
    return wider
