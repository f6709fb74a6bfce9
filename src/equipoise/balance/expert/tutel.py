"""One layout of weights for every way to share experts, chosen anew for each micro-batch.

Why
    Few rows are cheaper to send to the experts than the experts' weights; many rows are not. With
    the weights in one place whichever way is taken, changing it moves no parameter.

What it decides
    Each of ``ep`` ranks keeps a run of the experts, and each of ``etp`` a run of the hidden units
    of each. A *sharing* says what travels to where a row is computed, with s = etp:

    ==========  =====================================  =========================================
    sharing     rows                                   weights
    ==========  =====================================  =========================================
    0           stay                                   of every expert that a rank has rows for
    1           to the owners of their experts         the hidden units of the other s - 1 ranks
    r, a        as 1, then to the r - 1 others of a    the units of s / r - 1 ranks, so that r
    divisor     run of r ranks                         ranks together have all
    s           as 1, then to the s - 1 others         stay
    ==========  =====================================  =========================================

    ``choose_sharing`` prices each by its slowest rank and takes the cheapest, the first of equals.

Kept true (tests/unit/balance/expert/test_tutel.py, tests/multi/parallel/test_tutel.py)
    The cheapest of all is taken; at few rows weights stay, at many rows do; any switch leaves each
    rank's parameters where they were, and loss and gradients equal one rank's.

Sources
    Tutel: arXiv:2206.03382, section 3.2 and figure 7: r in {0, 1, ..., s}, cost of r = 0 by the
    parameters, of r >= 1 by r times the tokens and 1/r of the parameters.
"""

import numpy as np

from equipoise.balance.expert.price import RowPrices, price_experts
from equipoise.balance.expert.request import ExpertRequest, write_schedule
from equipoise.base.arrays import Ints
from equipoise.schedule.expert.schedule import ExpertSchedule, owners_of, schedule_experts


def tutel(request: ExpertRequest) -> ExpertSchedule:
    """Every row at its own rank, or every expert: what is cheaper for these rows."""
    owned = schedule_experts(request.rows)
    gathered = gather_experts(request)
    prices = request.prices
    if price_experts(gathered, prices) < price_experts(owned, prices):
        return gathered
    return write_schedule("tutel", request, owned.places, owned.loads)


def gather_experts(request: ExpertRequest) -> ExpertSchedule:
    """Every rank computes its own rows, with weights of all experts that it has rows for."""
    rows, owners = request.rows, request.owners
    ranks = request.ranks
    own = np.arange(ranks)[:, np.newaxis] == owners
    places = np.argwhere(((rows > 0) | own).T).astype(np.int64)
    quotas = np.zeros((ranks, len(places)), dtype=np.int64)
    quotas[places[:, 1], np.arange(len(places))] = rows[places[:, 1], places[:, 0]]
    return ExpertSchedule("tutel", rows, owners, places, quotas)


def sharings(etp: int) -> list[int]:
    """Every way to share experts whose hidden units ``etp`` ranks divide.

    >>> sharings(4), sharings(1)
    ([0, 1, 2, 4], [0, 1])
    """
    return [0, *(r for r in range(1, etp + 1) if etp % r == 0)]


def choose_sharing(rows: Ints, prices: RowPrices) -> int:
    """The cheapest way to share experts for these rows.

    Args:
        rows: Of each rank for each expert, int64 [etp, ep, X].
        prices: Of rows that travel, and of experts.
    """
    costs = price_sharings(rows, prices)
    return min(costs, key=lambda each: (costs[each], each))


def price_sharings(rows: Ints, prices: RowPrices) -> dict[int, float]:
    """What the slowest rank takes in each way, in rows that it could compute meanwhile.

    Args:
        rows: Of each rank for each expert, int64 [etp, ep, X].
        prices: Of rows that travel, and of experts.
    """
    etp, ep, experts = rows.shape
    owners = owners_of(experts, ranks=ep)
    here = np.bincount(owners, minlength=ep)
    # Experts that a rank has rows for, and the units that it lacks of those that it owns.
    own = owners == np.arange(ep)[:, np.newaxis]
    needed = ((rows > 0) & ~own).sum(axis=2) + here * (1 - 1 / etp)
    costs = {0: float((rows.sum(axis=2) + prices.least_rows * needed).max())}
    arrived = np.stack([rows[:, :, owners == rank].sum(axis=(1, 2)) for rank in range(ep)], axis=1)
    local = np.stack([rows[:, rank, owners == rank].sum(axis=1) for rank in range(ep)], axis=1)
    travels = np.maximum(arrived - local, rows.sum(axis=2) - local)
    for r in sharings(etp)[1:]:
        groups = arrived.reshape(etp // r, r, ep).sum(axis=1).repeat(r, axis=0)
        moved = travels + groups - arrived
        widened = here * (1 / r - 1 / etp)
        each = groups / r + prices.row_cost * moved + prices.least_rows * widened
        costs[r] = float(each.max())
    return costs
