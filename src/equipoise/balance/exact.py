"""The exact partition of few items, with a proof, by CP-SAT.

Why
    A heuristic's answer is worth as much as the bound beside it. The solver starts from the
    heuristic's answer, never returns a worse one, and says how far it could be off.

What it decides
    The same as ``partition``. Its limit is CP-SAT's own count of work, not seconds, so that
    two ranks stop at the same answer.

Needs
    OR-Tools: ``pip install "equipoise[exact]"``.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.balance.bound import largest_bin_bound
from equipoise.balance.partition import partition
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError


@dataclass(frozen=True, slots=True)
class ExactPartition:
    """A partition and the proof that comes with it."""

    bin_of: Ints
    """The bin of each item."""
    heaviest: int
    """Weight of the heaviest bin."""
    bound: int
    """No partition has a heaviest bin below this."""

    @property
    def is_optimal(self) -> bool:
        """Whether the answer meets the bound."""
        return self.heaviest == self.bound


def exact_partition(
    weights: Ints,
    bins: int,
    *,
    sizes: Ints | None = None,
    capacity: int | None = None,
    effort: float = 1.0,
) -> ExactPartition:
    """Find a partition whose heaviest bin is as light as any, or the best within ``effort``.

    Args:
        weights: Weight of each item, >= 0; their sum below 2**62.
        bins: Number of bins, >= 1.
        sizes: Size of each item; equals ``weights`` unless given.
        capacity: Most size that one bin holds; none unless given.
        effort: CP-SAT's deterministic time; one unit is about a second of one core.

    Raises:
        LayoutError: no partition keeps the capacity, or none was found within ``effort``.
        ModuleNotFoundError: OR-Tools is not installed.

    >>> exact_partition(np.array([3, 3, 2, 2, 2]), 2).heaviest
    6
    """
    from ortools.sat.python import cp_model

    weights = np.asarray(weights, dtype=np.int64)
    sizes = weights if sizes is None else np.asarray(sizes, dtype=np.int64)
    hint = partition(weights, bins, sizes=sizes, capacity=capacity)
    bound = largest_bin_bound(weights, bins)
    if hint is not None:
        heaviest = int(np.bincount(hint, weights, bins).max())
        if heaviest == bound:
            return ExactPartition(hint, heaviest, bound)
    model = cp_model.CpModel()
    limit = int(weights.sum()) if hint is None else heaviest
    top = model.new_int_var(bound, limit, "heaviest")
    chosen = [
        [model.new_bool_var(f"{item}in{index}") for index in range(bins)]
        for item in range(len(weights))
    ]
    for item, row in enumerate(chosen):
        model.add_exactly_one(row)
        if hint is not None:
            for index, variable in enumerate(row):
                model.add_hint(variable, int(hint[item]) == index)
    for index in range(bins):
        column = [row[index] for row in chosen]
        model.add(cp_model.LinearExpr.weighted_sum(column, weights.tolist()) <= top)
        if capacity is not None:
            model.add(cp_model.LinearExpr.weighted_sum(column, sizes.tolist()) <= capacity)
    model.minimize(top)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if hint is None:
            raise LayoutError(
                f"{len(weights)} items of {int(sizes.sum()):,} in all were not fitted into {bins} "
                f"bins of {capacity:,}"
                + (
                    ": no partition does. "
                    if status == cp_model.INFEASIBLE
                    else f" within an effort of {effort:g}. "
                )
                + f"Give more bins, or a capacity above {capacity:,}."
            )
        return ExactPartition(hint, heaviest, bound)
    bin_of = np.array([[solver.value(v) for v in row] for row in chosen], dtype=np.int64).argmax(1)
    best = int(np.bincount(bin_of, weights, bins).max())
    # The bound is a float of an integer; a hair above an integer is that integer.
    proven = max(bound, int(np.ceil(solver.best_objective_bound - 1e-6)))
    return ExactPartition(bin_of, best, min(best, proven))
