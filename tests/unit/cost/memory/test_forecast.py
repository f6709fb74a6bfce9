"""The memory forecast: its terms add up, and each moves the way that memory moves."""

import dataclasses
import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.memory.forecast import MemoryForecast, forecast_memory
from equipoise.cost.memory.overhead import DeviceOverhead
from equipoise.cost.memory.share import StageShare, whole_model
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.spec.run.spec import Recompute

MODEL = preset("7m")
SPARSE = preset("moe-3m")
NONE = DeviceOverhead()


def forecast(model: ModelSpec = MODEL, layout: Layout | None = None, **changes) -> MemoryForecast:
    given_ = {"tokens": 4096, "precision": "fp32", "recompute": "none"} | changes
    return forecast_memory(model, layout or Layout(dp=2), **given_)


@pytest.mark.parametrize(
    ("zero", "precision", "recompute"),
    list(itertools.product((0, 1, 2, 3), ("fp32", "bf16"), get_args(Recompute))),
)
def test_terms_add_up_to_the_total_and_none_is_negative(zero, precision, recompute) -> None:
    found = forecast(layout=Layout(dp=2, zero=zero), precision=precision, recompute=recompute)
    assert found.total_bytes == sum(found.terms.values())
    assert all(isinstance(value, int) and value >= 0 for value in found.terms.values())
    counted = forecast(
        layout=Layout(dp=2, zero=zero), precision=precision, recompute=recompute, overhead=NONE
    )
    assert counted.total_bytes == counted.counted_bytes <= found.total_bytes


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from((0, 1, 2, 3)))
def test_more_tokens_never_need_less(few: int, more: int, zero: int) -> None:
    few, more = sorted((few, more))
    layout = Layout(dp=2, zero=zero)
    assert (
        forecast(layout=layout, tokens=few).total_bytes
        <= forecast(layout=layout, tokens=more).total_bytes
    )


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_higher_stage_holds_less(ranks: int) -> None:
    held = ("parameters", "gathered parameters", "gradients", "optimizer")
    terms = [forecast(layout=Layout(dp=ranks, zero=zero)).terms for zero in (0, 1, 2, 3)]
    totals = [sum(each[name] for name in held) for each in terms]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_more_ranks_never_need_more(zero: int) -> None:
    totals = [forecast(layout=Layout(dp=n, zero=zero)).total_bytes for n in (1, 2, 4, 16)]
    assert totals == sorted(totals, reverse=True)


def test_without_sharding_ranks_change_nothing() -> None:
    assert forecast(layout=Layout(zero=0)).terms == forecast(layout=Layout(dp=8, zero=0)).terms


def test_zero_shards_over_data_and_context_ranks_and_not_over_copies() -> None:
    of_two = forecast(layout=Layout(dp=2, zero=3)).terms
    assert forecast(layout=Layout(dp=1, cp=2, zero=3)).terms == of_two
    assert forecast(layout=Layout(dp=4, cp=2, zero=3, replicas=4)).terms == of_two


def test_recomputation_and_narrow_numbers_need_less() -> None:
    kept = {each: forecast(recompute=each).terms["activations"] for each in get_args(Recompute)}
    order = ("none", "attention", "every-4", "every-2", "selective", "full")
    assert sorted(order, key=lambda each: -kept[each]) == list(order)
    saved = kept["none"] - kept["every-4"]  # by one layer of six
    assert [kept["none"] - kept[each] for each in ("every-3", "every-2")] == [2 * saved, 3 * saved]
    assert forecast(precision="bf16").total_bytes < forecast().total_bytes


def test_master_weights_and_moments_are_twelve_bytes_a_parameter_whatever_the_precision() -> None:
    for precision in ("fp32", "bf16"):
        terms = forecast(layout=Layout(zero=0), precision=precision).terms
        assert terms["parameters"] + terms["optimizer"] == 12 * MODEL.params


@pytest.mark.parametrize("model", [MODEL, SPARSE, dataclasses.replace(MODEL, tied=True)])
@pytest.mark.parametrize("zero", [0, 1])
def test_stages_of_a_pipeline_hold_the_model_once(model: ModelSpec, zero: int) -> None:
    layout = Layout(dp=2, pp=2, zero=zero)
    first = StageShare((0,), has_head=False)
    last = StageShare(tuple(range(1, model.layers)), embeds=False)
    parts = [forecast(model, layout, stage=stage, overhead=NONE).terms for stage in (first, last)]
    whole = forecast(model, layout, overhead=NONE).terms
    twice = model.hidden * model.vocab if model.tied else 0  # a tied table is on both
    for name, width in (("gathered parameters", 4), ("gradients", 4)):
        assert sum(part[name] for part in parts) == whole[name] + width * twice
    assert parts[0]["loss"] == 0
    assert parts[1]["loss"] == whole["loss"]


def test_what_is_in_flight_is_kept() -> None:
    one, three = (
        forecast(overhead=NONE, stage=dataclasses.replace(whole_model(MODEL), kept_micro_batches=n))
        for n in (1, 3)
    )
    assert three.terms["activations"] == 3 * one.terms["activations"]
    assert three.terms["working space"] == one.terms["working space"]


