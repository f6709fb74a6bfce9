"""Cluster tokens and experts together: experts that the same tokens choose lie on one rank.

Why
    Experts have no order, so a layer may be renumbered without changing what it computes. If the
    experts of a token are on one rank, and the token is there too, its rows do not travel.

What it decides
    Which experts are on which rank in each layer, from how often each kind of token chose each.
    Tokens keep their rank through all layers, because the residual stream that they carry does, so
    all layers are clustered around the same tokens::

        tokens  --where their experts are-->  ranks, equally full      (balance.expert.deal)
        experts --where their tokens are-->   ranks, equally many      (an assignment, exact)

    in turn until no row more is local. A beginning draws a kind of token for each rank, unlike the
    others, and deals to each the tokens that are like it; the best of several is taken. Then, while
    the fullest rank of a layer has more than ``1 + tolerance`` of the mean, two experts change
    places: those that lower it for the fewest local rows.

Kept true (tests/unit/balance/expert/test_cluster.py, by Hypothesis)
    Every rank has its number of experts; the answer depends on the arguments alone; where tokens
    and experts fall into groups that never mix, the groups are found; on small cases it has the
    share of local rows that the best of all placements has, within a few percent.

Sources
    Speculative expert grouping, a balanced co-clustering: Speculative MoE, arXiv:2503.04398. It
    searches by cross-entropy; here both halves of a turn are assignments.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.balance.expert.deal import deal
from equipoise.base.arrays import Ints
from equipoise.spec.layout import rows_of
from equipoise.spec.model.experts import split_experts

_BEGINNINGS, _TURNS = 12, 40

TOLERANCE = 0.1
"""By how much a rank's rows may exceed the mean before experts change places to lower it."""


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Where experts lie, and how many rows of the counted tokens that leaves at home."""

    ranks_LX: Ints
    """The rank of each expert of each layer, int64 [layers, X]."""
    local_rows: int
    """Rows whose token is dealt to the rank of their expert."""
    rows: int

    @property
    def local_rate(self) -> float:
        """Share of the rows that need not travel, of the text that was clustered."""
        return self.local_rows / self.rows if self.rows else 0.0


def cluster_experts(
    counts: Ints, ranks: int, *, tolerance: float = TOLERANCE, seed: int = 0
) -> Clusters:
    """Place experts so that as many rows as possible stay on their token's rank.

    Args:
        counts: How often each kind of token chose each expert, int64 [kinds, layers, X].
        ranks: That share the experts; each also gets an equal share of the tokens.
        tolerance: As ``TOLERANCE``.
        seed: Of the beginnings.

    Raises:
        LayoutError: a rank would have no expert.

    Cost: 7 s of one core for 4,000 kinds of tokens, 8 layers of 64 experts and 8 ranks.

    >>> counts = np.array([[[5, 0, 4, 0]], [[0, 3, 0, 6]]])
    >>> clusters = cluster_experts(counts, 2)
    >>> clusters.ranks_LX.tolist(), clusters.local_rate
    ([[0, 1, 0, 1]], 1.0)
    """
    kinds, layers, experts = counts.shape
    shares = split_experts(experts, ranks=ranks)
    own = np.repeat(np.arange(ranks, dtype=np.int64), shares)
    by_kind = counts.reshape(kinds, layers * experts)
    mass = by_kind.sum(axis=1)
    best = (-1, np.tile(own, (layers, 1)))
    drawn = np.random.default_rng(seed)
    for beginning in range(_BEGINNINGS if ranks > 1 and mass.any() else 1):
        ranks_LX = np.tile(own, (layers, 1))
        if beginning:
            values = _likeness(by_kind, mass, ranks, drawn)
            dealt = _deal_rows(values, mass)
            ranks_LX = _place(by_kind, mass, dealt, shares, layers)
        local = -1
        for _ in range(_TURNS):
            dealt = _deal_kinds(by_kind, mass, ranks_LX, ranks)
            placed = _place(by_kind, mass, dealt, shares, layers)
            before, local = local, _local_rows(by_kind, mass, dealt, placed)
            if local <= before:
                break
            ranks_LX = placed
        local = _local_rows(by_kind, mass, _deal_kinds(by_kind, mass, ranks_LX, ranks), ranks_LX)
        if local > best[0]:
            best = local, ranks_LX
    ranks_LX = best[1]
    dealt = _deal_kinds(by_kind, mass, ranks_LX, ranks)
    gains = _gains(by_kind, mass, dealt).reshape(layers, experts, ranks)
    loads = by_kind.sum(axis=0).reshape(layers, experts)
    for layer in range(layers):
        ranks_LX[layer] = _even_out(ranks_LX[layer], gains[layer], loads[layer], tolerance)
    ranks_LX = _name_ranks(ranks_LX, shares)
    dealt = _deal_kinds(by_kind, mass, ranks_LX, ranks)
    return Clusters(ranks_LX, _local_rows(by_kind, mass, dealt, ranks_LX), int(mass.sum()))


def local_values(by_kind: Ints, ranks_LX: Ints, ranks: int) -> Ints:
    """Rows of each kind of token whose experts are on each rank, int64 [kinds, ranks].

    Args:
        by_kind: How often each kind chose each expert, int64 [kinds, layers x X].
        ranks_LX: The rank of each expert.
        ranks: How many there are.
    """
    flat = ranks_LX.reshape(-1)
    columns = [by_kind[:, flat == rank].sum(axis=1) for rank in range(ranks)]
    return np.stack(columns, axis=1).astype(np.int64)


def _likeness(by_kind: Ints, mass: Ints, ranks: int, drawn: np.random.Generator) -> Ints:
    """How alike each kind is to one drawn for each rank, int64 [kinds, ranks].

    The first is drawn by its tokens, others by their tokens and by how unlike they are to those
    before.
    """
    routes = by_kind / np.maximum(np.linalg.norm(by_kind, axis=1, keepdims=True), 1)
    alike = np.zeros((len(mass), ranks))
    weight = mass.astype(np.float64)
    for rank in range(ranks):
        if not weight.any():
            weight = mass.astype(np.float64)
        alike[:, rank] = routes @ routes[drawn.choice(len(mass), p=weight / weight.sum())]
        weight = mass * np.maximum(1 - alike[:, : rank + 1].max(axis=1), 0) ** 2
        weight[weight < 1e-9 * mass] = 0
    values: Ints = np.rint(alike * (1 << 16)).astype(np.int64)
    return values


def _deal_kinds(by_kind: Ints, mass: Ints, ranks_LX: Ints, ranks: int) -> Ints:
    """Rows of each kind's tokens that are dealt to each rank, int64 [kinds, ranks]."""
    values = local_values(by_kind, ranks_LX, ranks)
    return _deal_rows((values << 16) // np.maximum(mass, 1)[:, np.newaxis], mass)


def _deal_rows(values: Ints, mass: Ints) -> Ints:
    """Rows of each kind on each rank, equally many on each, int64 [kinds, ranks]."""
    total, ranks = int(mass.sum()), values.shape[1]
    rooms = [len(rows_of(total, ranks=ranks, rank=rank)) for rank in range(ranks)]
    return deal(values, mass, np.array(rooms, dtype=np.int64))


def _gains(by_kind: Ints, mass: Ints, dealt: Ints) -> Ints:
    """Rows of each expert whose token is on each rank, int64 [layers x X, ranks]."""
    shares = dealt / np.maximum(mass, 1)[:, np.newaxis]
    gains: Ints = np.rint(by_kind.T.astype(np.float64) @ shares).astype(np.int64)
    return gains


def _place(by_kind: Ints, mass: Ints, dealt: Ints, shares: list[int], layers: int) -> Ints:
    """The best rank of each expert, where ranks have room for ``shares``, int64 [layers, X]."""
    from scipy.optimize import linear_sum_assignment

    gains = _gains(by_kind, mass, dealt)
    places = np.repeat(np.arange(len(shares)), shares)
    ranks_LX = np.empty((layers, len(places)), dtype=np.int64)
    for layer, each in enumerate(np.split(gains, layers)):
        experts, slots = linear_sum_assignment(each[:, places], maximize=True)
        ranks_LX[layer, experts] = places[slots]
    return ranks_LX


def _local_rows(by_kind: Ints, mass: Ints, dealt: Ints, ranks_LX: Ints) -> int:
    gains = _gains(by_kind, mass, dealt)
    return int(gains[np.arange(len(gains)), ranks_LX.reshape(-1)].sum())


def _even_out(ranks_X: Ints, gains: Ints, loads: Ints, tolerance: float) -> Ints:
    """Exchange experts of a layer until no rank has too many rows, or no exchange lowers it."""
    ranks_X, ranks = ranks_X.copy(), gains.shape[1]
    heights = np.bincount(ranks_X, weights=loads, minlength=ranks).astype(np.int64)
    most = (1 + tolerance) * heights.mean()
    for _ in range(len(ranks_X) ** 2):
        full = int(heights.argmax())
        if heights[full] <= most:
            break
        mine, others = np.flatnonzero(ranks_X == full), np.flatnonzero(ranks_X != full)
        one, other = (each.reshape(-1) for each in np.meshgrid(mine, others, indexing="ij"))
        to = ranks_X[other]
        moved = loads[one] - loads[other]
        is_lower = (moved > 0) & (heights[to] + moved < heights[full])
        if not is_lower.any():
            break
        lost = gains[one, full] + gains[other, to] - gains[one, to] - gains[other, full]
        needed = np.minimum(moved, np.ceil(heights[full] - most))
        price = np.where(is_lower, lost / np.maximum(needed, 1), np.inf)
        at = int(price.argmin())
        ranks_X[one[at]], ranks_X[other[at]] = to[at], full
        heights[full] -= moved[at]
        heights[to[at]] += moved[at]
    return ranks_X


def _name_ranks(ranks_LX: Ints, shares: list[int]) -> Ints:
    """Ranks of equally many experts renamed in the order of their first expert of the first layer.

    Which cluster is called rank 0 is free, so that equal inputs in another order are equal.
    """
    names = np.arange(len(shares))
    for size in set(shares):
        alike = [rank for rank, each in enumerate(shares) if each == size]
        seen = [rank for rank in dict.fromkeys(ranks_LX[0].tolist()) if rank in alike]
        names[seen] = alike
    return names[ranks_LX]


def renumbering(ranks_LX: Ints) -> Ints:
    """The old number of each expert once those of a rank are consecutive, int64 [layers, X].

    >>> renumbering(np.array([[1, 0, 1, 0]])).tolist()
    [[1, 3, 0, 2]]
    """
    return np.argsort(ranks_LX, axis=1, kind="stable").astype(np.int64)
