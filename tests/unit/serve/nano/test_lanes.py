"""Two lanes: steps begin in their order, errors are raised, and threads are as before."""

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.schedule.nano.graph import Link, Way, chain_graph
from equipoise.schedule.nano.schedule import repeat
from equipoise.schedule.nano.search import search_order
from equipoise.serve.nano.lanes import Lanes

WAYS = Way((0, 1), 2.0), Way((0,), 3.0), Way((1,), 3.0)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    opened = Lanes(2)
    yield opened
    opened.close()
    torch.set_num_threads(before)


@settings(max_examples=15)
@given(seconds=st.lists(st.integers(1, 9), min_size=8, max_size=8), times=st.integers(1, 5))
def test_no_step_begins_before_those_that_it_waits_for(seconds: list[int], times: int) -> None:
    links = [
        Link("op", "compute", (Way((0, 1), x), Way((0,), x + y), Way((1,), x + y)))
        for x, y in zip(seconds, seconds[1:] + seconds[:1], strict=True)
    ]
    graph = chain_graph([links[:4], links[4:]], lanes=2)
    graph, schedule = repeat(graph, search_order(graph, most_states=500), times)
    ended, late = set[int](), list[int]()
    after = {step.operation: set(step.after) for step in schedule.steps}

    def call(at: int) -> None:
        if not after[at] <= ended:
            late.append(at)
        ended.add(at)

    lanes = Lanes(2)
    calls = [lambda at=at: call(at) for at in range(len(graph.operations))]  # type: ignore[misc]
    lanes.run(graph, schedule.steps, calls)
    lanes.close()
    assert not late
    assert len(ended) == len(graph.operations)


def test_each_lane_has_its_threads(lanes: Lanes) -> None:
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        seen[name] = torch.get_num_threads()

    lanes.together(lambda: look("first"), lambda: look("second"))
    look("after")
    assert seen == {"first": 1, "second": 1, "after": 2}


@pytest.mark.parametrize("lane", [0, 1])
def test_errors_of_either_lane_are_raised(lanes: Lanes, lane: int) -> None:
    graph = chain_graph(
        [[Link("op", "compute", (Way((at,), 1.0),)) for at in (0, 1, 0, 1)]], lanes=2
    )
    schedule = search_order(graph)
    begun = list[int]()

    def call(at: int) -> None:
        begun.append(at)
        if at == lane:
            raise ValueError(f"lane {lane} fails")

    calls = [lambda at=at: call(at) for at in range(4)]  # type: ignore[misc]
    with pytest.raises(ValueError, match=f"lane {lane} fails"):
        lanes.run(graph, schedule.steps, calls)
    assert begun == list(range(lane + 1))
    assert torch.get_num_threads() == 2
    lanes.run(graph, schedule.steps, [lambda: None] * 4)  # and it goes on


def test_the_second_lane_ends_when_closed() -> None:
    before = torch.get_num_threads()
    lanes = Lanes(before)
    lanes.close()
    assert "nano lane" not in [each.name for each in threading.enumerate()]
