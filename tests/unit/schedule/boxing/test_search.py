"""The cheapest path: no other is cheaper, and its steps lead from one end to the other."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.boxing.path import (
    BoxingRequest,
    BoxingSchedule,
    plan_boxing,
    transposed,
)
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Partial,
    Placement,
    SplitDim,
    read_placements,
)
from equipoise.schedule.boxing.ways import other_ways

WORDS: list[Placement] = [SplitDim(0), SplitDim(1), SplitDim(0, (3, 1)), Broadcast(), Partial()]
LINKS = st.builds(LinkPrice, st.sampled_from([0.0, 1e-6, 1e-5]), st.sampled_from([1e9, 1e11]))


@st.composite
def requests(draw, axes: int = 2) -> BoxingRequest:
    shape = tuple(draw(st.lists(st.sampled_from([1, 5, 64, 512]), min_size=2, max_size=2)))
    ends = [tuple(draw(st.sampled_from(WORDS)) for _ in range(axes)) for _ in range(2)]
    links = tuple(draw(LINKS) for _ in range(axes))
    return BoxingRequest(MeshTensor(shape, (2,) * axes), *ends, 4, links)


def require_joined(schedule: BoxingSchedule) -> None:
    """Steps lead from the one state to the other."""
    state = schedule.before
    for priced in schedule.steps:
        assert priced.step.before == state
        state = priced.step.after
    assert state == schedule.after


def brute(request: BoxingRequest) -> float:
    """The least time of any path, of steps that change any axes at once."""
    ends = (request.before, request.after)
    states = list(
        itertools.product(
            *(
                dict.fromkeys([Broadcast(), SplitDim(0), SplitDim(1), *axis])
                for axis in zip(*ends, strict=True)
            )
        )
    )
    edges = {}
    for before, after in itertools.permutations(states, 2):
        priced = request.one_step(before, after)
        if priced is None:
            continue
        if all(after[a] == request.after[a] for a in priced.step.axes if after[a] == Partial()):
            edges[before, after] = priced.seconds
    best = {request.before: 0.0}
    for _ in states:
        for (before, after), seconds in edges.items():
            if before in best:
                best[after] = min(best.get(after, math.inf), best[before] + seconds)
    return best[request.after]


@settings(max_examples=10)
@given(requests())
def test_no_path_at_all_is_cheaper(request: BoxingRequest) -> None:
    found = plan_boxing(request)
    require_joined(found)
    assert found.seconds <= brute(request) * (1 + 1e-9)


@settings(max_examples=6)
@given(requests(axes=3))
def test_other_ways_lead_there_and_are_no_cheaper(request: BoxingRequest) -> None:
    found, others = plan_boxing(request), other_ways(request)
    require_joined(found)
    assert found.sent_bytes == int(found.link_bytes().sum())
    assert [each.seconds for each in others] == sorted(each.seconds for each in others)
    for each in others:
        require_joined(each)
        assert found.seconds <= each.seconds * (1 + 1e-9)
    if request.before == request.after:
        assert (found.steps, others, found.seconds, found.sent_bytes) == ((), (), 0, 0)


def path(before: str, after: str, *, shape=(4096, 4096), mesh=(4, 8)) -> str:
    links = (LinkPrice(1e-5, 5e10), LinkPrice(5e-6, 4.5e11))
    ends = (read_placements(before), read_placements(after))
    return str(plan_boxing(BoxingRequest(MeshTensor(shape, mesh), *ends, 2, links)))


def test_slow_links_carry_what_fast_ones_have_reduced() -> None:
    assert path("P, P", "B, B") == "cheapest: P, P -> P, S(0) -> B, S(0) -> B, B"
    assert path("S(0), P", "B, S(1)") == "cheapest: S(0), P -> S(0), S(1) -> B, S(1)"
    assert path("B, B", "S(0), S(1)") == "cheapest: B, B -> S(0), S(1)"


def test_what_is_small_goes_in_the_fewest_messages() -> None:
    assert path("P, P", "B, B", shape=(8,), mesh=(2, 2)) == "cheapest: P, P -> P, B -> B, B"
    assert path("S(0), P", "P, S(0)", shape=(8,), mesh=(2, 2)) == (
        "cheapest: S(0), P -> P, P -> P, S(0)"
    )


def test_equal_questions_have_equal_answers() -> None:
    request = BoxingRequest(
        MeshTensor((64, 64), (2, 2)),
        read_placements("S(0), P"),
        read_placements("S(1), S(0)"),
        4,
        (LinkPrice(1e-6, 1e9),) * 2,
    )
    assert plan_boxing(request) == plan_boxing(request)


def test_gradients_are_partial_where_tensors_are_copied() -> None:
    links = (LinkPrice(0.0, 1.0),) * 3
    ends = (read_placements("B, S(0: 1+2), P"), read_placements("S(0), B, B"))
    back = transposed(BoxingRequest(MeshTensor((6,), (2, 2, 2)), *ends, 4, links))
    assert (back.before, back.after) == (
        read_placements("S(0), P, P"),
        read_placements("P, S(0: 1+2), B"),
    )


def test_a_maximum_has_no_gradient() -> None:
    asked = BoxingRequest(
        MeshTensor((6,), (2,)), (Partial("max"),), (Broadcast(),), 4, (LinkPrice(0.0, 1.0),)
    )
    with pytest.raises(LayoutError) as refused:
        transposed(asked)
    assert str(refused.value) == (
        "P(max) has no gradient here: which rank had the largest element is not kept. "
        "Redistribute it without one."
    )


def test_other_numbers_of_links_than_axes_are_refused() -> None:
    with pytest.raises(LayoutError) as refused:
        BoxingRequest(MeshTensor((6,), (2, 2)), (Broadcast(),) * 2, (Broadcast(),) * 2, 4, ())
    assert str(refused.value) == "0 links for a mesh of 2 axes (2x2). Give one for each axis."
