"""All ranks run one plan: its digest is compared before bytes move by it.

Why
    Each rank packs for itself, and all must pack alike. Ranks that do not would send each other
    what the other does not expect: a hang at best, wrong gradients at worst.

What it decides
    Where ranks exchange within micro-batches (ZeRO 2 and 3, and every axis but dp), digests are
    compared before the first one, at the price of one exchange of 8 bytes of each rank; elsewhere
    with the numbers of the step, which come before anything that depends on the plan. The message
    shows the first difference.

Kept true (tests/multi/train/test_train.py, tests/unit/train/test_agree.py)
    Ranks that packed otherwise are named with both plans, on every rank; no weight is changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.meet import name_ranks
from equipoise.observe.journal import EventSink
from equipoise.spec.pack import PackedStep

_NAMED = 6
"""Most micro-batches or documents that a message names."""

_FIX = "Give every machine the same version of equipoise and of NumPy."


def digest_number(packed: PackedStep) -> float:
    """The first 48 bits of a plan's digest, which are exact in float64."""
    return float(int(packed.digest[:12], 16))


def require_one_plan(packed: PackedStep, step: int, ranks: Ranks, numbers: Sequence[float]) -> None:
    """Refuse a step that ranks have packed otherwise; every rank calls it.

    Args:
        packed: This rank's plan.
        step: The step.
        ranks: All of them.
        numbers: Every rank's ``digest_number``.

    Raises:
        LayoutError: on every rank; names those that differ from rank 0, and shows where.
    """
    differing = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
    if not differing:
        return
    plans = ranks.gather_objects(_plain(packed))
    rank = differing[0]
    named = name_ranks(differing)
    raise LayoutError(
        f"{named[0].upper()}{named[1:]} packed step {step} otherwise than rank 0: "
        f"{tell_difference(plans[0], plans[rank], rank)}. Nothing was sent or changed by it. {_FIX}"
    )


def agree(packed: PackedStep, step: int, ranks: Ranks, journal: EventSink) -> float:
    """Compare plans before ranks exchange by them; the seconds that it took.

    Raises:
        LayoutError: as ``require_one_plan``.
    """
    with journal.span("wait", step=step) as span:
        numbers = ranks.gather_floats([digest_number(packed)]).flatten().tolist()
    require_one_plan(packed, step, ranks, numbers)
    return span.duration_s


def meet(
    packed: PackedStep, step: int, said: Sequence[float], ranks: Ranks, journal: EventSink
) -> tuple[Tensor, float]:
    """Exchange one row a rank; the fastest rank waits here for the slowest.

    Args:
        packed: This rank's plan.
        step: The step.
        said: Loss sum, busy seconds, stop asked, seconds until this rank had computed, what else
            it tells, its ``OwnParts``.
        ranks: All of them.
        journal: This rank's.

    Returns:
        The rows, the digest of each rank's plan before what it said, and the seconds that this
        took.

    Raises:
        LayoutError: as ``require_one_plan``.
    """
    with journal.span("wait", step=step) as span:
        rows = ranks.gather_floats([digest_number(packed), *said])
    require_one_plan(packed, step, ranks, rows[:, 0].tolist())
    return rows, span.duration_s


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A packed step as plain lists."""

    policy: str
    ranks: list[list[list[list[int]]]]
    """Pieces [document, start, stop] by data-parallel rank and micro-batch."""


def _plain(packed: PackedStep) -> PackedPlan:
    ranks = [[batch.pieces.tolist() for batch in batches] for batches in packed.ranks]
    return PackedPlan(packed.policy, ranks)


def tell_difference(first: PackedPlan, other: PackedPlan, rank: int) -> str:
    """The first difference between rank 0's plan and another rank's.

    >>> one, more = [[7, 0, 5]], [[8, 0, 9]]
    >>> tell_difference(PackedPlan("a", [[one]]), PackedPlan("a", [[one, more]]), 1)
    'data-parallel rank 0 has micro-batches of 5 tokens by rank 0 and of 5, 9 tokens by rank 1'
    """
    if first.policy != other.policy:
        return f"by {first.policy} on rank 0 and by {other.policy} on rank {rank}"
    if len(first.ranks) != len(other.ranks):
        return (
            f"for {len(first.ranks)} data-parallel ranks on rank 0 and for {len(other.ranks)} on "
            f"rank {rank}"
        )
    for data_rank, plans in enumerate(zip(first.ranks, other.ranks, strict=True)):
        if plans[0] == plans[1]:
            continue
        sizes = [[sum(stop - start for _, start, stop in batch) for batch in p] for p in plans]
        if sizes[0] != sizes[1]:
            words = [", ".join(map(str, each[:_NAMED])) for each in sizes]
            return (
                f"data-parallel rank {data_rank} has micro-batches of {words[0]} tokens by rank 0 "
                f"and of {words[1]} tokens by rank {rank}"
            )
        at = next(at for at, (one, two) in enumerate(zip(*plans, strict=True)) if one != two)
        numbers = [", ".join(str(piece[0]) for piece in p[at][:_NAMED]) for p in plans]
        return (
            f"micro-batch {at} of data-parallel rank {data_rank} has documents {numbers[0]} by "
            f"rank 0 and {numbers[1]} by rank {rank}"
        )
    return "pieces read other parts of their documents"
