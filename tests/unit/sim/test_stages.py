"""Stages of a run and schedules of its steps."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.divided import pack_divided_in_time
from equipoise.balance.stage import price_layers
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import counted_curve
from equipoise.cost.step.request import TERMS, StepOptions
from equipoise.schedule.attention.price import BACKWARD_OVER_FORWARD
from equipoise.schedule.pipeline.check import check_pipeline
from equipoise.sim.parts import BatchParts, run_pipeline
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.sim.stages import StagePlanner, settle_edges
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.plan import Stages
from equipoise.spec.run.resolved import ResolvedFile, write_resolved
from equipoise.spec.run.spec import LayoutSpec, PackSpec, RunSpec
from support.hand_packed import packed_of

MODEL = ModelSpec(layers=8, hidden=48, heads=6, kv_heads=2, ffn=64, vocab=99, head_width=8)
CURVE = counted_curve(MODEL)
PLANNED = ("gpipe", "1f1b", "interleaved")
PIECES = np.array([[0, 0, 900], [1, 0, 40], [2, 0, 300]])


def planner_of(model: ModelSpec = MODEL, **layout: object) -> StagePlanner:
    planner = ContextPlanner(model, LayoutSpec(**{"dp": 1, "pp": 2} | layout))
    return StagePlanner.make(planner, CURVE, "none", PIECES)


rows = st.lists(st.lists(st.integers(1, 400), max_size=4), min_size=4, max_size=4)
packs = st.lists(rows, min_size=1, max_size=3)


@settings(max_examples=15)
@given(
    ranks=packs,
    pipeline=st.sampled_from([2, 4]),
    context=st.integers(1, 2),
    tensor=st.integers(1, 2),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "auto"]),
)
def test_loads_add_up_to_those_of_one_rank(ranks, pipeline, context, tensor, schedule) -> None:
    packed = packed_of(ranks)
    alone = ContextPlanner(MODEL, LayoutSpec()).loads(packed, CURVE)
    shared = planner_of(pp=pipeline, cp=context, tp=tensor, schedule=schedule)
    loads = shared.loads(packed)
    each = pipeline * context * tensor
    assert len(loads.predicted_s) == len(loads.kept_layer_tokens) == each * len(ranks)
    for rank in range(len(ranks)):
        mine = slice(each * rank, each * (rank + 1))
        assert sum(loads.tokens[mine]) == alone.tokens[rank]
        assert sum(loads.flop[mine]) == pytest.approx(alone.flop[rank], rel=1e-9)
        assert sum(loads.predicted_s[mine]) == pytest.approx(
            alone.predicted_s[rank], rel=1e-3, abs=1e-9
        )
    assert loads.longest_s >= max(loads.predicted_s)


@given(ranks=packs)
def test_a_rank_finds_the_schedule_that_all_others_know(ranks) -> None:
    packed, planner = packed_of(ranks), planner_of(schedule="zb-h1")
    for rank, planned in enumerate(planner.plan(packed)):
        check_pipeline(planned.schedule)
        mine = planner.plan_rank(packed, rank)
        assert mine.schedule.digest == planned.schedule.digest
        assert mine.timeline.makespan_ns == planned.timeline.makespan_ns


@given(ranks=packs)
def test_ranks_that_share_experts_run_one_order(ranks) -> None:
    sparse = dataclasses.replace(MODEL, experts=4, top_k=2, expert_ffn=16)
    planner = planner_of(sparse, dp=2, ep=2, schedule="auto")
    packed = packed_of(ranks)
    orders = {planned.schedule.digest for planned in planner.plan(packed)}
    assert len(orders) == 1
    assert planner.plan_rank(packed, 0).schedule.digest in orders


def test_runs_of_slices_are_units_of_the_schedule() -> None:
    pack = PackSpec(policy="divided-in-time", context_tokens=300, step_tokens=1200)
    packed = pack_divided_in_time(PIECES, pack, 1, CURVE)
    (planned,) = planner_of().plan(packed)
    assert len(planned.schedule.units) < len(packed.ranks[0])


def test_every_layer_and_table_is_on_one_rank() -> None:
    shares = [planner_of(pp=4, schedule="interleaved").share_of(rank, 8, 1) for rank in range(4)]
    assert sorted(layer for share in shares for layer in share.layers) == list(range(8))
    assert [share.embeds for share in shares] == [True, False, False, False]
    assert [share.has_head for share in shares] == [False, False, False, True]
    ends = planner_of(schedule="zb-v").share_of(0, 4, 1)
    assert ends.embeds
    assert ends.has_head


def test_the_head_makes_its_stage_shorter() -> None:
    wide = dataclasses.replace(MODEL, vocab=4000)
    assert planner_of(wide).split.layers.tolist()[1] < 4


def test_what_has_two_stages_a_rank_has_no_others() -> None:
    with pytest.raises(LayoutError) as refused:
        planner_of(schedule="zb-v", virtual=4)
    assert str(refused.value) == (
        'layout.schedule = "zb-v" goes down the ranks and back up, so it has 2 stages a rank, and '
        "layout.virtual = 4. Leave layout.virtual out."
    )


def test_layers_must_fill_the_stages() -> None:
    with pytest.raises(LayoutError, match="8 layers cannot fill 12 stages"):
        planner_of(pp=4, schedule="interleaved", virtual=3)


def test_a_run_keeps_the_stages_of_the_plan_that_it_began_with(tmp_path: Path) -> None:
    spec = RunSpec(layout=LayoutSpec(dp=1, pp=2))
    assert settle_edges(spec, MODEL, tmp_path, None) == ()  # no run yet: its ranks split layers
    begun = settle_edges(spec, MODEL, tmp_path, Stages((0, 3, 8), (0, 1)))
    write_resolved(tmp_path, ResolvedFile(spec, MODEL, {}, 2, "corpus", "", stage_edges=begun))
    assert settle_edges(spec, MODEL, tmp_path, None) == begun == (0, 3, 8)
    assert settle_edges(spec, MODEL, tmp_path, Stages((0, 4, 8), (0, 1))) == (0, 4, 8)
    for other in (LayoutSpec(dp=1, pp=4), LayoutSpec(dp=1, pp=2, schedule="zb-v")):
        assert settle_edges(dataclasses.replace(spec, layout=other), MODEL, tmp_path, None) == ()
    deeper = dataclasses.replace(MODEL, layers=9)
    assert settle_edges(spec, deeper, tmp_path, None) == ()


def test_given_stages_are_priced_as_they_are() -> None:
    given_planner = StagePlanner.make(planner_of().planner, CURVE, "none", PIECES, (0, 1, 8))
    assert given_planner.split.layers.tolist() == [1, 7]
    assert given_planner.split.loads.sum() == pytest.approx(planner_of().split.loads.sum())
    assert given_planner.placed == Stages((0, 1, 8), (0, 1))
    assert given_planner.share_of(1, 8, 1).layers == tuple(range(1, 8))


@settings(max_examples=15)
@given(ranks=st.lists(rows, min_size=1, max_size=1), schedule=st.sampled_from(PLANNED))
def test_a_run_and_its_simulation_write_one_schedule_at_equal_prices(ranks, schedule: str) -> None:
    packed, planner = packed_of(ranks), planner_of(schedule=schedule)
    (planned,) = planner.plan(packed)
    layers = price_layers(CURVE, MODEL, packed.ranks[0])
    batches = []
    for linear, attention, head in zip(
        layers.linear_ns, layers.attention_ns, layers.head_ns, strict=True
    ):
        layer, last = np.zeros((2, 3, len(TERMS)))
        layer[:, 0] = 1e-9 * linear
        layer[:2, 1] = 1e-9 * attention * np.array([1.0, BACKWARD_OVER_FORWARD])
        last[0, 0] = 3e-9 * head
        batches.append(BatchParts((layer,) * MODEL.layers, np.zeros_like(last), last, 0.0))
    run = run_pipeline(
        batches,
        planner.split,
        Layout(pp=2),
        StepOptions(512, 4, schedule=schedule, virtual=planner.split.stages // 2),
        tokens=layers.tokens.tolist(),
    )
    instructions = run.prices.forward_ns.size * 3
    assert abs(run.timeline.makespan_ns - planned.timeline.makespan_ns) <= instructions
    if (run.prices.of_ops() == planned.prices.of_ops()).all():
        assert run.schedule.digest == planned.schedule.digest
        kept = planned.prices.activation
        assert run.in_flight(kept).tolist() == planned.in_flight(kept).tolist()
