"""What one rank sends, receives and keeps in a step of a redistribution.

What it decides
    Nothing that ``boxing_step`` has not: here it is written out for one rank, with boxes counted
    from the first element that the rank holds before, or after, the step.

    An all-reduce is two exchanges of the flat tensor among the ranks of a group, in even chunks.

Kept true (tests/unit/schedule/boxing/test_path.py)
    Sizes of what is sent are those of ``count_step``; what a rank sends is what its peer receives.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.block import block_in, join_blocks
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Partial,
    SplitDim,
    coordinates,
)
from equipoise.schedule.boxing.step import BoxingStep, groups_along, sources_of

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One message."""

    peer: int
    """Rank of the mesh at the other end."""
    turn: int
    """For what is received: 0 is written, others are reduced into what was."""
    box: Box
    """Within what this rank has before, if it is sent, or after."""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What a rank sends itself."""

    turn: int
    source: Box
    target: Box


@dataclass(frozen=True, slots=True)
class RankExchange:
    """One rank's part in an exchange."""

    shape: tuple[int, ...]
    """Shape of what the rank has after."""
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    own: OwnPart | None
    parts: int
    """Turns: how many parts each element is reduced from."""
    reduce: Literal["sum", "max"]


@dataclass(frozen=True, slots=True)
class Filling:
    """What a rank holds after a step that made the tensor partial."""

    shape: tuple[int, ...]
    is_whole: bool
    """Whether it keeps what it has."""
    box: Box | None
    """Where its part before lies in its part after; None: nowhere."""


def exchange_of(on: MeshTensor, step: BoxingStep, rank: int) -> RankExchange:
    """One rank's part in a step that is one exchange."""
    members = groups_along(on.mesh, step.axes)
    row = members[(members == rank).any(axis=1)][0]
    return _exchange(on, step, row, int(np.flatnonzero(row == rank)[0]))


def flat_exchanges(
    on: MeshTensor, step: BoxingStep, rank: int
) -> tuple[RankExchange, RankExchange]:
    """One rank's parts in an all-reduce of its elements, flattened."""
    members = groups_along(on.mesh, step.axes)
    row = members[(members == rank).any(axis=1)][0]
    held = on.boxes(step.before)[rank]
    flat = MeshTensor((int(np.prod(held[:, 1] - held[:, 0])),), (len(row),))
    reduced, split = step.before[step.axes[0]], SplitDim(0)
    place = int(np.flatnonzero(row == rank)[0])
    steps = (
        BoxingStep("exchange", (0,), (reduced,), (split,)),
        BoxingStep("exchange", (0,), (split,), (Broadcast(),)),
    )
    first, second = (_exchange(flat, each, np.arange(len(row)), place, row) for each in steps)
    return first, second


def count_copies(on: MeshTensor, step: BoxingStep, rank: int) -> tuple[int, int]:
    """A rank's messages that are not one run of memory, or are added, and the copies they take.

    Args:
        on: A tensor whose parts lie row after row in memory.
        step: The step.
        rank: The rank.

    >>> from equipoise.schedule.boxing.placement import read_placements
    >>> ends = read_placements("S(0)"), read_placements("S(1)")
    >>> count_copies(MeshTensor((8, 8), (4,)), BoxingStep("exchange", (0,), *ends), rank=0)
    (3, 1)
    """
    held = on.boxes(step.before)[rank]
    shape = tuple((held[:, 1] - held[:, 0]).tolist())
    if step.kind == "fill":
        return 0, 0
    if step.kind == "exchange":
        return _copies(exchange_of(on, step, rank), shape)
    first, second = flat_exchanges(on, step, rank)
    counts = (_copies(first, (math.prod(shape),)), _copies(second, first.shape))
    return sum(pieces for pieces, _ in counts), sum(copies for _, copies in counts)


def _copies(exchange: RankExchange, held: tuple[int, ...]) -> tuple[int, int]:
    sends = [block_in(piece.box, _strides(held)) for piece in exchange.sends]
    lists = [[block for block in sends if not block.is_run]]
    for turn in range(exchange.parts):
        into = [
            block_in(piece.box, _strides(exchange.shape))
            for piece in exchange.receives
            if piece.turn == turn
        ]
        lists.append([block for block in into if turn or not block.is_run])
    return sum(map(len, lists)), sum(len(join_blocks(each)) for each in lists)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor that lies row after row."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def filling_of(on: MeshTensor, step: BoxingStep, rank: int) -> Filling:
    """What one rank has after a step that makes partial tensors."""
    (axis,) = step.axes
    held, wanted = on.boxes(step.before)[rank], on.boxes(step.after)[rank]
    shape = tuple((wanted[:, 1] - wanted[:, 0]).tolist())
    if isinstance(step.before[axis], Broadcast):
        is_first = coordinates(on.mesh)[rank, axis] == 0
        return Filling(shape, bool(is_first) or step.after[axis] == Partial("max"), None)
    return Filling(shape, False, _box(held, wanted))


def _exchange(
    on: MeshTensor, step: BoxingStep, row: Ints, place: int, names: Ints | None = None
) -> RankExchange:
    """The part of the rank at a place of a group; peers go by ``names``, if given."""
    names = row if names is None else names
    before, after = on.boxes(step.before)[row], on.boxes(step.after)[row]
    may = sources_of(on, step)
    turns, parts, reduce = _turns(on, step)
    sends, receives, own = [], [], None
    for other in range(len(row)):
        inside = _common(before[place], after[other]) if may[place, other] else None
        if inside is not None and other != place:
            sends.append(Piece(int(names[other]), 0, _box(inside, before[place])))
        inside = _common(before[other], after[place]) if may[other, place] else None
        if inside is not None and other == place:
            boxes = (_box(inside, before[place]), _box(inside, after[place]))
            own = OwnPart(int(turns[place]), *boxes)
        elif inside is not None:
            box = _box(inside, after[place])
            receives.append(Piece(int(names[other]), int(turns[other]), box))
    shape = tuple((after[place, :, 1] - after[place, :, 0]).tolist())
    return RankExchange(shape, tuple(sends), tuple(receives), own, parts, reduce)


def _turns(on: MeshTensor, step: BoxingStep) -> tuple[Ints, int, Literal["sum", "max"]]:
    """Which part of a sum each of a group has, how many there are, and what is done to them."""
    sizes = tuple(on.mesh[axis] for axis in step.axes)
    places = coordinates(sizes)
    turns, parts = np.zeros(len(places), dtype=np.int64), 1
    reduce: Literal["sum", "max"] = "sum"
    for at, axis in enumerate(step.axes):
        each = step.before[axis]
        if isinstance(each, Partial):
            turns, parts, reduce = turns * sizes[at] + places[:, at], parts * sizes[at], each.reduce
    return turns, parts, reduce


def _common(one: Ints, other: Ints) -> Ints | None:
    """The box that two boxes share; None if they share nothing."""
    common = np.stack((np.maximum(one[:, 0], other[:, 0]), np.minimum(one[:, 1], other[:, 1])), 1)
    return common if bool((common[:, 1] > common[:, 0]).all()) else None


def _box(box: Ints, within: Ints) -> Box:
    """A box, counted from the first element of another."""
    return tuple((first, stop) for first, stop in (box - within[:, :1]).tolist())
