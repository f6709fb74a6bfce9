"""One step of a redistribution: what each rank sends to each, and what that takes.

Why
    The bytes of a step follow from the boxes that ranks hold before and after it. They are
    counted from these, not from a formula, so ragged splits, empty shares and nested splits are
    right by construction; the table of even splits is what comes out.

What it decides
    A step changes the placements of some mesh axes. Every rank finds what it needs among the
    ranks that differ from it along these axes alone, or the step is not possible. Of several
    ranks with the same elements, the one that is nearest (itself, if it can be) sends them. Sums
    are taken where they are needed, from the parts of all ranks in their order.

    ===========  ==============  ===========  ============================================
    from / to    S(j)            B            P
    ===========  ==============  ===========  ============================================
    S(i)         (n-1)/n^2       (n-1)/n      0: zeros around what a rank has
    B            0: a slice      0            0: the first keeps it; of a maximum, all do
    P            (n-1)/n         2 (n-1)/n    0
    ===========  ==============  ===========  ============================================

    That table is bytes sent by each of n ranks, over those of the tensor, in even splits. P to B
    moves as a reduce-scatter and an all-gather of flat chunks, or in one exchange of all copies,
    whichever takes less time.

    A rank sends, and receives, one message after another over the links of one mesh axis, each
    ``latency + bytes / bandwidth``; links of different axes work at the same time. A message
    takes the links of the outermost axis in which its ends differ. Packing and adding are not
    priced.

Kept true (tests/unit/schedule/boxing/test_path.py, tests/multi/parallel/test_boxing.py)
    The table above; ranks send what is counted here, link by link.

Sources
    The table: OneFlow, arXiv:2110.15032, whose numbers are of all ranks together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Ints
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Partial,
    Placements,
    Split,
    coordinates,
)

Kind = Literal["exchange", "all-reduce", "fill"]


@dataclass(frozen=True, slots=True)
class BoxingStep:
    """A change of the placements of some axes."""

    kind: Kind
    """exchange: boxes go where they are needed, and are reduced there. all-reduce: chunks are
    reduced on one rank each, then copied to all. fill: partial tensors are made, nothing moves."""
    axes: tuple[int, ...]
    """Mesh axes that change, ascending."""
    before: Placements
    after: Placements

    @property
    def words(self) -> str:
        """The field's name of the step."""
        if self.kind != "exchange":
            return self.kind
        if all(isinstance(self.before[axis], Broadcast) for axis in self.axes):
            return "slice"
        if len(self.axes) > 1:
            return "exchange"
        one, other = self.before[self.axes[0]], self.after[self.axes[0]]
        if isinstance(one, Partial):
            return "reduce-scatter" if isinstance(other, Split) else "gather and reduce"
        return "all-to-all" if isinstance(other, Split) else "all-gather"


@dataclass(frozen=True, slots=True, eq=False)
class StepCount:
    """What moves in a step, in elements."""

    members: Ints
    """Ranks of each group that exchanges, int64 [groups, n]."""
    phases: tuple[Ints, ...]
    """Elements that each rank of a group sends to each, one after another, int64
    [groups, n, n]; nothing to itself."""

    def sent(self, ranks: int) -> Ints:
        """Elements that each rank sends to each, int64 [ranks, ranks]."""
        elements = np.zeros((ranks, ranks), dtype=np.int64)
        rows, columns = self.members[:, :, None], self.members[:, None, :]
        for phase in self.phases:
            elements[rows, columns] += phase
        return elements

    @property
    def total(self) -> int:
        """Elements that all ranks send."""
        return sum(int(phase.sum()) for phase in self.phases)

    @property
    def most(self) -> int:
        """Elements sent by the rank that sends most."""
        sent = sum(phase.sum(axis=2) for phase in self.phases)
        return int(np.max(sent, initial=0))

    @property
    def messages(self) -> int:
        """Messages of all ranks."""
        return sum(int(np.count_nonzero(phase)) for phase in self.phases)


def groups_along(mesh: Sequence[int], axes: tuple[int, ...]) -> Ints:
    """Ranks that differ along these axes alone, int64 [groups, n]; ascending.

    >>> groups_along((2, 2), (0,)).tolist()
    [[0, 2], [1, 3]]
    """
    others = [axis for axis in range(len(mesh)) if axis not in axes]
    grid = np.arange(math.prod(mesh), dtype=np.int64).reshape(mesh).transpose(*others, *axes)
    return np.ascontiguousarray(grid).reshape(-1, math.prod(mesh[axis] for axis in axes))


def sources_of(on: MeshTensor, step: BoxingStep) -> npt.NDArray[np.bool_]:
    """Which ranks of a group may send elements to which, bool [n sources, n targets].

    A rank asks those that have what it has along axes that were broadcast: itself among them.
    """
    places = coordinates(tuple(on.mesh[axis] for axis in step.axes))
    copied = [isinstance(step.before[axis], Broadcast) for axis in step.axes]
    may: npt.NDArray[np.bool_] = (places[:, None, copied] == places[None, :, copied]).all(axis=2)
    return may


