"""Ranks and coordinates are one to one, in any order of axes and in both foldings."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.spec.layout import ATTENTION_AXES, EXPERT_AXES, Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.rank_group import RankGroup

MODEL = ModelSpec(layers=2, hidden=32, heads=6, kv_heads=2, ffn=48, vocab=320, head_width=16)
EXPERT_FOLDING = ("pp", *EXPERT_AXES)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, cp, tp, pp = (draw(st.integers(1, 4)) for _ in range(4))

    def divisor(number: int) -> int:
        return draw(st.sampled_from([n for n in range(1, number + 1) if number % n == 0]))

    ep = divisor(dp * cp * tp)
    return Layout(
        dp=dp,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=divisor(dp * cp * tp // ep),
        replicas=divisor(dp * cp),
        order=tuple(draw(st.permutations(ATTENTION_AXES))),
        expert_order=tuple(draw(st.permutations(EXPERT_AXES))),
    )


@given(layouts())
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    seen: dict[tuple[str, ...], set[tuple[int, ...]]] = {
        ATTENTION_AXES: set(),
        EXPERT_FOLDING: set(),
    }
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        for axes, found in seen.items():
            found.add(tuple(place[axis] for axis in axes))
            assert layout.rank_at(**{axis: place[axis] for axis in axes}) == rank
            assert layout.grid(*axes)[tuple(place[axis] for axis in axes)] == rank
    for axes, found in seen.items():
        assert found == set(itertools.product(*(range(layout.size(axis)) for axis in axes)))


@given(layouts(), st.data())
def test_groups_partition_the_ranks_and_differ_in_their_axes_alone(
    layout: Layout, data: st.DataObject
) -> None:
    folding = data.draw(st.sampled_from([ATTENTION_AXES, EXPERT_FOLDING]))
    axes = data.draw(st.lists(st.sampled_from(folding), unique=True))
    groups = layout.groups(*axes)
    assert groups.shape[1] == math.prod(layout.size(axis) for axis in axes)
    assert sorted(groups.ravel().tolist()) == list(range(layout.world))
    for group in groups.tolist():
        places = [layout.coordinates(rank) for rank in group]
        for axis in set(folding) - set(axes):
            assert len({place[axis] for place in places}) == 1
        # In the order of the axes, the last one fastest.
        assert sorted(range(len(group)), key=lambda i: [places[i][a] for a in axes]) == list(
            range(len(group))
        )
        assert layout.group_of(group[-1], *axes) == group
    first = RankGroup(layout, tuple(axes), groups.shape[1])
    assert [first.ranks.tolist(), len(first)] == [layout.group_of(0, *axes), groups.shape[1]]


@given(layouts())
def test_a_rank_is_in_the_same_stage_for_attention_and_for_experts(layout: Layout) -> None:
    attention = layout.grid(*ATTENTION_AXES)
    experts = layout.grid(*EXPERT_FOLDING)
    for stage in range(layout.pp):
        ranks = np.sort(attention[:, stage].ravel())
        assert np.array_equal(ranks, np.sort(experts[stage].ravel()))


@given(layouts())
def test_the_innermost_axis_is_neighbours(layout: Layout) -> None:
    inner = layout.order[-1]
    groups = layout.groups(inner)
    assert (np.diff(groups, axis=1) == 1).all()


def test_orders_of_published_systems() -> None:
    llama3 = Layout(dp=2, cp=2, tp=2, pp=2)
    assert llama3.coordinates(9) == {
        "dp": 1, "pp": 0, "cp": 0, "tp": 1, "edp": 5, "ep": 0, "etp": 0,
    }  # fmt: skip
    megatron = dataclasses.replace(llama3, order=("pp", "dp", "cp", "tp"))
    assert megatron.groups("pp").tolist()[0] == [0, 8]
    assert llama3.groups("pp").tolist()[0] == [0, 4]
    folded = Layout(dp=2, cp=2, tp=2, ep=8)
    assert folded.groups("ep").tolist() == [list(range(8))]
    assert (folded.edp, folded.zero_ranks, folded.stage_ranks) == (1, 4, 8)


REFUSED = {
    "degree": (
        {"tp": 0},
        "tp = 0 must be 1 or more.",
    ),
    "order": (
        {"order": ("dp", "tp", "tp", "cp")},
        "order is dp tp tp cp but must name each of dp pp cp tp once, outermost first.",
    ),
    "expert order": (
        {"expert_order": ("ep",)},
        "expert_order is ep but must name each of edp ep etp once, outermost first.",
    ),
    "experts": (
        {"dp": 2, "tp": 2, "ep": 3},
        "ep x etp = 3 x 1 does not divide the 4 ranks of a stage, dp x cp x tp = 2 x 1 x 2. Give "
        "degrees whose product is one of 1, 2, 4.",
    ),
    "replicas": (
        {"dp": 2, "cp": 2, "replicas": 3},
        "replicas = 3 does not divide the 4 ranks that ZeRO shards over, dp x cp = 2 x 2. Give one "
        "of 1, 2, 4.",
    ),
}


@pytest.mark.parametrize(("degrees", "message"), REFUSED.values(), ids=REFUSED)
def test_degrees_that_do_not_go_together_are_refused(
    degrees: dict[str, object], message: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        Layout(**degrees)  # type: ignore[arg-type]
    assert str(refused.value) == message


ASKED = {
    "axis": (
        lambda layout: layout.size("sp"),
        'No axis is called "sp". All: dp, pp, cp, tp, edp, ep, etp.',
    ),
    "grid": (
        lambda layout: layout.grid("dp", "tp"),
        "dp tp: not the axes of one folding. Give dp pp cp tp or pp edp ep etp, in any order.",
    ),
    "groups of two foldings": (
        lambda layout: layout.groups("tp", "ep"),
        "tp ep: no group runs along these axes. Give some of dp pp cp tp or pp edp ep etp, each "
        "once.",
    ),
    "no rank": (
        lambda layout: layout.coordinates(8),
        "Rank 8 does not exist among 8. Give 0 to 7.",
    ),
    "off the axis": (
        lambda layout: layout.rank_at(tp=2),
        "tp = 2 is off its axis of 2. Give 0 to 1.",
    ),
    "coordinates of two foldings": (
        lambda layout: layout.rank_at(tp=1, ep=0),
        "tp ep: coordinates of two foldings. Give some of dp pp cp tp or pp edp ep etp.",
    ),
    "world": (
        lambda layout: layout.require_world(12),
        "dp x cp x tp x pp = 2 x 1 x 2 x 2 = 8 ranks, but there are 12. Set dp = 3.",
    ),
    "odd world": (
        lambda layout: layout.require_world(6),
        "dp x cp x tp x pp = 2 x 1 x 2 x 2 = 8 ranks, but there are 6. Give degrees "
        "whose product is 6.",
    ),
    "heads": (
        lambda layout: layout.require_model(dataclasses.replace(MODEL, heads=9, kv_heads=3)),
        "9 heads do not divide over 2 tensor-parallel ranks. Set tp (layout.tp) to one of 1, "
        "3, 9, or share tokens, which needs no division of heads: cp (layout.cp) = 2 "
        "with needed-kv.",
    ),
    "words": (
        lambda layout: layout.require_model(dataclasses.replace(MODEL, vocab=1)),
        "model.vocab = 1 in parts of 1 leaves the last of 2 tensor-parallel ranks without any. "
        "Lower tp (layout.tp).",
    ),
    "layers": (
        lambda layout: layout.require_model(dataclasses.replace(MODEL, layers=1)),
        "1 layers are fewer than pp = 2 stages. Set pp to 1 or less.",
    ),
}


@pytest.mark.parametrize(("ask", "message"), ASKED.values(), ids=ASKED)
def test_what_a_layout_has_not_is_refused(ask: object, message: str) -> None:
    with pytest.raises(LayoutError) as refused:
        ask(Layout(dp=2, tp=2, pp=2))  # type: ignore[operator]
    assert str(refused.value) == message


def test_what_goes_together_passes() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    layout.require_world(8)
    layout.require_model(MODEL)


@pytest.mark.parametrize(
    ("layout", "meets"),
    [
        (Layout(dp=8), False),
        (Layout(dp=8, zero=0), False),
        (Layout(dp=8, zero=2), True),
        (Layout(dp=8, zero=3, replicas=8), True),
        (Layout(dp=1, cp=4, zero=3), False),
        (Layout(dp=4, cp=2, tp=2, ep=4), False),  # experts within a data rank
        (Layout(dp=4, cp=2, tp=2, ep=8), True),
        (Layout(dp=4, tp=2, ep=2, expert_order=("ep", "edp", "etp")), True),
        (Layout(dp=2, etp=2), True),
        (Layout(dp=2, pp=2, ep=2), True),
        (Layout(dp=2, tp=2, pp=2, ep=2), False),
    ],
)
def test_where_data_ranks_meet_in_each_micro_batch(layout: Layout, meets: bool) -> None:
    assert layout.meets_each_turn is meets
