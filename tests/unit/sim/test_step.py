"""A priced step: terms add up, more never helps, and nothing that matters is averaged away."""

import dataclasses

import numpy as np
import pytest

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import Residuals
from equipoise.cost.work import pair_flop
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step, run_step
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import WindowSpec
from support.machines import MODEL, SPARSE, h100, options, stack

LAYOUTS = [
    Layout(dp=8),
    Layout(dp=8, zero=3),
    Layout(dp=2, tp=4),
    Layout(dp=2, cp=4),
    Layout(dp=2, tp=2, pp=2),
    Layout(dp=2, cp=2, pp=2),
    Layout(pp=8),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_terms_add_up_to_the_step(layout: Layout, recompute: str) -> None:
    asked = options(recompute=recompute, residuals=Residuals(step_share=0.1))
    price = price_step(MODEL, h100(8), layout, asked)
    assert sum(price.terms.values()) == pytest.approx(price.step_s, rel=1e-6)
    assert min(price.terms.values()) >= 0
    assert price.tokens == 4096 * 16
    assert len(price.busy_s) == len(price.memory_bytes) == layout.pp
    # No device computes faster than its peak.
    assert price.useful_flop / price.step_s / 8 < 989.4e12


def test_recomputation_takes_longer_and_holds_less() -> None:
    prices = {
        name: price_step(MODEL, h100(8), Layout(dp=8), options(recompute=name))
        for name in ("none", "attention", "selective", "every-2", "full")
    }
    assert prices["full"].step_s > prices["selective"].step_s > prices["none"].step_s
    assert prices["full"].step_s > prices["every-2"].step_s > prices["attention"].step_s
    held = {name: price.memory_bytes.max() for name, price in prices.items()}
    assert held["full"] < held["selective"] < held["every-2"] < held["attention"] < held["none"]


@pytest.mark.parametrize("layout", [Layout(dp=8), Layout(dp=4, pp=2), Layout(dp=2, cp=4)])
def test_layers_with_a_window_attend_to_it_alone(layout: Layout) -> None:
    asked, tokens = options(), 4096
    every, some, none = (
        price_step(dataclasses.replace(MODEL, window=window), h100(8), layout, asked)
        for window in (None, WindowSpec(512, 0.75), WindowSpec(tokens, 0.75))
    )
    assert 0.3 < some.terms["attention"] / every.terms["attention"] < 0.8
    assert some.step_s < every.step_s
    pairs = tokens * (tokens + 1) // 2 - (512 * 513 // 2 + (tokens - 512) * 512)
    less = 0.75 * 3 * pair_flop(MODEL) * 16 * pairs
    assert every.useful_flop - some.useful_flop == pytest.approx(less)
    assert some.useful_flop < some.published_flop < every.published_flop
    # A window as long as the text is not one.
    assert none.useful_flop == every.useful_flop and none.published_flop == every.published_flop
    if layout.cp == 1:
        assert none.step_s == pytest.approx(every.step_s, rel=1e-9)


def test_documents_of_other_lengths_and_equal_tokens_take_another_time() -> None:
    even = [[[512] * 8] * 4]
    uneven = [[[4096 - 7 * 64] + [64] * 7] * 4]
    asked = options()
    layout = Layout(dp=8)
    short = price_step(MODEL, h100(8), layout, asked, documents=even)
    long = price_step(MODEL, h100(8), layout, asked, documents=uneven)
    assert short.tokens == long.tokens
    assert long.terms["attention"] > 1.5 * short.terms["attention"]
    assert long.step_s > short.step_s
    assert long.useful_flop > short.useful_flop


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=4), Layout(dp=2, cp=4)], ids=str)
def test_the_slowest_data_parallel_rank_sets_the_step(layout: Layout) -> None:
    light = [[[1024] * 4] * 8] * 2
    heavy = [[[1024] * 4] * 8, [[4096]] * 8]
    prices = [
        price_step(MODEL, h100(8), layout, options(), documents=documents)
        for documents in (light, heavy)
    ]
    assert prices[1].step_s > prices[0].step_s


