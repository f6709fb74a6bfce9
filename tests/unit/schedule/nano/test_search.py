"""The search against brute force, and what a schedule holds when it is played and repeated."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.schedule.nano.check import check_nano
from equipoise.schedule.nano.graph import (
    Link,
    NanoGraph,
    Operation,
    Resource,
    Way,
    chain_graph,
)
from equipoise.schedule.nano.schedule import play, repeat, sequential
from equipoise.schedule.nano.search import search_order

RESOURCES: tuple[Resource, ...] = ("compute", "memory", "network")


def brute_force_s(graph: NanoGraph) -> float:
    """The shortest of all schedules in which operations begin when others end."""

    def rest_s(ended: frozenset[int], running: tuple[tuple[int, int, float], ...]) -> float:
        """Seconds from here on; running: operation, way, seconds left by itself."""
        if len(ended) == len(graph.operations):
            return 0.0
        begun = ended | {at for at, _, _ in running}
        ready = [
            at
            for at, each in enumerate(graph.operations)
            if at not in begun and ended.issuperset(each.after)
        ]
        best_s = float("inf")
        for ways in itertools.product(
            *([None, *range(len(graph.operations[at].ways))] for at in ready)
        ):
            begins = [(at, way) for at, way in zip(ready, ways, strict=True) if way is not None]
            lanes = [
                lane
                for at, way, *_ in (*running, *begins)
                for lane in graph.operations[at].ways[way].lanes
            ]
            if len(lanes) > len(set(lanes)) or not (running or begins):
                continue
            together = [
                *running,
                *((at, way, graph.operations[at].ways[way].seconds) for at, way in begins),
            ]
            best_s = min(best_s, until_next_s(ended, together))
        return best_s

    def until_next_s(ended: frozenset[int], running: list[tuple[int, int, float]]) -> float:
        slow = []
        for at, _, _ in running:
            times = 1.0
            for other, _, _ in running:
                if other != at:
                    pair = graph.operations[at].resource, graph.operations[other].resource
                    times *= graph.beside.get(pair, 1.0)
            slow.append(times)
        passed_s = min(left_s * s for (_, _, left_s), s in zip(running, slow, strict=True))
        left = [
            (at, way, left_s - passed_s / s)
            for (at, way, left_s), s in zip(running, slow, strict=True)
        ]
        gone = {at for at, _, left_s in left if left_s <= 1e-9 * passed_s}
        still = tuple(each for each in left if each[0] not in gone)
        return passed_s + rest_s(ended | gone, still)

    return rest_s(frozenset(), ())


@st.composite
def graphs(draw: st.DrawFn) -> NanoGraph:
    lanes = draw(st.integers(1, 3))
    seconds = st.integers(1, 6)
    sets = [
        lane for size in range(1, lanes + 1) for lane in itertools.combinations(range(lanes), size)
    ]
    operations = []
    for at in range(draw(st.integers(1, 5))):
        ways = draw(
            st.lists(st.tuples(st.sampled_from(sets), seconds), min_size=1, max_size=2, unique=True)
        )
        after = draw(st.sets(st.integers(0, at - 1), max_size=2)) if at else set()
        resource = draw(st.sampled_from(RESOURCES))
        operations.append(
            Operation(f"op {at}", at % 2, resource, tuple(Way(*way) for way in ways), (*after,))
        )
    times = st.sampled_from([1.0, 1.0, 1.25, 1.5, 2.5])
    beside = draw(st.dictionaries(st.tuples(*[st.sampled_from(RESOURCES)] * 2), times))
    return NanoGraph(tuple(operations), lanes, beside)


@settings(max_examples=50)
@given(graph=graphs())
def test_equal_to_brute_force_and_legal(graph: NanoGraph) -> None:
    schedule = search_order(graph)
    check_nano(graph, schedule)
    assert schedule.is_optimal
    assert schedule.seconds == pytest.approx(brute_force_s(graph), rel=1e-9)
    assert schedule.seconds <= sequential(graph).seconds * (1 + 1e-9)


@settings(max_examples=30)
@given(graph=graphs(), times=st.integers(1, 4), most=st.integers(1, 30))
def test_repeated_and_cut_short_it_is_legal(graph: NanoGraph, times: int, most: int) -> None:
    schedule = search_order(graph, most_states=most)
    check_nano(graph, schedule)
    assert schedule.seconds <= graph.sequential_s * (1 + 1e-9)
    whole, repeated = repeat(graph, schedule, times)
    check_nano(whole, repeated)
    assert len(repeated.steps) == times * len(graph.operations)


@settings(max_examples=30)
@given(graph=graphs(), factors=st.lists(st.integers(1, 5), min_size=5, max_size=5))
def test_it_holds_whatever_operations_take(graph: NanoGraph, factors: list[int]) -> None:
    schedule = search_order(graph)
    other = NanoGraph(
        tuple(
            Operation(
                each.name,
                each.batch,
                each.resource,
                tuple(Way(way.lanes, way.seconds * factor) for way in each.ways),
                each.after,
            )
            for each, factor in zip(graph.operations, factors, strict=False)
        ),
        graph.lanes,
        graph.beside,
    )
    played = play(other, schedule.steps)
    ends = {step.operation: step.end_s for step in played.steps}
    assert all(step.begin_s >= ends[each] - 1e-9 for step in played.steps for each in step.after)
    check_nano(other, played)


def test_a_product_runs_beside_attention() -> None:
    both, one, other = (0, 1), (0,), (1,)

    def dense(wide_s: float) -> Link:
        narrow_s = 2 * wide_s
        ways = Way(both, wide_s), Way(one, narrow_s), Way(other, narrow_s)
        return Link("dense", "compute", ways)

    # Attention takes as long on one lane as on both: one lane's cores fill the memory's rate.
    attend = Link("attend", "memory", tuple(Way(lanes, 4.0) for lanes in (both, one, other)))
    graph = chain_graph([[dense(3.0), attend], [attend, dense(3.0)]], lanes=2)
    schedule = search_order(graph)
    assert graph.sequential_s == 14.0
    assert schedule.seconds < 14.0
    assert schedule.seconds == pytest.approx(brute_force_s(graph))


def test_operations_that_hurt_each_other_run_one_after_another() -> None:
    ways = tuple(Way((lane,), 1.0) for lane in range(2))
    beside = {("compute", "compute"): 2.5}
    graph = chain_graph(
        [[Link("a", "compute", ways)], [Link("b", "compute", ways)]],
        lanes=2,
        beside=beside,  # type: ignore[arg-type]
    )
    schedule = search_order(graph)
    assert schedule.seconds == 2.0
    assert schedule.steps[1].after == (schedule.steps[0].operation,)


@pytest.mark.parametrize(
    ("operation", "beside", "words"),
    [
        (Operation("a", 0, "memory", ()), {}, "a has no way to run. Give it one."),
        (
            Operation("a", 0, "memory", (Way((0,), 0.0),)),
            {},
            "a takes no time. Give every way seconds above 0.",
        ),
        (
            Operation("a", 0, "memory", (Way((2,), 1.0),)),
            {},
            "a runs on lanes that do not exist. Name some of 2, counted from 0.",
        ),
        (
            Operation("a", 0, "memory", (Way((0,), 1.0),), (0,)),
            {},
            "a needs a later operation. List operations in order.",
        ),
        (
            Operation("a", 0, "memory", (Way((0,), 1.0),)),
            {("memory", "compute"): 0.5},
            "memory beside compute takes 0.5 times as long. It must be at least 1.",
        ),
    ],
)
def test_refused(operation: Operation, beside: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(SpecError) as error:
        NanoGraph((operation,), 2, beside)
    assert str(error.value) == words


def test_what_no_search_would_order_is_refused() -> None:
    link = Link("a", "compute", (Way((0,), 1.0),))
    assert search_order(chain_graph([[link] * 200], lanes=1)).seconds == pytest.approx(200.0)
    with pytest.raises(SpecError) as error:
        search_order(chain_graph([[link] * 201], lanes=1))
    assert str(error.value) == (
        "201 operations are too many to search; 200 are the most. Arrange a few layers, and repeat "
        "their order."
    )
    assert search_order(NanoGraph((), 1)).seconds == 0.0
