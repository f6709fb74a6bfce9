"""Small steps' records put together: known parts come back."""

import dataclasses
from typing import get_args

import pytest

from equipoise.balance.context.plan import plan_context
from equipoise.base.errors import SpecError
from equipoise.cost.curve import LoadCurve
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import LinkPrice
from equipoise.sim.here import count_tiles, replay_core
from equipoise.spec.device.parts import DocPoint, Measured, Way
from equipoise.spec.model.presets import preset
from equipoise.spec.run.load import read_run
from equipoise.train.calibrate.parts import ways_of
from equipoise.train.calibrate.parts_plan import DEPTHS, PartsPlan, StepRecord, WaySamples
from equipoise.train.calibrate.parts_table import context_points, document_points, way_table

PLAN = PartsPlan(preset("2m"), "fp32", 1280, 1024)
DOCUMENTS = document_points(
    [WaySamples({}, {t: ([1e-9 * t * t], [3e-9 * t * t]) for t in PLAN.doc_tokens})] * 2
)


def whole_record(depth: int) -> StepRecord:
    """A layer's forward takes 2 us a token and a head's 5; backwards twice that."""
    record = StepRecord()
    for at, size in enumerate((PLAN.sizes[1], *PLAN.sizes)):
        core = size / 64 * 64**2 * 1e-9
        forward = depth * (2e-6 * size + core) + 5e-6 * size
        extra = 1e-3 * depth + 4e-3 if at == 0 else 0.0
        record.spans["forward", -1, at] = [forward + extra] * 4
        record.spans["backward", -1, at] = [depth * (4e-6 * size + 3 * core) + 10e-6 * size] * 4
    record.spans["reduce", -1, -1] = [2e-3 * depth + 1e-3] * 4
    record.spans["optimizer", -1, -1] = [3e-3 * depth + 1e-3] * 4
    record.spans["wait", -1, -1] = [1.0] * 4
    told = [v[0] for (name, _, _), v in record.spans.items() if name != "wait"]
    record.step_s = [sum(told) + 7e-3] * 4
    return record


def test_whole_decoders_give_their_parts_back() -> None:
    records = [WaySamples({(depth, "1f1b"): whole_record(depth) for depth in DEPTHS})] * 2
    found = way_table("zero-1", PLAN, records, DOCUMENTS)
    assert [point.tokens for point in found.sizes] == [128, 1024, 1280]
    for point in found.sizes:
        assert point.layer.forward_s.mid == pytest.approx(2e-6 * point.tokens)
        assert point.layer.backward_s.mid == pytest.approx(4e-6 * point.tokens)
        assert point.last.forward_s.mid == pytest.approx(5e-6 * point.tokens)
        assert point.layer.weight_s.mid == point.first.forward_s.mid == 0
    layer, last = found.layer, found.last
    assert [layer.gather_s.mid, last.gather_s.mid] == pytest.approx([1e-3, 4e-3])
    assert [layer.reduce_s.mid, last.reduce_s.mid] == pytest.approx([2e-3, 1e-3])
    assert [layer.optimizer_s.mid, last.optimizer_s.mid] == pytest.approx([3e-3, 1e-3])
    assert found.step_s.mid == pytest.approx(7e-3)


def stage_record(depth: int, stage: int, schedule: str) -> StepRecord:
    record = StepRecord(step_s=[1.0] * 4, began=[10.0] * 4, ended=[10.9] * 4)
    for at, size in enumerate((PLAN.sizes[1], *PLAN.sizes)):
        core = size / 64 * 64**2 * 1e-9
        end = 1e-6 * size if stage == 0 else 5e-6 * size
        forward = depth * (2e-6 * size + core) + end
        whole = 2 * forward + depth * core
        record.spans["forward", stage, at] = [forward] * 4
        if schedule == "1f1b":
            record.spans["backward", stage, at] = [whole] * 4
        else:
            record.spans["backward-input", stage, at] = [whole - depth * 1e-6 * size] * 4
            record.spans["backward-weight", stage, at] = [depth * 1e-6 * size] * 4
    record.spans["reduce", -1, -1] = [1e-2] * 4
    record.spans["optimizer", -1, -1] = [1e-2 * depth + 1e-2] * 4
    return record