def test_tensor_ranks_share_weights_streams_and_words() -> None:
    model = preset("llama3-8b")
    one, two, eight = (
        forecast(model, Layout(tp=n, zero=0), overhead=NONE).terms for n in (1, 2, 8)
    )
    norms = 4 * (2 * model.layers + 1) * model.hidden
    for other, ranks in ((two, 2), (eight, 8)):
        assert ranks * (other["parameters"] - norms) == one["parameters"] - norms
        # Norms' outputs are kept whole.
        whole = 4096 * 4 * 2 * model.hidden * model.layers
        angles = 4096 * (model.head_width * 4 + 32)
        shared = other["activations"] - whole - angles
        assert ranks * shared == one["activations"] - whole - angles


def test_received_keys_and_values_are_kept_by_each_layer_that_does_not_attend_again() -> None:
    def more(recompute: str) -> int:
        with_, without = (
            forecast(recompute=recompute, received_values=n, overhead=NONE).total_bytes
            for n in (10, 0)
        )
        return with_ - without

    assert [more(each) for each in ("none", "selective", "every-2", "attention", "full")] == [
        40 * MODEL.layers,
        40 * MODEL.layers,
        40 * (MODEL.layers // 2 + 1),  # and the one that runs again
        40,
        40,
    ]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_on_other_ranks_are_not_held(zero: int) -> None:
    totals = [forecast(SPARSE, Layout(dp=8, zero=zero, ep=n)).total_bytes for n in (1, 2, 8)]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 3


def test_ranks_that_share_experts_hold_their_part_alone() -> None:
    whole, half = (forecast(SPARSE, Layout(dp=8, zero=0, ep=n)).terms for n in (1, 2))
    away = SPARSE.sparse_layers * 4 * SPARSE.expert_params
    for name, width in (
        ("parameters", 4),
        ("gathered parameters", 4),
        ("gradients", 4),
        ("optimizer", 8),
    ):
        assert whole[name] - half[name] == width * away
    assert whole["activations"] == half["activations"]
    # With ZeRO each weight and moment is on one rank anyway.
    sharded = [forecast(SPARSE, Layout(dp=8, zero=1, ep=n)).terms for n in (1, 2)]
    assert sharded[0]["optimizer"] == sharded[1]["optimizer"]


def test_a_layer_with_experts_keeps_rows_and_not_all_experts() -> None:
    more = dataclasses.replace(SPARSE, experts=16)
    kept, of_more = (forecast(model).terms["activations"] for model in (SPARSE, more))
    assert of_more - kept == 4096 * SPARSE.layers * 8 * 4  # a score of each expert
    first = dataclasses.replace(SPARSE, dense_layers=1)
    dense = dataclasses.replace(SPARSE, experts=0)
    of_first, of_dense = (forecast(model).terms["activations"] for model in (first, dense))
    assert kept - of_first == (kept - of_dense) // SPARSE.layers


def test_ranks_that_share_hidden_units_hold_less_and_keep_the_rows_of_all() -> None:
    whole, parts = (forecast(SPARSE, Layout(dp=2, zero=0, etp=n)).terms for n in (1, 2))
    away = SPARSE.sparse_layers * 4 * SPARSE.expert_params  # as many as with half of the experts
    assert whole["parameters"] - parts["parameters"] == 4 * away
    rows = 4096 * SPARSE.sparse_layers * SPARSE.top_k * SPARSE.hidden
    assert parts["activations"] - whole["activations"] == 4 * rows


def test_what_a_device_takes_is_given_from_outside() -> None:
    def taken(**changes) -> int:
        layout = Layout(dp=2, zero=3)
        with_ = forecast(layout=layout, overhead=overhead, **changes)
        counted = forecast(layout=layout, overhead=NONE, precision=with_precision(changes))
        assert with_.counted_bytes == counted.counted_bytes
        return with_.terms["device"]

    def with_precision(changes: dict) -> str:
        return changes.get("precision", "fp32")

    terms = forecast(layout=Layout(dp=2, zero=3), overhead=NONE).terms
    moved = ("loss", "working space", "communication", "gathered parameters")  # with ZeRO 3
    passing = sum(terms[name] for name in moved)
    overhead = DeviceOverhead(fixed_bytes=1000)
    assert taken() == 1000
    overhead = DeviceOverhead(kept_share=0.5)
    assert taken() == terms["activations"] // 2
    assert taken(micro_batches=1) == 0
    overhead = DeviceOverhead(passing_share=0.5)
    assert taken(micro_batches=1) == passing // 2
    overhead = DeviceOverhead(size_bytes=100)
    assert taken(sizes=7) == 0
    assert taken(sizes=7, precision="bf16") == 700


def test_zero_3_holds_small_layers_whole() -> None:
    """Of a pipeline none; of the 7M decoder, whose layers are beyond the bound, one at a time."""
    model = preset("2m")
    layer = model.count_layer(sparse=False, active=False) + 2 * model.hidden
    layers = model.layers * layer
    tables = model.params - layers
    small = forecast(model, Layout(dp=2, zero=3)).terms
    assert small["gathered parameters"] == 4 * model.params
    # Gradients of layers whole until the end of the step, of the tables half, and one anew.
    anew = model.hidden * model.vocab
    assert small["gradients"] == 4 * (layers + tables // 2 + anew)
    stage = StageShare((0, 1), embeds=False, has_head=False)
    piped = forecast(model, Layout(dp=2, pp=2, zero=3), stage=stage).terms
    assert piped["gathered parameters"] == 4 * layer
    assert piped["gradients"] == 4 * layer  # half of each
    large = forecast(layout=Layout(dp=2, zero=3)).terms
    assert large["gathered parameters"] < 4 * MODEL.params / 2
