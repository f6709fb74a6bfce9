"""On which numbers of ranks `equipoise check` proves."""

from collections.abc import Sequence

from equipoise.base.errors import SpecError
from equipoise.cli.counts import MOST_SHARING

_SHOWN = 8
"""Numbers that a refusal names."""


def read_worlds(ranks: Sequence[int]) -> list[int]:
    """Numbers of ranks, each once, the fewest first.

    Raises:
        SpecError: one of them is below 1, or more than can be played in turns.
    """
    if min(ranks) < 1:
        raise SpecError(f"--ranks {min(ranks)} is below 1. Give 1 or more ranks.")
    if max(ranks) > MOST_SHARING:
        raise SpecError(
            f"--ranks {max(ranks):,} is more than {MOST_SHARING:,}. Give {MOST_SHARING:,} or less."
        )
    return sorted(set(ranks))


def read_sharing(asked: Sequence[int] | None, usual: Sequence[int], experts: int) -> list[int]:
    """Numbers of ranks that can share a layer's experts: all that were asked for, or the usual.

    Args:
        asked: None for the usual ones; those that cannot are then left out.
        usual: Numbers of ranks.
        experts: Of a layer.

    Raises:
        SpecError: a number that was asked for cannot, or none of the usual ones can.
    """
    from equipoise.spec.model.experts import shares_experts

    def can(world: int) -> bool:
        return world > 1 and shares_experts(experts, world)

    worlds = read_worlds(asked or usual)
    odd = [world for world in worlds if not can(world)]
    if not odd or (asked is None and len(odd) < len(worlds)):
        return [world for world in worlds if world not in odd]
    can_share = [world for world in range(2, experts + 1) if can(world)]
    if not can_share:
        raise SpecError(
            f"No ranks can share {experts} expert a layer. Set model.experts to 2 or more."
        )
    known = ", ".join(map(str, can_share[:_SHOWN])) + ", and more" * (len(can_share) > _SHOWN)
    does = "shares no experts with another"
    if odd[0] > 1:
        does = f"ranks cannot share {experts} experts: at {-(-experts // odd[0])} apiece"
        does += " one or more would have none"
    raise SpecError(f"{odd[0]} {'rank ' * (odd[0] == 1)}{does}. Give --ranks of {known}.")
