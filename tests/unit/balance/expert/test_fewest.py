"""The fewest copies of any plan: never above what trying every plan of a small case finds."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.expert import fewest, loops
from equipoise.balance.expert.fewest import fewest_copies, joined_copies
from equipoise.balance.expert.policies import plan_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.schedule.compiled import compile_loop


def fewest_of_all(request: ExpertRequest, target: int) -> int | None:
    """The fewest copies within the slots that lower every rank to the target, by trying all."""
    experts, ranks, owners = request.rows.shape[1], request.ranks, request.owners
    others = [[x for x in range(experts) if owners[x] != rank] for rank in range(ranks)]
    choices = [
        [c for n in range(request.slots + 1) for c in itertools.combinations(each, n)]
        for each in others
    ]
    sets = [
        these for n in range(1, experts + 1) for these in itertools.combinations(range(experts), n)
    ]
    for chosen in sorted(itertools.product(*choices), key=lambda each: sum(map(len, each))):
        held = [{x for x in range(experts) if owners[x] == rank} for rank in range(ranks)]
        held = [own | set(mine) for own, mine in zip(held, chosen, strict=True)]
        # Hall: any set of experts fits onto the ranks that it may lie on.
        if all(
            int(request.loads[list(these)].sum())
            <= target * sum(not own.isdisjoint(these) for own in held)
            for these in sets
        ):
            return sum(map(len, chosen))
    return None


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=4, max_size=4),
    st.integers(1, 2),
    st.sampled_from((2, 4)),
    st.floats(1.0, 1.6),
)
def test_no_plan_has_fewer_copies(loads: list[int], slots: int, ranks: int, above: float) -> None:
    rows = np.zeros((ranks, 4), dtype=np.int64)
    rows[0] = loads
    request = ExpertRequest(rows, slots=slots, tolerance=0.0)
    for target in (
        int(plan_experts("exact", request).computed.max()),
        int(above * sum(loads) / ranks),
    ):
        best = fewest_of_all(request, target)
        assert best is None or fewest_copies(request, target) <= best
        assert best is None or joined_copies(request, target, rounds=20) <= best


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=5).filter(lambda each: sum(each) <= 0))
def test_groups_are_the_best_of_all_and_the_same_compiled(gaps: list[int]) -> None:
    ranks, slots = len(gaps), [[min(3, max(-gap, 0)), max(-gap - 3, 0)] for gap in gaps]
    arcs = [max(gap, 0) // 4 for gap in gaps]

    def cost(group: list[int]) -> float:
        left, taken = sum(max(gaps[rank], 0) for rank in group), 0
        for add in sorted((add for rank in group for add in slots[rank]), reverse=True):
            taken, left = taken + (left > 0), left - add * (left > 0)
        is_held = left <= 0 and sum(gaps[rank] for rank in group) <= 0
        given = sum(arcs[rank] for rank in group)
        return max(len(group) - 1, taken, given) if is_held else np.inf

    best = min(
        sum(cost([rank for rank in range(ranks) if names[rank] == name]) for name in set(names))
        for names in itertools.product(range(ranks), repeat=ranks)
    )
    adds = sorted(((add, rank) for rank in range(ranks) for add in slots[rank]), reverse=True)
    columns = [gaps, arcs, [rank for _, rank in adds], [add for add, _ in adds]]
    columns += [[0] * (1 << ranks), [0] * (1 << ranks)]
    compiled = compile_loop(loops.join_groups)(*(np.array(each) for each in columns))
    assert loops.join_groups(*columns) == compiled == best


def test_each_giver_with_the_largest_rooms_to_itself_is_never_more_than_groups() -> None:
    draw = np.random.default_rng(0)
    for _ in range(40):
        excess, rooms = (np.sort(draw.integers(1, most, n)) for most, n in ((30, 3), (20, 7)))
        both = np.append(excess, np.zeros(7, np.int64)), np.append(np.zeros(3, np.int64), rooms)
        if excess.sum() <= rooms.sum():
            best = fewest._join(both[0], np.zeros(10, np.int64), both[1][np.newaxis])
            assert int(fewest._cover(excess, rooms).sum()) <= best


@pytest.mark.parametrize(
    ("heights", "slots", "target", "copies"),
    [
        ([6, 2, 2, 2], 1, 3, 3),  # three rooms of 1 hold 3 rows
        ([4, 4, 1, 3], 2, 3, 2),
        ([3, 3, 3, 3], 1, 3, 0),
        ([5, 5, 1, 1], 1, 3, 2),  # two pairs: no rank is joined to a third
        ([6, 6, 1, 1, 1], 1, 3, 4),  # no room of 2 holds an excess of 3: all are one group
        ([6, 6, 1, 2, 0], 1, 3, 3),  # 3 of 2 and 1, and 3 of 3
    ],
)
def test_small_cases(heights: list[int], slots: int, target: int, copies: int) -> None:
    ranks = len(heights)
    rows = np.zeros((ranks, ranks), dtype=np.int64)
    rows[0] = heights
    request = ExpertRequest(rows, slots=slots, tolerance=0.0)
    assert fewest_copies(request, target) == copies
