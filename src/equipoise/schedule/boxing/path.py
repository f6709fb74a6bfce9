"""Redistribute a tensor between placements by the cheapest path over the links of a mesh.

Why
    Each axis of a mesh has its own links, so the order in which axes change decides how many
    bytes pass the slow ones: reduce within a node first, and a node's ranks have a part each to
    send to other nodes. Which path is best depends on sizes, ranks, latencies and ragged splits.

What it decides
    A path of steps, the least predicted time of all, found by Dijkstra's algorithm; of equal
    times the fewest bytes, then the fewest steps. Its states are all placements, of any dim on any
    axis, partial where the tensor is so at either end; its steps change one axis, two at once, or
    all that is left::

        P, P -> B, B    slow links between rows of 4 x 8 ranks

        P, P -> P, S(0)         reduce-scatter, fast links, the whole tensor
        P, S(0) -> B, S(0)      all-reduce, slow links, an eighth of it
        B, S(0) -> B, B         all-gather, fast links

Kept true (tests/unit/schedule/boxing/test_search.py, by Hypothesis;
tests/multi/parallel/test_boxing.py)
    Never dearer than any other path by these prices (brute force on small cases); the steps join
    end to end; the tensor comes out as a dense one does.

Sources
    Shortest paths between n-dimensional placements: OneFlow, arXiv:2110.15032, its BoxingCollector.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Partial,
    Placement,
    Placements,
    Split,
    write_placements,
)
from equipoise.schedule.boxing.step import BoxingStep, count_step, price_step, steps_between

Cost = tuple[float, int, int]
"""Seconds, bytes of all ranks, steps."""


@dataclass(frozen=True, slots=True)
class PricedBoxing:
    """A step with its figures."""

    step: BoxingStep
    seconds: float
    """Predicted [s]."""
    sent_bytes: int
    """Sent by all ranks [bytes]."""
    most_bytes: int
    """Sent by the rank that sends most [bytes]."""
    messages: int
    """Messages of all ranks."""

    @property
    def cost(self) -> Cost:
        """What paths are compared by."""
        return self.seconds, self.sent_bytes, 1


@dataclass(frozen=True, slots=True)
class BoxingSchedule:
    """One way to redistribute a tensor."""

    name: str
    on: MeshTensor
    element_bytes: int
    before: Placements
    after: Placements
    steps: tuple[PricedBoxing, ...]
    """Empty if there is nothing to do."""

    @property
    def seconds(self) -> float:
        """Predicted time of all steps [s]."""
        return sum(each.seconds for each in self.steps)

    @property
    def sent_bytes(self) -> int:
        """Bytes that all ranks send."""
        return sum(each.sent_bytes for each in self.steps)

    def link_bytes(self) -> Ints:
        """Bytes that each rank sends to each, int64 [ranks, ranks]."""
        counts = [count_step(self.on, each.step) for each in self.steps]
        sent_bytes = np.zeros((self.on.ranks, self.on.ranks), dtype=np.int64)
        for count in counts:
            if count is not None:
                sent_bytes += self.element_bytes * count.sent(self.on.ranks)
        return sent_bytes

    def __str__(self) -> str:
        path = " -> ".join(
            write_placements(each)
            for each in (self.before, *(priced.step.after for priced in self.steps))
        )
        return f"{self.name}: {path}"


@dataclass(frozen=True, slots=True)
class BoxingRequest:
    """A tensor, its placements before and after, and the price of each link."""

    on: MeshTensor
    before: Placements
    after: Placements
    element_bytes: int
    links: tuple[LinkPrice, ...]
    """One for each mesh axis, outermost first."""

    def __post_init__(self) -> None:
        self.on.require(self.before)
        self.on.require(self.after)
        if len(self.links) != len(self.on.mesh):
            raise LayoutError(
                f"{len(self.links)} link{'s' * (len(self.links) != 1)} for a mesh of "
                f"{len(self.on.mesh)} axes ({'x'.join(map(str, self.on.mesh))}). Give one for each "
                f"axis."
            )

    def steps(self, before: Placements, after: Placements) -> Iterator[PricedBoxing]:
        """The possible steps from one state to another, which differs."""
        if len({each for each in after if isinstance(each, Partial)}) > 1:
            return
        for step in steps_between(before, after):
            count = count_step(self.on, step)
            if count is not None:
                seconds = price_step(
                    self.on, step, count, element_bytes=self.element_bytes, links=self.links
                )
                size = self.element_bytes
                yield PricedBoxing(
                    step, seconds, size * count.total, size * count.most, count.messages
                )

    def one_step(self, before: Placements, after: Placements) -> PricedBoxing | None:
        """The cheapest of the possible steps between two states, if there is any."""
        return min(self.steps(before, after), default=None, key=lambda each: each.cost)

    def finish(self, name: str, steps: Sequence[PricedBoxing]) -> BoxingSchedule:
        """These steps as a schedule."""
        return BoxingSchedule(
            name, self.on, self.element_bytes, self.before, self.after, tuple(steps)
        )


def add_costs(one: Cost, other: Cost) -> Cost:
    """The cost of two parts of a path together."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def plan_boxing(request: BoxingRequest) -> BoxingSchedule:
    """The cheapest path.

    Cost: of a mesh of R ranks, k axes, and a tensor of d dims, at most ``(d + 4) ** k`` states
    times ``k * k * (d + 4) ** 2`` steps of O(R n d) each, where n ranks exchange.

    >>> on = MeshTensor((512, 512), (2, 4))
    >>> links = (LinkPrice(1e-5, 1e9), LinkPrice(1e-6, 1e10))
    >>> str(plan_boxing(BoxingRequest(on, (Partial(),) * 2, (Broadcast(),) * 2, 4, links)))
    'cheapest: P, P -> P, S(0) -> B, S(0) -> B, B'
    """
    steps = _cheapest(request)
    if steps is None:
        raise LayoutError(
            f"No path leads from {write_placements(request.before)} to "
            f"{write_placements(request.after)} on {'x'.join(map(str, request.on.mesh))}."
        )
    return request.finish("cheapest", steps)