def count_step(on: MeshTensor, step: BoxingStep) -> StepCount | None:
    """What moves; None if some rank does not find what it needs within its group."""
    members = groups_along(on.mesh, step.axes)
    count = members.shape[1]
    if step.kind == "fill":
        return _count_fill(on, step, members)
    if step.kind == "all-reduce":
        sizes = _volume(on.boxes(step.before))[members[:, 0]]
        longest = -(-sizes // count)
        ends = np.minimum(longest[:, None] * np.arange(count + 1), sizes[:, None])
        chunks = np.diff(ends, axis=1)
        shape = (len(members), count, count)
        reduced = np.broadcast_to(chunks[:, None, :], shape)
        copied = np.broadcast_to(chunks[:, :, None], shape)
        return StepCount(members, (_between(reduced), _between(copied)))
    before, after = on.boxes(step.before)[members], on.boxes(step.after)[members]
    overlap = np.broadcast_to(sources_of(on, step), (len(members), count, count)).astype(np.int64)
    changing = {
        each.dim
        for axis in step.axes
        for each in (step.before[axis], step.after[axis])
        if isinstance(each, Split)
    }
    # Of the others all members of a group have the same run.
    others = [dim for dim in range(len(on.shape)) if dim not in changing]
    overlap *= _volume(before[:, 0, others])[:, None, None]
    for dim in changing:
        first = np.maximum(before[:, :, None, dim, 0], after[:, None, :, dim, 0])
        stop = np.minimum(before[:, :, None, dim, 1], after[:, None, :, dim, 1])
        overlap *= np.maximum(stop - first, 0)
    parts = math.prod(on.mesh[axis] for axis in step.axes if isinstance(step.before[axis], Partial))
    if not np.array_equal(overlap.sum(axis=1), parts * _volume(after)):
        return None
    return StepCount(members, (_between(overlap),))


def _count_fill(on: MeshTensor, step: BoxingStep, members: Ints) -> StepCount | None:
    """Nothing moves, if a group's ranks together hold each summand exactly once."""
    if isinstance(step.before[step.axes[0]], Split):
        before, after = on.boxes(step.before), on.boxes(step.after)
        first = np.maximum(before[..., 0], after[..., 0])
        stop = np.minimum(before[..., 1], after[..., 1])
        kept = np.prod(np.maximum(stop - first, 0), axis=-1)[members]
        if not np.array_equal(kept.sum(axis=1), _volume(after)[members[:, 0]]):
            return None
    return StepCount(members, ())


def _volume(boxes: Ints) -> Ints:
    volumes: Ints = np.prod(boxes[..., 1] - boxes[..., 0], axis=-1)
    return volumes


def _between(elements: Ints) -> Ints:
    """The same without what a rank would send itself."""
    others: Ints = elements * ~np.eye(elements.shape[1], dtype=bool)
    return others


def price_step(
    on: MeshTensor,
    step: BoxingStep,
    count: StepCount,
    *,
    element_bytes: int,
    links: Sequence[LinkPrice],
) -> float:
    """Predicted time of a step [s]: its busiest rank's, phase by phase.

    Args:
        on: The tensor and its mesh.
        step: What is priced.
        count: Of it.
        element_bytes: Of an element.
        links: Of each mesh axis, outermost first.
    """
    outermost = _outermost(on, step.axes)
    seconds = 0.0
    for phase in count.phases:
        worst = 0.0
        for axis in step.axes:
            own = phase * (outermost == axis)
            for ends in (1, 2):  # what a rank receives, what it sends
                messages = np.count_nonzero(own, axis=ends)
                times = messages * links[axis].latency_s
                times = times + own.sum(axis=ends) * (element_bytes / links[axis].bytes_per_s)
                worst = max(worst, float(times.max(initial=0.0)))
        seconds += worst
    return seconds


def _outermost(on: MeshTensor, axes: tuple[int, ...]) -> Ints:
    """The first axis in which two ranks of a group differ, int64 [n, n]."""
    places = coordinates(tuple(on.mesh[axis] for axis in axes))
    differ = places[:, None, :] != places[None, :, :]
    outermost: Ints = np.array(axes, dtype=np.int64)[differ.argmax(axis=2)]
    return outermost


def steps_between(before: Placements, after: Placements) -> Iterator[BoxingStep]:
    """The ways to change all axes that differ at once; some may not be possible."""
    axes = tuple(axis for axis, each in enumerate(before) if each != after[axis])
    if any(isinstance(after[axis], Partial) for axis in axes):
        if len(axes) == 1 and not isinstance(before[axes[0]], Partial):
            yield BoxingStep("fill", axes, before, after)
        return
    yield BoxingStep("exchange", axes, before, after)
    is_sum = all(isinstance(before[axis], Partial) for axis in axes)
    if is_sum and all(isinstance(after[axis], Broadcast) for axis in axes):
        yield BoxingStep("all-reduce", axes, before, after)
