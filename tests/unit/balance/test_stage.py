"""Stage splits against all splits tried one by one; prices that add up; what is refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from equipoise.balance.packing.divided import macro_units
from equipoise.balance.packing.pack import pack_step
from equipoise.balance.stage import (
    LayerPrices,
    price_layers,
    price_stages,
    split_model,
    split_stages,
)
from equipoise.base.errors import FitError, LayoutError
from equipoise.cost.curve import counted_curve
from equipoise.nn.loss import head_loss
from equipoise.schedule.pipeline.check import check_pipeline
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import PackSpec


def all_edges(layers: int, stages: int, empty_ends: bool):
    for inner in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        edges = np.array([0, *inner, layers])
        least = np.ones(stages, dtype=np.int64)
        if empty_ends:
            least[[0, -1]] = 0
        if (np.diff(edges) >= least).all():
            yield edges


def sums(values: np.ndarray, edges: np.ndarray, first: int, last: int) -> np.ndarray:
    found = np.array([values[i:j].sum() for i, j in itertools.pairwise(edges)], dtype=np.float64)
    found[0] += first
    found[-1] += last
    return found


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=7),
    st.integers(1, 4),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
    st.booleans(),
    st.data(),
)
def test_the_best_of_all_splits(loads, stages: int, ends, empty_ends: bool, data) -> None:
    loads = np.array(loads)
    count = len(loads)
    sizes = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    bound = data.draw(st.one_of(st.none(), st.integers(0, 40)))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=stages, max_size=stages))
    possible = {}
    for edges in all_edges(count, stages, empty_ends):
        held = sums(sizes, edges, 3, 5)
        if bound is None or (held <= bound).all():
            times = sums(loads, edges, *ends) / speeds
            possible[tuple(edges.tolist())] = (times.max(), (times**2).sum())
    options = {
        "first_load": ends[0],
        "last_load": ends[1],
        "speeds": speeds,
        "layer_bytes": sizes,
        "first_bytes": 3,
        "last_bytes": 5,
        "stage_bytes": bound,
        "empty_ends": empty_ends,
    }
    if not possible:
        with pytest.raises((FitError, LayoutError)):
            split_stages(loads, stages, **options)
        return
    split = split_stages(loads, stages, **options)
    assert possible[tuple(split.edges.tolist())] == min(possible.values())
    assert split.loads.tolist() == (sums(loads, split.edges, *ends) / speeds).tolist()
    assert split.stages == stages
    assert split.skew >= 1 - 1e-12


def test_the_head_takes_the_place_of_layers() -> None:
    model = preset("llama3-8b")
    curve = counted_curve(model)
    batches = packed(model, [1500, 900, 700, 400])
    split = split_model(price_layers(curve, model, batches), model, 8)
    assert split.layers.sum() == 32
    assert split.layers[-1] < split.layers[0]
    prices = price_layers(curve, model, batches)
    assert split.loads.max() < 4 * prices.layer_load + prices.head_load


def packed(model, lengths, policy="by-work", context=2048):
    pieces = np.array([[d, 0, n] for d, n in enumerate(lengths)])
    spec = PackSpec(context_tokens=context, max_tokens=2 * context, policy=policy)
    return pack_step(pieces, spec, 1, counted_curve(model)).ranks[0]


def test_unequal_devices_get_unequal_runs() -> None:
    assert split_stages(np.ones(12), 3, speeds=[2, 1, 1]).layers.tolist() == [6, 3, 3]


def test_prices_of_stages_are_the_curves_price_of_the_micro_batch() -> None:
    model = preset("llama3-8b")
    curve = counted_curve(model)
    batches = packed(model, [1900, 300, 512, 64, 1024, 80], context=1024)
    layers = price_layers(curve, model, batches)
    prices = price_stages(split_model(layers, model, 4), layers, hop_ns=10)
    total = prices.forward_ns + prices.input_ns + prices.weight_ns
    wanted = [curve.slice_ns(b.history_tokens, b.history_tokens + b.doc_tokens) for b in batches]
    assert total.sum(axis=0) == pytest.approx([int(each.sum()) for each in wanted], rel=1e-3)
    assert (prices.activation.sum(axis=0) == [32 * batch.tokens for batch in batches]).all()
    split = split_model(layers, model, 4)
    again = price_stages(split, layers, recompute="full")
    head = np.zeros_like(prices.forward_ns)
    head[-1] = np.rint(3 * layers.head_ns)
    assert np.abs(again.input_ns - prices.input_ns - prices.forward_ns + head).max() <= 2
    half = price_stages(split, layers, recompute="every-2").input_ns - prices.input_ns
    assert np.abs(2 * half - again.input_ns + prices.input_ns).max() <= 3
    parts = [price_stages(split, layers, recompute=r).input_ns for r in ("attention", "selective")]
    assert np.abs(sum(parts) - again.input_ns - prices.input_ns).max() <= 3


def test_the_heads_gradients_are_priced_where_its_loss_makes_them() -> None:
    tokens, width, words = 24, 8, 40
    # In bf16, as the counter knows no product that is added in place.
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(words, width, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        loss = head_loss(x, head, torch.zeros(tokens, dtype=torch.int64))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    made = [forward.get_total_flops(), backward.get_total_flops()]
    product = 2 * tokens * width * words
    assert made == [3 * product, 0]
    alone = LayerPrices(np.zeros(1), np.zeros(1), np.array([float(product)]), np.array([tokens]))
    prices = price_stages(split_stages([1], 2, empty_ends=True), alone)
    assert prices.forward_ns.tolist() == [[0], [made[0]]]
    assert (prices.input_ns + prices.weight_ns).tolist() == [[0], [made[1]]]


def test_from_documents_to_a_schedule() -> None:
    model = preset("llama3-8b")
    curve = counted_curve(model)
    lengths = [6000, 300, 512, 64, 1024, 80, 900]
    batches = packed(model, lengths, "divided-in-time", 1024)
    units = macro_units(batches)
    assert any(stop - first > 1 for first, stop in units)
    layers = price_layers(curve, model, batches)
    split = split_model(layers, model, 4)
    prices = price_stages(split, layers)
    for strategy in ("gpipe", "1f1b", "auto"):
        schedule = write_pipeline(strategy, prices, ranks=4, units=units)
        check_pipeline(schedule)
        assert replay_pipeline(schedule, prices).makespan_ns > 0


def test_too_few_layers() -> None:
    with pytest.raises(LayoutError) as caught:
        split_stages([1, 1, 1], 4)
    assert str(caught.value) == (
        "3 layers cannot fill 4 stages. Take pp x chunks = 3 or less, or a deeper model."
    )
    split = split_stages([1, 1, 1], 4, first_load=1, last_load=1, empty_ends=True)
    assert split.edges.tolist() == [0, 0, 1, 2, 3]


def test_no_split_that_fits() -> None:
    with pytest.raises(FitError) as caught:
        split_stages(
            np.ones(8), 2, layer_bytes=2**30, first_bytes=2**30, stage_bytes=[4 * 2**30, 2**31]
        )
    assert str(caught.value) == (
        "No split of 8 layers into 2 stages fits: the nearest has 5 layers on stage 0, which need "
        "6.0 GiB of 4.0 GiB. Take more stages, a schedule that holds less, or recomputation."
    )


def test_loads_and_speeds_that_are_none() -> None:
    with pytest.raises(LayoutError) as caught:
        split_stages([1, -2], 2)
    assert str(caught.value) == "A layer's load is -2. Loads are numbers of 0 or more."
    with pytest.raises(LayoutError) as caught:
        split_stages([1, 2], 2, speeds=[1, 0])
    assert str(caught.value) == ("Speeds 1, 0 do not suit 2 stages. Give each a speed above 0.")


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_layers_that_are_alike_are_split_as_any_others(layers: int, stages: int, ends) -> None:
    layers = max(layers, stages)
    first, last = ends
    asked = {"first_load": first, "last_load": last}
    alike = split_stages([8] * layers, stages, **asked)
    any_others = split_stages([8] * layers, stages, **asked, stage_bytes=1)
    assert alike.edges.tolist() == any_others.edges.tolist()
    assert alike.loads.tolist() == any_others.loads.tolist()
