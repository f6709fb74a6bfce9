"""Choices of a lattice near one of them: what differs from it in one move.

Why
    A published recipe was found on another step or another cluster, and one change makes it right
    for this one: experts on half as many ranks, or nothing computed again. Such a choice may be the
    best of millions, and no guess finds it as soon.

What it decides
    A *move* changes some columns together (``plan.search.heuristics.MOVES``) and leaves all others
    as they are. Of each move the likeliest few are worth a price, the likeliest of all first.

Kept true (tests/unit/plan/search/test_near.py)
    What is near differs in the columns of its move alone, except where a changed degree leaves no
    such choice; a choice is not near itself.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.plan.search.heuristics import MOVES
from equipoise.plan.space.columns import Space
from equipoise.plan.space.lattice import Lattice

_FAR = ("tp", "pp", "dp", "ep", "recompute", "schedule", "virtual")
"""A move to other degrees altogether, micro-batch and context ranks apart."""
_EACH = 4
"""Choices of one move that are worth a price, with degrees of their own where it changes any."""
_DEGREES = ("tp", "cp", "pp", "dp", "ep")


def near_rows(lattice: Lattice, row: int) -> list[Ints]:
    """Rows near one, by move, int64 [n] each; moves that change nothing are left out.

    Cost: some ms.
    """
    one = lattice.keep(np.array([row]))
    own = {name: (int(values[0]),) for name, values in one.columns.items()}
    del own["micro_batches"]  # follows from the others
    moves = []
    for move in (*MOVES, _FAR):
        rows = lattice.find({name: own[name] for name in own if name not in move})
        rows = rows[rows != row]
        if len(rows):
            moves.append(rows)
    return moves


def likeliest(moves: Sequence[Ints], rows: Ints, space: Space, guess: Floats) -> Ints:
    """The likeliest of each move, likeliest first, int64 [n].

    Args:
        moves: Rows by move.
        rows: Those of them that may fit, ascending, int64 [n].
        space: The same as columns.
        guess: Of their time, float64 [n] [s].
    """
    order = np.argsort(guess, kind="stable")
    ranked, chosen = rows[order], [np.empty(0, dtype=np.int64)]
    degrees = np.stack([space[name][order] for name in _DEGREES])
    for move in moves:
        of_move = np.flatnonzero(np.isin(ranked, move))
        first = np.unique(degrees[:, of_move], axis=1, return_index=True)[1]
        apart = np.sort(first)[:_EACH]
        chosen.append(of_move[apart] if len(apart) > 1 else of_move[:_EACH])
    return np.asarray(ranked[np.unique(np.concatenate(chosen))])
