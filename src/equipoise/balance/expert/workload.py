"""What routers may choose: eight workloads, each a function of its kind, a seed and a step.

What it decides
    Each rank's rows for each expert. A rank has ``rows_per_rank`` of them, except in ``W4`` and
    ``W5``; an expert's share of them is a kind's, and ranks differ by chance alone:

    ====  ===============  ========================================================================
    kind  name             what tokens choose
    ====  ===============  ========================================================================
    W0    balanced         every expert equally often
    W1    hot experts      the n-th most popular expert 1/n as often as the first (Zipf), in an
                           order that the seed gives
    W2    hot rank         one rank's experts half of the time
    W3    spread hot       one expert of every rank half of the time, so that ranks are even
    W4    ragged sources   experts equally often, but the n-th rank has 1/n of the rows of the first
    W5    empty            half of the experts never, and every fourth rank has no rows
    W6    rotating         as W1, and popularity moves on by one rank's experts in every step
    W7    burst            every expert equally often, but in every fourth step one expert half of
                           the time
    ====  ===============  ========================================================================

Kept true (tests/unit/balance/expert/test_workload.py)
    The same arguments give the same rows; each kind is as uneven as its name says.

Sources
    Names W0 to W7: NVIDIA Megatron-LM, pull request 7488, a benchmark of token imbalance.
"""

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import SpecError
from equipoise.base.fields import is_whole
from equipoise.base.nearest import nearest
from equipoise.base.shown import shown
from equipoise.schedule.expert.schedule import MOST_ROWS, owners_of

WORKLOADS = {
    "W0": "balanced",
    "W1": "hot experts",
    "W2": "hot rank",
    "W3": "spread hot",
    "W4": "ragged sources",
    "W5": "empty",
    "W6": "rotating",
    "W7": "burst",
}
"""Kinds by name."""

_BURST_STEPS = 4


def workload(
    kind: str,
    seed: int,
    step: int,
    *,
    ranks: int = 8,
    experts: int = 64,
    rows_per_rank: int = 8192,
) -> Ints:
    """Each rank's rows for each expert in a step, int64 [ranks, X].

    Args:
        kind: ``W0`` to ``W7``.
        seed: Of the order of popularity, and of chance.
        step: From 0.
        ranks: That share the experts.
        experts: X.
        rows_per_rank: Tokens of a rank times the experts of each.

    Raises:
        SpecError: no kind has that name, or a number is below its least.
        LayoutError: a rank would have no expert.

    >>> workload("W0", 0, 0, ranks=2, experts=4, rows_per_rank=8).tolist()
    [[2, 2, 2, 2], [2, 2, 2, 2]]
    """
    if not isinstance(kind, str) or kind not in WORKLOADS:
        raise SpecError(
            f"{shown(kind)} is not one of {', '.join(WORKLOADS)}. Nearest: "
            f'"{nearest(str(kind), list(WORKLOADS))}".'
        )
    numbers = {"seed": seed, "step": step, "ranks": ranks, "experts": experts}
    for name, number in (numbers | {"rows_per_rank": rows_per_rank}).items():
        if not is_whole(number):
            raise SpecError(f"{name} is {shown(number)}. Give a whole number.")
    given = {"seed": seed, "step": step, "ranks": ranks - 1, "rows_per_rank": rows_per_rank}
    if wrong := [name for name, number in given.items() if number < 0]:
        raise SpecError(
            f"A workload needs seed, step and rows_per_rank of 0 or more and ranks of 1 or more. "
            f"Raise {' and '.join(wrong)}."
        )
    if ranks * rows_per_rank > MOST_ROWS:
        raise SpecError(
            f"{ranks:,} ranks with {rows_per_rank:,} rows each are more than the {MOST_ROWS:,} "
            f"rows for which plans are exact. Lower rows_per_rank."
        )
    owners = owners_of(experts, ranks=ranks)
    shares = popularity(kind, seed, step, owners)
    rows = _source_rows(kind, ranks, rows_per_rank)
    if kind == "W0":
        return np.stack([_even(int(count), experts, first) for first, count in enumerate(rows)])
    drawn = np.random.default_rng([seed, step, int(kind[1:])])
    return np.stack([drawn.multinomial(count, shares) for count in rows]).astype(np.int64)


def popularity(kind: str, seed: int, step: int, owners: Ints) -> Floats:
    """The share of all choices that each expert gets, float64 [X]; they sum to 1."""
    experts, ranks = len(owners), int(owners[-1]) + 1
    order = np.random.default_rng([seed, int(kind[1:])]).permutation(experts)
    likely = np.ones(experts)
    if kind in ("W1", "W6"):
        likely[order] = 1.0 / np.arange(1, experts + 1)
        likely = np.roll(likely, (step if kind == "W6" else 0) * -(-experts // ranks))
    elif kind == "W2":
        likely = _half(owners == owners[order[0]])
    elif kind == "W3":
        likely = _half(np.concatenate(([True], owners[1:] != owners[:-1])))
    elif kind == "W5":
        likely[order[: experts // 2]] = 0.0
    elif kind == "W7" and step % _BURST_STEPS == _BURST_STEPS - 1:
        likely = _half(np.arange(experts) == order[0])
    return np.asarray(likely / likely.sum(), dtype=np.float64)


def _half(is_hot: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Floats:
    """Half of all choices for the hot ones, the rest for the others."""
    hot = int(is_hot.sum())
    cold = max(1, len(is_hot) - hot)
    return np.where(is_hot, 0.5 / hot, 0.5 / cold)


def _source_rows(kind: str, ranks: int, rows_per_rank: int) -> Ints:
    """How many rows each rank has."""
    rows = np.full(ranks, rows_per_rank, dtype=np.int64)
    if kind == "W4":
        rows //= np.arange(1, ranks + 1)
    elif kind == "W5":
        rows[3::4] = 0
    return rows


def _even(count: int, experts: int, first: int) -> Ints:
    """Rows dealt to experts one by one, the remainder from expert ``first`` on."""
    rows = np.full(experts, count // experts, dtype=np.int64)
    rows[(first + np.arange(count % experts)) % experts] += 1
    return rows
