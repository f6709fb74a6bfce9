"""Deal features to towers by how alike their embeddings are, with equal load.

Why
    A tower condenses its features before the others see them. Which are condensed together decides
    what interactions are kept, and the costliest tower is what all hosts wait for.

What it decides
    Towers whose mean similarity to themselves is highest (``coherent``), or lowest (``diverse``),
    among those whose load is at most 5% over the mean, or as even as ``partition`` finds them.
    Of few features every deal is tried. Of many, several starts, each improved by moving and
    swapping features while that helps; the best stands. The answer depends on the arguments alone.

Kept true (tests/unit/balance/test_similar.py, by Hypothesis)
    Every feature has one tower and no tower is empty; loads stay under the cap; never worse than
    its starts, nor than 100 random draws of towers under the cap; brute force on small cases.

Sources
    The tower partitioner of arXiv:2403.00877, section 3, embeds features in a plane by their
    distances and clusters them there; here the sum over clusters is searched itself, without the
    plane.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from equipoise.balance.partition import partition
from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import LayoutError

TowerGoal = Literal["coherent", "diverse"]
TOWER_GOALS: tuple[TowerGoal, ...] = get_args(TowerGoal)
_SLACK = 1.05
"""Load of a tower over the mean that is even enough."""
_FEW = 4096
"""Most deals that are all tried."""
_STARTS = 12
_SHAKES = 20
"""Random changes of a draw for each feature."""
_EPSILON = 1e-12


def deal_features(
    similarity: Floats, costs: Sequence[int], towers: int, goal: TowerGoal = "coherent"
) -> Ints:
    """The tower of each feature, int64 [features]; towers are numbered by their first feature.

    Args:
        similarity: How alike two features are, symmetric, float64 [features, features].
        costs: Load of each feature, >= 0.
        towers: How many, at most as many as features.
        goal: Whether features of a tower are to be alike or different.

    Raises:
        LayoutError: more towers than features, or none.

    Cost: O(features^2) for each move.

    >>> alike = np.array([[1, 0, 0.9, 0.1], [0, 1, 0, 0.8], [0.9, 0, 1, 0], [0.1, 0.8, 0, 1]])
    >>> deal_features(alike, [1, 1, 1, 1], 2).tolist()
    [0, 1, 0, 1]
    >>> deal_features(alike, [1, 1, 1, 1], 2, "diverse").tolist()
    [0, 0, 1, 1]
    """
    count = len(costs)
    if not 1 <= towers <= count:
        raise LayoutError(
            f"{count} features cannot fill {towers} towers, each with one at least. Give from 1 to "
            f"{count} towers."
        )
    weights = np.asarray(costs, dtype=np.int64)
    signed = np.asarray(similarity, dtype=np.float64) * (1.0 if goal == "coherent" else -1.0)
    cap = load_cap(weights, towers)
    if towers**count <= _FEW:
        deals = _every_deal(weights, towers, cap)
    else:
        deals = (
            _improve(start, signed, weights, towers, cap) for start in _starts(weights, towers)
        )
    best = max(deals, key=lambda tower_of: measure_likeness(signed, tower_of))
    names = {tower: at for at, tower in enumerate(dict.fromkeys(best.tolist()))}
    return np.array([names[tower] for tower in best.tolist()], dtype=np.int64)


def measure_likeness(similarity: Floats, tower_of: Ints) -> float:
    """Mean over features of how alike each is to its tower, itself included.

    >>> measure_likeness(np.eye(2), np.array([0, 0])), measure_likeness(np.eye(2), np.array([0, 1]))
    (0.5, 1.0)
    """
    inside = tower_of[:, None] == tower_of[None, :]
    means = (similarity * inside).sum(axis=1) / inside.sum(axis=1)
    return float(means.mean())


def load_cap(costs: Ints, towers: int) -> float:
    """The largest load that a tower may have: 5% over the mean, or what ``partition`` reaches."""
    even = np.bincount(_filled(costs, towers), costs, towers).max()
    return max(float(even), _SLACK * float(costs.sum()) / towers)


def draw_towers(costs: Ints, towers: int, source: np.random.Generator) -> Ints:
    """Random towers under the cap, none empty: even ones after many random moves and swaps."""
    cap, tower_of = load_cap(costs, towers), _filled(costs, towers)
    counts = np.bincount(tower_of, minlength=towers)
    loads = np.bincount(tower_of, costs, towers)
    count = len(costs)
    for feature, other, tower in zip(
        source.integers(0, count, _SHAKES * count).tolist(),
        source.integers(0, 2 * count, _SHAKES * count).tolist(),
        source.integers(0, towers, _SHAKES * count).tolist(),
        strict=True,
    ):
        own, is_swap = int(tower_of[feature]), other < count
        theirs = int(tower_of[other]) if is_swap else tower
        shift = costs[feature] - (costs[other] if is_swap else 0)
        fits = loads[theirs] + shift <= cap and loads[own] - shift <= cap
        if own == theirs or not fits or (not is_swap and counts[own] == 1):
            continue
        loads[own] -= shift
        loads[theirs] += shift
        tower_of[feature] = theirs
        if is_swap:
            tower_of[other] = own
        else:
            counts[own] -= 1
            counts[theirs] += 1
    return tower_of


def _filled(costs: Ints, towers: int) -> Ints:
    """Towers as even as ``partition`` finds them, none empty."""
    placed = partition(costs, towers)
    tower_of = np.zeros(len(costs), dtype=np.int64) if placed is None else placed
    for empty in np.flatnonzero(np.bincount(tower_of, minlength=towers) == 0).tolist():
        counts = np.bincount(tower_of, minlength=towers)
        movable = np.flatnonzero(counts[tower_of] > 1)
        tower_of[movable[int(costs[movable].argmin())]] = empty
    return tower_of


def _every_deal(costs: Ints, towers: int, cap: float) -> Iterator[Ints]:
    """Every deal under the cap that leaves no tower empty."""
    for each in itertools.product(range(towers), repeat=len(costs)):
        tower_of = np.array(each, dtype=np.int64)
        is_even = np.bincount(tower_of, costs, towers).max() <= cap
        if is_even and len(set(each)) == towers:
            yield tower_of


def _starts(costs: Ints, towers: int) -> list[Ints]:
    source = np.random.Generator(np.random.Philox(key=len(costs)))
    return [_filled(costs, towers), *(draw_towers(costs, towers, source) for _ in range(_STARTS))]


def _improve(start: Ints, signed: Floats, costs: Ints, towers: int, cap: float) -> Ints:
    """The best move or swap again and again, until none helps."""
    tower_of = start.copy()
    while True:
        moves, swaps = _gains(tower_of, signed, costs, towers, cap)
        move = np.unravel_index(int(moves.argmax()), moves.shape)
        swap = np.unravel_index(int(swaps.argmax()), swaps.shape)
        if max(moves[move], swaps[swap]) <= _EPSILON:
            return tower_of
        if moves[move] >= swaps[swap]:
            tower_of[move[0]] = move[1]
        else:
            tower_of[list(swap)] = tower_of[list(swap[::-1])]


def _gains(
    tower_of: Ints, signed: Floats, costs: Ints, towers: int, cap: float
) -> tuple[Floats, Floats]:
    """What each move [features, towers] and each swap [features, features] adds.

    They add to the sum of ``measure_likeness`` over features; minus infinity where they break the
    cap or empty a tower.
    """
    member = np.eye(towers)[tower_of]  # [F, T]
    counts, loads = member.sum(axis=0), costs @ member
    alike = signed @ member  # [F, T]: of a feature to all of a tower
    sums = (alike * member).sum(axis=0)  # [T]
    own, self_alike = alike[np.arange(len(costs)), tower_of], np.diag(signed)
    before = sums / counts
    without = (sums[tower_of] - 2 * own + self_alike) / np.maximum(1, counts[tower_of] - 1)
    joined = (sums + 2 * alike + self_alike[:, None]) / (counts + 1)
    moves = without[:, None] - before[tower_of][:, None] + joined - before
    fits = (loads + costs[:, None] <= cap) & (counts[tower_of] > 1)[:, None] & (member == 0)
    leaves = -2 * own + self_alike
    joins = 2 * (alike[:, tower_of] - signed) + self_alike[:, None]  # [F, F]: one where other is
    pair = (leaves[:, None] + joins.T) / counts[tower_of][:, None]
    swaps = pair + pair.T
    shifted = loads[tower_of][:, None] + costs[None, :] - costs[:, None] <= cap
    can_swap = shifted & shifted.T & (tower_of[:, None] != tower_of[None, :])
    return np.where(fits, moves, -np.inf), np.where(can_swap, swaps, -np.inf)
