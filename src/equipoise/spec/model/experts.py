"""Split experts, and the hidden units of each, over the ranks of a layer.

What it decides
    Runs of ``ceil(n / ranks)``, the last one shorter, as torch splits a dim. A rank without any
    would hold nothing and wait for all, so such a layout is refused.

Kept true (tests/unit/schedule/expert/test_schedule.py)
    Every expert is on one rank, and no rank is without any.
"""

from equipoise.base.errors import LayoutError


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
    if not experts:
        raise LayoutError(
            f"The model has no experts that {ranks} ranks could share. Set ep (layout.ep) = 1 "
            f"and etp (layout.etp) = 1, or give the model experts."
        )
    most = -(-experts // ranks)
    busy = -(-experts // most)
    if busy < ranks:
        raise LayoutError(
            f"{experts} experts in runs of {most} leave {ranks - busy} of {ranks} ranks without "
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
