"""Split experts, and the hidden units of each, over the ranks of a layer.

What it decides
    Runs of ``ceil(n / ranks)``, the last one shorter, as torch splits a dim. A rank without any
    would hold nothing and wait for all, so such a layout is refused. Which rank has which run may
    differ by layer: where runs differ, each layer gives the shorter one to another rank, so that
    over the layers all have nearly as many experts::

        7 experts on 4 ranks    rank 0   rank 1   rank 2   rank 3
        layer 0                 0 1      2 3      4 5      6
        layer 1                 6        0 1      2 3      4 5
        layer 2                 4 5      6        0 1      2 3

Kept true (tests/unit/schedule/expert/test_schedule.py)
    Every expert is on one rank, and no rank is without any; over as many layers as ranks, every
    rank has equally many.

Sources
    Owners that differ by layer: heterogeneous sharding of Hecate, arXiv:2502.02581.
"""

from equipoise.base.errors import LayoutError

MOST_TURNED = 8
"""Ranks over which runs turn by layer: each turn is a communicator of its own."""


def turn_of(layer: int, *, experts: int, ranks: int) -> int:
    """By how many ranks the runs of a layer move on: run ``v`` is on rank ``(v + turn) % ranks``.

    Args:
        layer: Its number among the sparse layers of a rank.
        experts: Of a layer.
        ranks: That share them.

    >>> [turn_of(layer, experts=7, ranks=4) for layer in range(6)]
    [0, 1, 2, 3, 0, 1]
    >>> turn_of(1, experts=8, ranks=4)
    0
    """
    return layer % ranks if experts % ranks and ranks <= MOST_TURNED else 0


def shares_experts(experts: int, ranks: int) -> bool:
    """Whether every rank has some of the experts.

    >>> shares_experts(8, 4), shares_experts(8, 6)
    (True, False)
    """
    return experts > 0 and -(-experts // -(-experts // ranks)) == ranks


def split_experts(experts: int, *, ranks: int) -> list[int]:
    """Experts of each rank.

    Raises:
        LayoutError: a rank would have none.

    >>> split_experts(8, ranks=4), split_experts(7, ranks=4)
    ([2, 2, 2, 2], [2, 2, 2, 1])
    """
    if ranks < 1:
        raise LayoutError(f"{ranks} ranks cannot share experts. Give 1 or more.")
    if experts < 1:
        raise LayoutError(
            f"The model has no experts that {ranks} ranks could share. Set ep (layout.ep) = 1 "
            f"and etp (layout.etp) = 1, or give the model experts."
        )
    most = -(-experts // ranks)
    busy = -(-experts // most)
    if busy < ranks:
        raise LayoutError(
            f"{experts} expert{'s' * (experts > 1)} in runs of {most} "
            f"leave{'s' * (experts == 1)} {ranks - busy} of {ranks} ranks without "
            f"any. Set ep (layout.ep) to {busy}."
        )
    return [min(most, experts - rank * most) for rank in range(ranks)]


def require_units(units: int, *, ranks: int) -> None:
    """Refuse to split an expert's hidden units so that a rank gets none.

    Raises:
        LayoutError: the last rank would have none.
    """
    most = -(-units // ranks)
    if most * (ranks - 1) >= units:
        raise LayoutError(
            f"Experts of {units} hidden units in runs of {most} leave the last of etp = {ranks} "
            f"ranks without any. Lower etp."
        )