def test_stages_give_their_parts_back() -> None:
    records = [
        WaySamples({(d, s): stage_record(d, stage, s) for d in DEPTHS for s in ("1f1b", "zb-h1")})
        for stage in range(2)
    ]
    found = way_table("pipeline", PLAN, records, DOCUMENTS)
    for point in found.sizes:
        assert point.layer.forward_s.mid == pytest.approx(2e-6 * point.tokens)
        assert point.layer.backward_s.mid == pytest.approx(4e-6 * point.tokens)
        assert point.layer.input_s.mid == pytest.approx(3e-6 * point.tokens)
        assert point.layer.weight_s.mid == pytest.approx(1e-6 * point.tokens)
        assert point.first.forward_s.mid == pytest.approx(1e-6 * point.tokens)
        assert point.last.backward_s.mid == pytest.approx(10e-6 * point.tokens)
        assert point.last.weight_s.mid == pytest.approx(0, abs=1e-12)
    assert found.layer.reduce_s.mid == 0 and found.first.reduce_s.mid == pytest.approx(1e-2)
    assert found.step_s.mid == pytest.approx(1.0 - 0.9 - 1e-2 - (sum(DEPTHS) + 2) * 5e-3)


def test_what_attention_takes_beyond_its_replay_comes_back() -> None:
    link = LinkPrice(1e-4, 1e9)
    curve = LoadCurve(
        0,
        0,
        tuple(map(float, PLAN.doc_tokens)),
        tuple(float(t * t) for t in PLAN.doc_tokens),
        0,
        True,
    )
    documents = tuple(
        DocPoint(t, *(Measured(s, s, s) for s in (1e-9 * t * t, 1e-9 * t * t)))
        for t in PLAN.doc_tokens
    )
    timed = {}
    for at, lengths in enumerate(PLAN.packs):
        schedule = plan_context(lengths, 2, "needed-kv", heads=4, kv_heads=2).schedule
        core = replay_core(schedule, curve, curve, link, Wire(32, 4)).sum(axis=1)
        tiles = count_tiles(schedule)
        timed["needed-kv", at] = (
            [core[0] + 1e-3 + 1e-5 * tiles],
            [core[1] + 2e-3 + 3e-5 * tiles],
        )
    (found,) = context_points(PLAN, 2, [[WaySamples({}, {}, timed)] * 2], documents, link)
    assert found.strategy == "needed-kv"
    assert [
        found.forward_call_s,
        found.forward_tile_s,
        found.backward_call_s,
        found.backward_tile_s,
    ] == pytest.approx([1e-3, 1e-5, 2e-3, 3e-5], rel=1e-6)


def test_ways_follow_the_model() -> None:
    assert ways_of(PLAN.model, 2) == get_args(Way)
    assert ways_of(PLAN.model, 1) == get_args(Way)[:4]
    odd = dataclasses.replace(PLAN.model, heads=3, kv_heads=1)
    assert "tensor" not in ways_of(odd, 2)


def test_sizes_and_lengths_of_a_run_are_covered() -> None:
    assert PLAN.sizes == (128, 1024, 1280) and PLAN.doc_tokens == (16, 64, 256, 1024)
    short = PartsPlan(preset("2m"), "fp32", 100, 100)
    assert short.sizes == (128,) and short.doc_tokens == (16, 64, 100)


def test_a_run_in_float8_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        PartsPlan.for_run(read_run(None, [("train.precision", "fp8")]))
    assert str(caught.value) == (
        'train.precision = "fp8" has no curves on cores: equipoise calibrate times fp32 and bf16. '
        "Set one of them, or calibrate without a run.toml."
    )
