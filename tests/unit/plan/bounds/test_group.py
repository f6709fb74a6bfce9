"""What the bound of the fullest rank rests on: more bytes never travel in less time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.stage import split_stages
from equipoise.cost.link import Op, collective_s, strided_group
from equipoise.cost.step.request import StepOptions
from equipoise.plan.bounds.group import full_rank, fullest_rank_bound_s, group_bound_s
from equipoise.plan.bounds.kernels import Kernels
from equipoise.plan.space.listing import list_space
from equipoise.plan.space.packs import sort_batches
from equipoise.schedule.pipeline.schedule import place_in_loop, place_in_v
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.program.file import read_program
from equipoise.spec.words import read_model


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("kind", ["h100-sxm", "h200", "a100-80", "a100-40", "v100", "mi250x"])
def test_more_bytes_never_take_less(operation: Op, kind: str) -> None:
    sizes = np.geomspace(1e6, 1e13, 2000)
    for ranks, stride in ((2, 1), (8, 1), (64, 1), (16, 8), (256, 8), (512, 64)):
        group = strided_group(find_cluster(f"{kind}:32768"), ranks, stride)
        seconds = collective_s(operation, sizes, group).s
        assert (np.diff(seconds) >= -1e-12 * seconds[1:]).all(), (ranks, stride)


def test_few_stages_pay_for_what_travels() -> None:
    """One micro-batch on many ranks: parameters and gradients take longer than computing."""
    model = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")
    base, machine = StepOptions(1024, 64), Machine(find_cluster("h100-sxm:64"))
    fixed = {"tp": 1, "cp": 1, "pp": 1, "zero": 1, "recompute": "none", "micro_batch": 1}
    space = list_space(model, 64, base, fixed=fixed)
    assert len(space) == 1
    choice = space.choice(0)
    passes = Kernels(model, machine).group_passes(choice, sort_batches([[1024]]))
    ones = np.ones(1, dtype=np.int64)
    found = fullest_rank_bound_s(model, machine, space, 0 * ones, ones, passes, {})[0]
    price = price_step(model, machine, choice.layout, choice.options)
    assert price.terms["data traffic"] > 0.1 * price.step_s
    assert 0.7 * price.step_s < found <= price.step_s


@pytest.mark.parametrize("recompute", ["none", "every-2", "selective", "full"])
@pytest.mark.parametrize("program", ["torchtitan", "fsdp", "megatron-core"])
def test_the_bound_knows_what_is_not_computed_again(program: str, recompute: str) -> None:
    model = read_model("layers=8,hidden=4096,heads=32,kv_heads=8,vocab=32000")
    base = StepOptions(4096, 64, recompute=recompute, stack=read_program(program).stack)
    machine = Machine(find_cluster("h100-sxm:8"))
    fixed = {"tp": 2, "cp": 1, "pp": 1, "zero": 1, "recompute": recompute, "micro_batch": 1}
    space = list_space(model, 8, base, fixed=fixed)
    choice = space.choice(0)
    passes = Kernels(model, machine).group_passes(choice, sort_batches([[4096]]))
    rows = np.zeros(1, dtype=np.int64)
    found = group_bound_s(model, machine, space, rows, passes, {}, has_documents=False)[0]
    price = price_step(model, machine, choice.layout, choice.options)
    assert 0.9 * price.step_s < found <= price.step_s


@given(
    st.integers(1, 60),
    st.integers(1, 16),
    st.integers(1, 4),
    st.booleans(),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_a_rank_is_full_where_it_is_said_to_be(
    layers: int, ranks: int, virtual: int, in_v: bool, first: float, last: float
) -> None:
    """Against the split itself, with ends of any weight, in layers."""
    virtual = 2 if in_v else virtual
    stages = ranks * virtual
    if stages > layers:
        return
    lacks = 2 + int(first) + int(last)
    sizes = np.array([[ranks], [virtual]])
    held, before = (int(each[0]) for each in full_rank(layers, sizes[0], sizes[1], lacks))
    split = split_stages(np.ones(layers), stages, first_load=first, last_load=last)
    place = place_in_v(ranks) if in_v else place_in_loop(ranks, stages)
    of_rank = np.bincount(place, split.layers, ranks)
    if held:
        full = np.flatnonzero(of_rank == held)
        assert of_rank.max() == held
        assert split.edges[full.max()] >= before


@given(
    st.integers(2, 60),
    st.integers(1, 16),
    st.integers(1, 4),
    st.sampled_from([2, 3, 4]),
    st.floats(0, 0.9),
    st.floats(0.01, 0.95),
    st.floats(0.01, 0.95),
)
def test_no_stage_has_more_where_some_layers_run_again(
    layers: int, ranks: int, virtual: int, every: int, again: float, first: float, last: float
) -> None:
    """What the bounds of time and of memory take of a split that they do not know."""
    stages = ranks * virtual
    each = -(-layers // stages)
    if stages > layers or stages * each < layers + 2:
        return
    runs_again = (np.arange(layers) + 1) % every == 0
    loads = 1.0 + again * runs_again
    split = split_stages(loads, stages, first_load=first, last_load=last)
    assert split.layers.max() == each
    sizes = np.array([[ranks], [virtual]])
    held, before = (int(at[0]) for at in full_rank(layers, sizes[0], sizes[1], 2))
    of_rank = np.bincount(place_in_loop(ranks, stages), split.layers, ranks)
    if held:
        full = int(np.flatnonzero(of_rank == held).max())
        assert split.edges[full] >= before
        mine = np.concatenate(
            [np.arange(*split.edges[at : at + 2]) for at in range(full, stages, ranks)]
        )
        assert runs_again[mine].sum() >= virtual * (each // every)
