"""Redistributions with all ranks in this process equal the dense tensor, by Hypothesis."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.parallel.boxing.redistribute import play_boxing
from equipoise.schedule.boxing.path import plan_boxing
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Partial,
    Placement,
    SplitDim,
)
from equipoise.schedule.boxing.ways import other_ways
from support.ranks.boxing_ranks import joined, parts_of, request, whole_of

WIDE = (torch.float64, torch.int64)


@st.composite
def questions(draw):
    """A tensor on a mesh, and placements before and after."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    reduce = draw(st.sampled_from(["sum", "max"]))

    def placement(ranks: int) -> st.SearchStrategy[Placement]:
        shares = st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).filter(any).map(tuple)
        split = st.builds(SplitDim, st.integers(0, len(shape) - 1), st.none() | shares)
        return st.one_of(split, st.just(Broadcast()), st.just(Partial(reduce)))

    ends = [draw(st.tuples(*map(placement, mesh))) for _ in range(2)]
    return MeshTensor(shape, mesh), *ends


@settings(max_examples=24)
@given(questions(), st.sampled_from(WIDE), st.booleans())
def test_every_way_leads_to_the_dense_tensor(question, dtype, is_turned: bool) -> None:
    on, before, after = question
    whole = whole_of(on).to(dtype)
    parts = parts_of(whole, on, before)
    if is_turned:  # in memory the other way round
        dims = tuple(reversed(range(len(on.shape))))
        parts = [part.permute(dims).contiguous().permute(dims) for part in parts]
    kept = [part.clone() for part in parts]
    asked = request(on, before, after)
    for schedule in (plan_boxing(asked), *other_ways(asked)):
        found = play_boxing(parts, schedule)
        assert torch.equal(joined(found, on, after), whole), schedule
        assert all(map(torch.equal, parts, kept)), "a part was written to"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float32])
def test_narrow_types_travel_as_they_are(dtype: torch.dtype) -> None:
    on = MeshTensor((5, 3), (2, 2))
    whole = whole_of(on).to(dtype)
    size = whole.element_size()
    for before, after in (
        ((SplitDim(0), SplitDim(1)), (SplitDim(1), SplitDim(0))),
        ((Partial("max"), SplitDim(0)), (Broadcast(), Broadcast())),
        ((SplitDim(0), Broadcast()), (Partial("max"), Partial("max"))),
    ):
        schedule = plan_boxing(request(on, before, after, size))
        found = play_boxing(parts_of(whole, on, before), schedule)
        assert torch.equal(joined(found, on, after), whole)
        assert {part.dtype for part in found} == {dtype}


def test_nothing_to_do_is_nothing_done() -> None:
    on = MeshTensor((4, 4), (2,))
    parts = parts_of(whole_of(on), on, (SplitDim(0),))
    found = play_boxing(parts, plan_boxing(request(on, (SplitDim(0),), (SplitDim(0),))))
    assert all(one is other for one, other in zip(found, parts, strict=True))


def test_a_part_of_another_shape_is_refused() -> None:
    on = MeshTensor((4, 4), (2,))
    schedule = plan_boxing(request(on, (SplitDim(0),), (Broadcast(),)))
    with pytest.raises(LayoutError) as refused:
        play_boxing([torch.zeros(2, 4).double()], schedule)
    assert str(refused.value) == (
        "A schedule of 2 ranks cannot run on 1. Let the ranks of its mesh run it."
    )
    with pytest.raises(LayoutError) as refused:
        play_boxing([torch.zeros(2, 4).double(), torch.zeros(3, 4).double()], schedule)
    assert str(refused.value) == (
        "Rank 1 has a part of [3, 4], 8 bytes an element, and the schedule is for [2, 4] of 8. "
        "Plan it for the tensor that there is."
    )
