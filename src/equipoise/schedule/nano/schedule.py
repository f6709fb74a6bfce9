"""A schedule of nano-batches: which operation runs in which way, and what it waits for.

What it decides
    Nothing. A step begins when all steps have ended that it waits for: those whose results it
    needs, the last one on each of its lanes, and, where it is better to leave a lane empty for a
    while, the one whose end it was placed at. So a schedule holds whatever operations really take.

Kept true (tests/unit/schedule/nano/test_search.py)
    Played from its waits alone, a schedule takes the seconds that the search found.

Cost: ``play`` is O(steps^2) at worst, O(steps) with few lanes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.base.errors import LayoutError
from equipoise.schedule.nano.graph import NanoGraph, Operation

_SAME = 1e-9
"""Ends that are closer than this, relative to the time between, are one."""


@dataclass(frozen=True, slots=True)
class NanoStep:
    """One operation, placed."""

    operation: int
    way: int
    after: tuple[int, ...]
    """Operations that end before it begins."""
    begin_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NanoSchedule:
    """All operations of a graph, in the order in which they begin."""

    steps: tuple[NanoStep, ...]
    is_optimal: bool = False
    """Whether no other schedule of this graph is shorter."""

    @property
    def seconds(self) -> float:
        """From the first begin to the last end [s]."""
        return max((step.end_s for step in self.steps), default=0.0)


class Running:
    """Operations that run at the same time, each as fast as the others let it."""

    def __init__(self, graph: NanoGraph) -> None:
        self._graph = graph
        self.now_s = 0.0
        self.left_s: dict[int, float] = {}
        """What each would still take by itself [s]."""

    def start(self, operation: int, seconds: float) -> None:
        """An operation begins now."""
        self.left_s[operation] = seconds

    def advance(self) -> list[int]:
        """Let time pass until something ends: all that end then, in ascending order."""
        slow = {each: self._slowdown(each) for each in self.left_s}
        passed_s = min(left_s * slow[each] for each, left_s in self.left_s.items())
        ended = list[int]()
        for each, left_s in list(self.left_s.items()):
            if left_s * slow[each] <= passed_s * (1 + _SAME):
                ended.append(each)
                del self.left_s[each]
            else:
                self.left_s[each] = left_s - passed_s / slow[each]
        self.now_s += passed_s
        return sorted(ended)

    def _slowdown(self, operation: int) -> float:
        operations, beside = self._graph.operations, self._graph.beside
        resource = operations[operation].resource
        return math.prod(
            beside.get((resource, operations[other].resource), 1.0)
            for other in self.left_s
            if other != operation
        )


def play(graph: NanoGraph, steps: Sequence[NanoStep], *, is_optimal: bool = False) -> NanoSchedule:
    """Times of all steps, from what they wait for.

    Args:
        graph: Operations and what they take.
        steps: Each behind those that it waits for; their times are not read.
        is_optimal: What the schedule says of itself.

    Raises:
        LayoutError: a step waits for what never ends.
    """
    running, ended, begin_s = Running(graph), set[int](), dict[int, float]()
    end_s = dict[int, float]()
    waiting = list(steps)
    while waiting or running.left_s:
        ready = [step for step in waiting if ended.issuperset(step.after)]
        for step in ready:
            begin_s[step.operation] = running.now_s
            running.start(step.operation, graph.operations[step.operation].ways[step.way].seconds)
        waiting = [step for step in waiting if step.operation not in begin_s]
        if not running.left_s:
            name = graph.operations[waiting[0].operation].name
            raise LayoutError(f"{name} waits for an operation that never ends.")
        for each in running.advance():
            ended.add(each)
            end_s[each] = running.now_s
    timed = (
        NanoStep(x.operation, x.way, x.after, begin_s[x.operation], end_s[x.operation])
        for x in steps
    )
    return NanoSchedule(tuple(timed), is_optimal)


def sequential(graph: NanoGraph) -> NanoSchedule:
    """One operation after another, each in its fastest way."""
    steps, on_lane = list[NanoStep](), dict[int, int]()
    for at, each in enumerate(graph.operations):
        way = min(range(len(each.ways)), key=[way.seconds for way in each.ways].__getitem__)
        lanes = each.ways[way].lanes
        waits = {*each.after, *range(at)[-1:], *(on_lane[x] for x in lanes if x in on_lane)}
        steps.append(NanoStep(at, way, tuple(sorted(waits))))
        on_lane |= dict.fromkeys(lanes, at)
    return play(graph, steps)


def repeat(graph: NanoGraph, schedule: NanoSchedule, times: int) -> tuple[NanoGraph, NanoSchedule]:
    """The same operations several times in a row, arranged alike.

    A nano-batch's first operation of a round needs its last one of the round before; lanes go on
    without waiting for each other.
    """
    count = len(graph.operations)
    last = {each.batch: at for at, each in enumerate(graph.operations)}
    operations = list[Operation]()
    steps, on_lane = list[NanoStep](), dict[int, int]()
    for base in range(0, times * count, count):
        for each in graph.operations:
            after = tuple(base + at for at in each.after)
            if base and not after:
                after = (base - count + last[each.batch],)
            operations.append(Operation(each.name, each.batch, each.resource, each.ways, after))
        for step in schedule.steps:
            at = base + step.operation
            lanes = operations[at].ways[step.way].lanes
            waits = {base + each for each in step.after} | {*operations[at].after}
            waits |= {on_lane[lane] for lane in lanes if lane in on_lane}
            steps.append(NanoStep(at, step.way, tuple(sorted(waits))))
            on_lane |= dict.fromkeys(lanes, at)
    whole = NanoGraph(tuple(operations), graph.lanes, graph.beside)
    return whole, play(whole, steps)