def transposed(request: BoxingRequest) -> BoxingRequest:
    """How gradients go back: split as the tensor is, partial where it is copied and the reverse.

    Raises:
        LayoutError: a maximum is asked for, which is not linear.
    """
    for each in (*request.before, *request.after):
        if isinstance(each, Partial) and each.reduce != "sum":
            raise LayoutError(
                f"{each} has no gradient here: which rank had the largest element is not kept. "
                f"Redistribute it without one."
            )
    return replace(request, before=conjugate(request.after), after=conjugate(request.before))


def conjugate(placements: Placements) -> Placements:
    """Placements of the gradient of a tensor.

    >>> conjugate((Broadcast(), Split(0), Partial()))
    (Partial(reduce='sum'), Split(dim=0, shares=None), Broadcast())
    """
    swap: dict[Placement, Placement] = {Broadcast(): Partial(), Partial(): Broadcast()}
    return tuple(swap.get(each, each) for each in placements)


def _cheapest(request: BoxingRequest) -> list[PricedBoxing] | None:
    counter = itertools.count()  # of equal costs the first found goes first
    queue: list[tuple[Cost, int, Placements]] = [((0.0, 0, 0), next(counter), request.before)]
    best: dict[Placements, Cost] = {request.before: (0.0, 0, 0)}
    came: dict[Placements, PricedBoxing] = {}
    done: set[Placements] = set()
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state == request.after:
            return _trace(came, request)
        for neighbour in _neighbours(state, request):
            if neighbour in done:
                continue
            for priced in request.steps(state, neighbour):
                total = add_costs(cost, priced.cost)
                if neighbour not in best or total < best[neighbour]:
                    best[neighbour], came[neighbour] = total, priced
                    heapq.heappush(queue, (total, next(counter), neighbour))
    return None


def _trace(came: dict[Placements, PricedBoxing], request: BoxingRequest) -> list[PricedBoxing]:
    steps: list[PricedBoxing] = []
    state = request.after
    while state != request.before:
        steps.append(came[state])
        state = steps[-1].step.before
    return steps[::-1]


def _neighbours(state: Placements, request: BoxingRequest) -> Iterator[Placements]:
    """States one or two axes away, and the last one."""
    choices = [_choices(axis, request) for axis in range(len(state))]
    for count in (1, 2):
        for axes in itertools.combinations(range(len(state)), count):
            for others in itertools.product(*(choices[axis] for axis in axes)):
                if all(other != state[axis] for axis, other in zip(axes, others, strict=True)):
                    changed = dict(zip(axes, others, strict=True))
                    yield tuple(changed.get(axis, each) for axis, each in enumerate(state))
    if sum(one != other for one, other in zip(state, request.after, strict=True)) > 2:
        yield request.after


def _choices(axis: int, request: BoxingRequest) -> dict[Placement, None]:
    """Placements an axis may have on the way; partial only if it ends so."""
    choices: list[Placement] = [request.after[axis], Broadcast()]
    choices += [Split(dim) for dim in range(len(request.on.shape))]
    if isinstance(request.before[axis], Split):
        choices.append(request.before[axis])
    return dict.fromkeys(choices)
