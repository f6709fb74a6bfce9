"""Search the order in which nano-batches overlap: branch and bound over what begins when.

What it decides
    Whenever something ends, what begins on the lanes that are free, in which way, or that they stay
    empty until the next end: where two operations slow each other down, one after the other may be
    shorter. The schedule with the earliest last end wins; the first one found among equals.

    A branch is left when it cannot beat the best schedule so far: not by its longest chain of
    operations, nor by the lane-seconds that are left. The search begins with one operation after
    another as the best, so it never answers with anything slower. Beyond ``most_states`` it answers
    with the best so far, and says so.

Kept true (tests/unit/schedule/nano/test_search.py, by Hypothesis)
    Equal to brute force over all such schedules; legal by ``check``; never slower than sequential.

Sources
    Nano-batches and a searched order: NanoFlow, arXiv:2408.12757, section 4.
"""

from dataclasses import dataclass, field

from equipoise.base.errors import SpecError
from equipoise.schedule.nano.graph import NanoGraph
from equipoise.schedule.nano.schedule import NanoSchedule, NanoStep, Running, play, sequential

_MOST_STATES = 20_000
_MOST_OPERATIONS = 200
_GAIN = 1e-9
"""A schedule must be shorter by this share to be better."""


def search_order(graph: NanoGraph, *, most_states: int = _MOST_STATES) -> NanoSchedule:
    """The shortest schedule of a graph.

    Args:
        graph: Operations and lanes; up to about a dozen operations are searched to the end.
        most_states: After this many branches the best so far is the answer.

    Raises:
        SpecError: there are more operations than any search would order.
    """
    if len(graph.operations) > _MOST_OPERATIONS:
        raise SpecError(
            f"{len(graph.operations):,} operations are too many to search; {_MOST_OPERATIONS} are "
            "the most. Arrange a few layers, and repeat their order."
        )
    search = _Search(graph, most_states)
    search.run()
    return play(graph, search.steps, is_optimal=search.states <= most_states)


@dataclass(slots=True)
class _State:
    """What runs and what is left, at a moment when something may begin."""

    now_s: float = 0.0
    left_s: dict[int, float] = field(default_factory=dict)
    on_lane: dict[int, int] = field(default_factory=dict)
    """What each lane ran last."""
    ended: frozenset[int] = frozenset()
    causes: tuple[int, ...] = ()
    """What ended just now."""
    steps: tuple[NanoStep, ...] = ()


class _Search:
    def __init__(self, graph: NanoGraph, most_states: int) -> None:
        self._graph, self._most_states = graph, most_states
        best = sequential(graph)
        self.steps, self._best_s = best.steps, best.seconds
        self.states = 0
        operations = graph.operations
        self._least_s = [min(way.seconds for way in each.ways) for each in operations]
        self._area_s = [
            min(way.seconds * len(way.lanes) for way in each.ways) for each in operations
        ]
        self._tail_s = [0.0] * len(operations)
        """Longest chain behind each operation [s]."""
        for at in reversed(range(len(operations))):
            for before in operations[at].after:
                behind_s = self._least_s[at] + self._tail_s[at]
                self._tail_s[before] = max(self._tail_s[before], behind_s)
        self._only_lane = [
            ways[0].lanes[0] if len(ways) == 1 and len(ways[0].lanes) == 1 else None
            for ways in (each.ways for each in operations)
        ]
        self._seen: dict[object, float] = {}

    def run(self) -> None:
        self._branch(_State(), -1)

    def _branch(self, state: _State, last: int) -> None:
        """Try everything that may begin now, in ascending order from ``last`` on."""
        self.states += 1
        if self.states > self._most_states or not self._may_win(state):
            return
        begun = {step.operation for step in state.steps}
        if len(begun) == len(self._graph.operations) and not state.left_s:
            self.steps, self._best_s = state.steps, state.now_s
            return
        key = (
            state.ended,
            tuple(sorted((at, round(left_s, 12)) for at, left_s in state.left_s.items())),
            tuple(sorted((x.operation, x.way) for x in state.steps if x.operation in state.left_s)),
            last,
        )
        if self._seen.get(key, float("inf")) <= state.now_s:
            return
        self._seen[key] = state.now_s
        for at in self._ready(state, begun, last):
            for way in self._ways(state, at):
                self._branch(self._begin(state, at, way), at)
        if state.left_s:
            self._branch(self._pass(state), -1)

    def _ready(self, state: _State, begun: set[int], last: int) -> list[int]:
        ready = [
            at
            for at, each in enumerate(self._graph.operations)
            if at > last and at not in begun and state.ended.issuperset(each.after)
        ]
        return sorted(ready, key=lambda at: -self._tail_s[at] - self._least_s[at])

    def _ways(self, state: _State, at: int) -> list[int]:
        busy = {lane for lane, each in state.on_lane.items() if each in state.left_s}
        ways = self._graph.operations[at].ways
        return [way for way, each in enumerate(ways) if busy.isdisjoint(each.lanes)]

    def _begin(self, state: _State, at: int, way: int) -> _State:
        operation = self._graph.operations[at]
        lanes = operation.ways[way].lanes
        waits = {*operation.after, *(state.on_lane[x] for x in lanes if x in state.on_lane)}
        if waits.isdisjoint(state.causes):  # it could have begun before: the search has it wait
            waits |= {*state.causes[:1]}
        step = NanoStep(at, way, tuple(sorted(waits)))
        return _State(
            state.now_s,
            {**state.left_s, at: operation.ways[way].seconds},
            {**state.on_lane, **dict.fromkeys(lanes, at)},
            state.ended,
            state.causes,
            (*state.steps, step),
        )

    def _pass(self, state: _State) -> _State:
        running = Running(self._graph)
        running.now_s, running.left_s = state.now_s, dict(state.left_s)
        ended = running.advance()
        return _State(
            running.now_s,
            running.left_s,
            state.on_lane,
            state.ended | frozenset(ended),
            tuple(ended),
            state.steps,
        )

    def _may_win(self, state: _State) -> bool:
        """Whether the least that is left ends before the best schedule so far."""
        begun = {step.operation for step in state.steps}
        area_s = chain_s = 0.0
        lane_s = [0.0] * self._graph.lanes
        ways = {step.operation: step.way for step in state.steps if step.operation in state.left_s}
        for at, left_s in state.left_s.items():
            lanes = self._graph.operations[at].ways[ways[at]].lanes
            area_s += left_s * len(lanes)
            chain_s = max(chain_s, left_s + self._tail_s[at])
            for lane in lanes:
                lane_s[lane] += left_s
        for at in range(len(self._graph.operations)):
            if at not in begun:
                area_s += self._area_s[at]
                chain_s = max(chain_s, self._least_s[at] + self._tail_s[at])
                if (only := self._only_lane[at]) is not None:
                    lane_s[only] += self._least_s[at]
        least_s = max(chain_s, area_s / self._graph.lanes, *lane_s)
        return state.now_s + least_s < self._best_s * (1 - _GAIN)