def test_zero_3_pays_in_every_pass_of_every_micro_batch() -> None:
    """Of the published ZeRO-3: smaller micro-batches, as much work, ever slower."""
    traffic = []
    for micro_batch in (4, 2, 1):
        asked = options(
            step_sequences=512, micro_batch=micro_batch, stack=stack(data_overlap=False)
        )
        price = price_step(MODEL, h100(128), Layout(dp=128, zero=3), asked)
        traffic.append(price.terms["parameter traffic"])
    assert traffic[1] == pytest.approx(2 * traffic[0])
    assert traffic[2] == pytest.approx(4 * traffic[0])
    once = price_step(MODEL, h100(128), Layout(dp=128, zero=1), asked)
    assert "parameter traffic" not in once.terms


def test_zero_2_scatters_gradients_in_every_micro_batch() -> None:
    """Where ZeRO 1 keeps a sum and scatters it once."""
    traffic: dict[int, list[float]] = {1: [], 2: []}
    for micro_batch in (4, 2, 1):
        asked = options(
            step_sequences=512, micro_batch=micro_batch, stack=stack(data_overlap=False)
        )
        for zero, found in traffic.items():
            price = price_step(MODEL, h100(128), Layout(dp=128, zero=zero), asked)
            found.append(price.terms["data traffic"])
    assert traffic[1] == pytest.approx([traffic[1][0]] * 3)
    # One micro-batch is one scatter under both; each further one is one scatter more.
    assert traffic[2][0] == pytest.approx(traffic[1][0])
    first, second = np.diff(traffic[2])
    assert second == pytest.approx(2 * first) and first > 0.3 * traffic[2][0]
    hidden = price_step(MODEL, h100(128), Layout(dp=128, zero=2), options(step_sequences=512))
    assert 0 < hidden.terms["data traffic"] < 0.5 * traffic[2][2]


def test_experts_that_are_not_balanced_take_longer() -> None:
    steps = [
        price_step(SPARSE, h100(8), Layout(dp=8, ep=8), options(expert_skew=skew))
        for skew in (1.0, 1.5, 2.0)
    ]
    assert steps[0].step_s < steps[1].step_s < steps[2].step_s
    for term in ("experts", "expert traffic"):
        assert steps[2].terms[term] > 1.5 * steps[0].terms[term]
    assert steps[2].memory_bytes.max() > steps[0].memory_bytes.max()


def test_a_bubble_is_replayed_not_computed_from_a_formula() -> None:
    """A head that makes the last stage slow makes all wait; no (p - 1) / m knows of it."""
    wide = dataclasses.replace(MODEL, vocab=8 * MODEL.vocab)
    asked = options(stack=stack(split="equal"))
    layout = Layout(dp=2, pp=4)
    run = run_step(wide, h100(8), layout, asked)
    busy = run.price.busy_s + run.price.exposed_s
    formula = busy.mean() * (1 + 3 / 8)
    makespan = 1e-9 * run.slowest.timeline.makespan_ns
    assert makespan > 1.2 * formula
    exact = run_step(wide, h100(8), layout, options())
    assert exact.price.step_s < run.price.step_s
    assert exact.layers[-1] < run.layers[-1]


