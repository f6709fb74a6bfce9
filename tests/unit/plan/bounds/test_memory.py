"""Memory of the fullest rank: layers, what is in flight, and bytes, against what is replayed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.stage import split_stages
from equipoise.base.errors import LayoutError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.bounds.kernels import Kernels
from equipoise.plan.bounds.memory import even_layers, least_in_flight, stage_bound_bytes
from equipoise.plan.space.columns import Space
from equipoise.plan.space.listing import list_space
from equipoise.plan.space.packs import sort_batches
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import count_in_flight
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.words import read_model

MODEL = read_model("layers=14,hidden=2048,heads=16,kv_heads=8,vocab=8000")
MACHINE = Machine(find_cluster("h100-sxm:16"))
SPACE = list_space(MODEL, 16, StepOptions(4096, 32))


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 0.98), st.floats(0.01, 0.98))
def test_layers_are_those_of_the_split(layers: int, stages: int, first: float, last: float) -> None:
    if stages > layers or first == last:
        return
    split = split_stages(np.full(layers, 1.0), stages, first_load=first, last_load=last)
    found = even_layers(layers, stages, is_last_heavier=last > first)
    assert found.tolist() == split.layers.tolist()


@settings(deadline=None)
@given(
    st.sampled_from([name for name, each in SCHEDULES.items() if each.ahead or each.order]),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 30),
    st.integers(0, 2**31),
)
def test_what_is_in_flight_is_what_is_replayed(
    schedule: str, ranks: int, virtual: int, micro_batches: int, seed: int
) -> None:
    virtual = SCHEDULES[schedule].most_stages or virtual
    draw = np.random.default_rng(seed)
    layers = draw.integers(1, 4, ranks * virtual)
    # Heaviest first, as packers have them: of others a part is looked at.
    tokens = np.sort(draw.integers(1, 100, micro_batches))[::-1]
    shape = len(layers), micro_batches
    prices = make_prices(*draw.integers(1, 100, (3, *shape)), hop_ns=1)
    try:
        written = write_pipeline(schedule, prices, ranks=ranks)
    except LayoutError:
        return
    held = count_in_flight(written, layers[:, None] * tokens)
    found = least_in_flight(schedule, ranks, layers, tokens)
    is_whole = schedule in ("1f1b", "interleaved", "dualpipe-v")
    exact = held.peak if is_whole else held.peak_without_stash
    assert (found <= exact).all()
    assert found.max() == exact.max()


def has_heavier_head() -> bool:
    passes = Kernels(MODEL, MACHINE).group_passes(SPACE.choice(0), sort_batches([[4096]]))
    assert passes.lacks == 2
    return bool(passes.last.sum() > passes.first.sum())


@settings(deadline=None, max_examples=30)
@given(st.integers(0, len(SPACE) - 1), st.one_of(st.none(), st.integers(0, 2**31)))
def test_no_more_than_the_price_finds(row: int, seed: int | None) -> None:
    choice = SPACE.choice(row)
    count = choice.options.count_micro_batches(choice.layout)
    size = 4096 * choice.options.micro_batch
    tokens = np.full(count, size)
    if seed is not None:
        tokens = np.sort(np.random.default_rng(seed).integers(size // 2, size, count))[::-1]
    documents = [[[each] for each in tokens.tolist()]]
    try:
        price = price_step(MODEL, MACHINE, choice.layout, choice.options, documents=documents)
    except LayoutError:
        return
    given_tokens = tokens if seed is not None else None
    found = stage_bound_bytes(
        MODEL,
        SPACE,
        np.array([row]),
        tokens=given_tokens,
        is_last_heavier=has_heavier_head(),
    )[0]
    truth = float(price.memory_bytes.max())
    assert found <= truth
    if choice.options.recompute.startswith("every"):
        return
    if choice.options.schedule in ("1f1b", "interleaved", "dualpipe-v"):
        assert found == pytest.approx(truth)


def test_nothing_is_said_of_what_is_not_known() -> None:
    rows = np.flatnonzero(SPACE["pp"] == 2)[:5]
    offloaded = Space(SPACE.columns | {"offload": np.ones(len(SPACE), np.int64)}, SPACE.base)
    found = stage_bound_bytes(MODEL, offloaded, rows, tokens=None, is_last_heavier=True)
    assert found.tolist() == [0.0] * len(rows)
