"""Products of a sharded layer add up to the counted work, whatever the layout."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.step.work import LayerWork, head_work, layer_work, published_flop
from equipoise.cost.work import useful_flop
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED, ModelSpec, preset
from equipoise.spec.program.file import read_program
from equipoise.spec.program.stack import Stack

DENSE = preset("llama3-8b")
SPARSE = preset("mixtral-8x7b")
LATENT = PLANNED["deepseek-v3"]


def model_flop(model: ModelSpec, layout: Layout, tokens: int) -> float:
    """Forward and backward products of all ranks of a stage, and of all layers."""
    share = tokens / layout.cp
    forward = head_work(model, layout, share).flop
    for sparse in (False, True):
        layers = model.sparse_layers if sparse else model.layers - model.sparse_layers
        if layers:
            work = layer_work(model, layout, share, sparse=sparse)
            forward += layers * sum(each.flop for each in work.products)
    return 3 * forward * layout.cp * layout.tp


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_products_of_all_ranks_are_the_counted_work(tp: int, cp: int, thousands: int) -> None:
    tokens = 1024 * 8 * thousands
    layout = Layout(tp=tp, cp=cp)
    found = model_flop(DENSE, layout, tokens)
    assert found == pytest.approx(useful_flop(DENSE, tokens, 0))


@pytest.mark.parametrize("model", [SPARSE, preset("qwen2-57b-a14b"), LATENT], ids=str)
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=8, ep=8), Layout(dp=4, tp=2, ep=4, etp=2)])
def test_experts_too(model: ModelSpec, layout: Layout) -> None:
    model = dataclasses.replace(model, shared_gate=False)  # a gate of one column is not counted
    found = model_flop(model, layout, 8192)
    # The narrow vectors of latent attention are made by every tensor-parallel rank.
    repeated = layout.tp > 1 and model.latent is not None
    assert found == pytest.approx(useful_flop(model, 8192, 0), rel=0.03 if repeated else 0.01)


def test_uneven_experts_cost_the_rank_that_has_most() -> None:
    even, uneven = (
        layer_work(SPARSE, Layout(dp=8, ep=8), 4096, sparse=True, expert_skew=skew)
        for skew in (1.0, 1.5)
    )
    rows = [[each.rows for each in work.products if each.grouped] for work in (even, uneven)]
    assert rows[1] == [1.5 * each for each in rows[0]]
    assert even.routed_rows == uneven.routed_rows == 4096 * 2


def test_without_sequence_parallelism_norms_move_whole_rows() -> None:
    divided, whole = (
        layer_work(DENSE, Layout(tp=8), 4096, sparse=False, stack=Stack(sequence_parallel=value))
        for value in (True, False)
    )
    assert whole.moved_bytes - divided.moved_bytes == 4096 * 4096 * 2 * 10 * 7 / 8


def test_biases_of_experts_in_passes_of_their_own_are_counted() -> None:
    def work(name: str, program: str) -> LayerWork:
        stack = read_program(program).stack
        return layer_work(PLANNED[name], Layout(dp=8, ep=8), 4096, sparse=True, stack=stack)

    fused, apart, narrow = (
        work("gpt-oss-120b", f"megatron-bridge{variant}") for variant in ("-fused", "", "-alltoall")
    )
    units = 4 * 4096 * 2880  # hidden units of all rows, and as many elements that come back
    assert apart.moved_bytes - fused.moved_bytes == units * (16 + 28)
    assert narrow.moved_bytes - fused.moved_bytes == units * (16 + 12)
    assert apart.activation_moves - fused.activation_moves == units * 16
    assert apart.expert_moves - fused.expert_moves == units * (16 + 28)
    assert apart.kernels - fused.kernels == 5 + 2 * 16
    plain = work("qwen3-30b-a3b", "megatron-bridge")
    assert plain == work("qwen3-30b-a3b", "megatron-bridge-fused")


def test_the_published_convention_counts_masked_pairs() -> None:
    """2.17e16 a sample is printed for this model (NVIDIA dgxc-benchmarking)."""
    model = preset("llama3-405b")
    assert published_flop(model, np.array([8192])) == pytest.approx(2.17e16, rel=0.01)
    one, two = (published_flop(model, np.array(each)) for each in ([8192], [4096, 4096]))
    assert two < one
    useful = useful_flop(model, 8192, 8192 * 8193 // 2)
    assert useful < one


def test_a_rotation_that_scales_moves_more_where_no_kernel_does_it() -> None:
    model, stack = PLANNED["gpt-oss-120b"], read_program("megatron-core").stack
    moved = layer_work(model, Layout(), 1024, sparse=True, stack=stack).rotation_moves
    fused = dataclasses.replace(stack, scaled_rotation_bytes=0.0)
    assert moved == 6 * layer_work(model, Layout(), 1024, sparse=True, stack=fused).rotation_moves
    other = PLANNED["qwen3-30b-a3b"]
    assert (
        layer_work(other, Layout(), 1024, sparse=True, stack=stack).rotation_moves
        == layer_work(other, Layout(), 1024, sparse=True, stack=fused).rotation_moves
    )