def test_more_pipeline_stages_of_a_fixed_batch_wait_more() -> None:
    waits = []
    for pp in (2, 4, 8):
        price = price_step(MODEL, h100(8), Layout(pp=pp, dp=8 // pp), options(step_sequences=32))
        waits.append(price.bubble_s.mean() / price.step_s)
    assert waits == sorted(waits)


def test_residuals_scale_what_they_name() -> None:
    layout = Layout(dp=2, tp=4)
    plain = price_step(MODEL, h100(8), layout, options(residuals=Residuals()))
    slow = price_step(MODEL, h100(8), layout, options(residuals=Residuals(products=1.5)))
    assert slow.terms["products"] == pytest.approx(1.5 * plain.terms["products"])
    assert slow.terms["tensor traffic"] == pytest.approx(plain.terms["tensor traffic"])


@pytest.mark.parametrize("name", ["tensor_overlap", "data_overlap"])
def test_overlap_never_costs(name: str) -> None:
    layout = Layout(dp=4, tp=2)
    without, full = (
        price_step(MODEL, h100(8), layout, options(stack=stack(**{name: value})))
        for value in (False, True)
    )
    assert full.step_s < without.step_s


def test_fp8_is_faster_and_the_head_stays() -> None:
    wide, narrow = (
        price_step(MODEL, h100(8), Layout(dp=8), options(precision=precision))
        for precision in ("bf16", "fp8")
    )
    assert 0.5 < narrow.step_s / wide.step_s < 0.9
    assert narrow.terms["attention"] == wide.terms["attention"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"step_sequences": 12},
            LayoutError,
            "A step of 12 sequences does not divide into micro-batches of 1 on 8 data-parallel "
            "ranks. Nearest: 16.",
        ),
        (
            {"micro_batch": 0},
            SpecError,
            "micro_batch is 0. Give a whole number above 0.",
        ),
        (
            {"expert_skew": 0.5},
            SpecError,
            "expert_skew is 0.5. Give the rows of the fullest expert rank over the mean: 1 is "
            "balanced.",
        ),
        (
            {"virtual": 9},
            LayoutError,
            "8 layers cannot fill 1 x 9 stages. Give virtual = 8 or less, or fewer stages.",
        ),
    ],
)
def test_options_that_are_none(changes: dict, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        price_step(MODEL, h100(8), Layout(dp=8), options(**changes))
    assert str(caught.value) == message


def test_more_passes_than_are_replayed_are_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        price_step(MODEL, h100(8), Layout(pp=8), options(step_sequences=800_000))
    assert str(caught.value) == (
        "800,000 micro-batches through 8 stages are 6,400,000 passes, and 1,048,576 at most are "
        "replayed. Give larger micro-batches, more data-parallel ranks, or a step of fewer "
        "sequences."
    )


def test_stages_differ_and_the_fullest_counts() -> None:
    price = price_step(MODEL, h100(8), Layout(pp=8), options())
    assert len(np.unique(np.round(price.memory_bytes))) > 4
    assert sum(price.memory.values()) == pytest.approx(price.memory_bytes.max())
    assert price.fits
    assert not dataclasses.replace(price, capacity_bytes=1).fits


def test_tensor_parallelism_over_nodes_loses_to_stages() -> None:
    across = price_step(MODEL, h100(16), Layout(tp=16), options())
    within = price_step(MODEL, h100(16), Layout(tp=8, pp=2), options())
    assert across.terms["tensor traffic"] > 1.5 * within.terms["tensor traffic"]
    assert within.step_s < across.step_s


def test_slower_networks_take_longer() -> None:
    """The order that Holmes measures: InfiniBand, RoCE, Ethernet."""
    steps = []
    for name in ("ib-ndr", "roce-200", "ethernet-25"):
        cluster = find_cluster("h100-sxm:32")
        slower = dataclasses.replace(cluster.classes[0], nic=find_link(name))
        machine = Machine(dataclasses.replace(cluster, classes=(slower,)))
        steps.append(price_step(MODEL, machine, Layout(dp=32), options(step_sequences=32)).step_s)
    assert steps == sorted(steps)
    assert steps[2] > 1.2 * steps[0]


def test_context_parallelism_is_priced_where_a_sequence_is_long() -> None:
    """One sequence a step: sharing it is of use when it is long, and of little when it is not."""
    gains = []
    for tokens in (2048, 262_144):
        asked = options(context_tokens=tokens, step_sequences=1, recompute="full")
        alone = price_step(MODEL, h100(1), Layout(), asked).step_s
        gains.append(alone / price_step(MODEL, h100(8), Layout(cp=8), asked).step_s)
    assert 5 < gains[1] < 8.5
    assert gains[0] < 0.7 * gains[1]


def test_keys_repeated_for_every_head_travel_and_cost_more() -> None:
    layout = Layout(cp=8)
    asked = options(context_tokens=65_536, step_sequences=1, context_strategy="all-gather")
    plain = price_step(MODEL, h100(8), layout, asked)
    repeated = price_step(
        MODEL, h100(8), layout, dataclasses.replace(asked, stack=stack(repeats_keys=True))
    )
    assert repeated.terms["context traffic"] > plain.terms["context traffic"]
    assert repeated.step_s > plain.step_s
