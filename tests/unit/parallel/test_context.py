"""The executor with all ranks in one process: any schedule equals one rank, bit for bit twice."""

import doctest
import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import FaultError, LayoutError
from equipoise.nn.attention import attend_documents
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.parallel.context.drive import drive_together
from equipoise.parallel.context.plan import ContextPlan, plan_context, share_tokens
from equipoise.parallel.context.steps import Await, Parcel, Post
from equipoise.schedule.attention_count import Wire, count_attention
from equipoise.schedule.attention_strategies import STRATEGIES

SHARDINGS = ["contiguous", "head-tail", "head-tail-document", "by-work", "mixed"]
WIDTH = 8

plans = st.builds(
    lambda lengths, ranks, strategy, sharding, heads, tile: plan_context(
        lengths,
        ranks,
        strategy,
        heads=heads[0],
        kv_heads=heads[1],
        sharding=sharding,
        tile=tile,
        ranks_per_node=2 if ranks % 2 == 0 else 1,
    ),
    st.lists(st.integers(0, 50), max_size=5),
    st.integers(1, 6),
    st.sampled_from(list(STRATEGIES)),
    st.sampled_from(SHARDINGS),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (9, 3), (6, 2), (5, 5)]),
    st.sampled_from([1, 4, 16]),
)


def tensors(plan: ContextPlan, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    schedule = plan.schedule
    draw = torch.Generator().manual_seed(schedule.tokens)
    heads = (schedule.heads, schedule.kv_heads, schedule.kv_heads, schedule.heads)
    return [
        torch.randn(schedule.tokens, each, WIDTH, dtype=torch.float64, generator=draw).to(dtype)
        for each in heads
    ]


def run(plan: ContextPlan, given_tensors, sent=None) -> list[torch.Tensor]:
    """Output and gradients of all ranks together."""
    *leaves, grad_o = given_tensors
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend_in_one_process(*leaves, plan, sent)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_o)]


def one_rank(plan: ContextPlan, given_tensors) -> list[torch.Tensor]:
    *leaves, grad_o = (x.double() for x in given_tensors)
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend_documents(*leaves, plan.schedule.doc_tokens.tolist())
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_o)]


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest error of the output, or of a gradient, each over its own scale.

    One scale for the three gradients: those of a one-token document's q and k are exactly 0.
    """
    if not wanted[0].numel():
        return 0.0
    errors = [float((x.double() - y).abs().max()) for x, y in zip(found, wanted, strict=True)]
    scale = max(float(y.abs().max()) for y in wanted[1:])
    return max(errors[0] / float(wanted[0].abs().max()), *(e / scale for e in errors[1:]))


@given(plans)
def test_any_schedule_equals_one_rank_in_fp64(plan) -> None:
    given_tensors = tensors(plan)
    assert worst(run(plan, given_tensors), one_rank(plan, given_tensors)) <= 1e-12


@given(plans)
@settings(max_examples=50)
def test_any_schedule_equals_one_rank_in_fp32(plan) -> None:
    given_tensors = tensors(plan, torch.float32)
    assert worst(run(plan, given_tensors), one_rank(plan, given_tensors)) <= 3e-6


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_sums_are_not_in_bf16_so_error_does_not_grow_with_ranks(strategy: str) -> None:
    errors = []
    for ranks in (1, 8):
        plan = plan_context(
            [400, 60, 7],
            ranks,
            strategy,
            heads=4,
            kv_heads=2,
            sharding="head-tail-document",
            ranks_per_node=max(1, ranks // 2),
        )
        given_tensors = tensors(plan, torch.bfloat16)
        errors.append(worst(run(plan, given_tensors), one_rank(plan, given_tensors)))
    assert errors[1] <= 1.5 * errors[0] <= 0.02


@given(plans, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(max_examples=50)
def test_bytes_are_those_of_the_schedule(plan, dtype: torch.dtype) -> None:
    sent = np.zeros((plan.schedule.ranks,) * 2, dtype=np.int64)
    run(plan, tensors(plan, dtype), sent)
    counts = count_attention(
        plan.schedule, Wire(WIDTH, dtype.itemsize, 8 if dtype == torch.float64 else 4)
    )
    assert np.array_equal(sent, counts.forward_bytes + counts.backward_bytes)


@given(plans)
@settings(max_examples=50)
def test_a_rerun_is_equal_bit_for_bit(plan) -> None:
    given_tensors = tensors(plan, torch.float32)
    first, second = run(plan, given_tensors), run(plan, given_tensors)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_no_document_sees_another(strategy: str, sharding: str) -> None:
    """Other tokens, labels or even no numbers in one: the others keep every bit."""
    lengths = [37, 11, 64, 5]
    plan = plan_context(
        lengths,
        3,
        strategy,
        heads=4,
        kv_heads=2,
        sharding=sharding,
        tile=8,
        ranks_per_node=3,
    )
    before = tensors(plan, torch.float32)
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[37:48] = False
    wanted = run(plan, before)
    for change in (1.5, float("nan")):
        after = [x.clone() for x in before]
        for x in after:
            x[37:48] += change
        for found, right in zip(run(plan, after), wanted, strict=True):
            assert torch.equal(found[others], right[others])
            assert not torch.equal(found[~others], right[~others])


@given(st.lists(st.integers(0, 90), max_size=6), st.integers(1, 6), st.sampled_from(SHARDINGS))
def test_shares_are_a_permutation_and_positions_restart(lengths, ranks: int, sharding) -> None:
    shares = share_tokens(lengths, ranks, sharding, tile=16)
    rows = np.concatenate(shares.rows)
    assert sorted(rows.tolist()) == list(range(sum(lengths)))
    wanted = np.concatenate([np.zeros(0, dtype=int), *map(np.arange, lengths)])
    assert np.array_equal(np.concatenate(shares.positions), wanted[rows])


def test_equal_arguments_give_the_same_plan() -> None:
    plan, again = (plan_context([9, 3], 2, "ring", heads=2, kv_heads=1) for _ in range(2))
    assert plan is again
    other = plan_context([9, 3], 2, "pass-q", heads=2, kv_heads=1)
    assert plan.schedule.digest != other.schedule.digest


def refusal(*shapes: list[int], dtypes=(torch.float32,) * 3) -> str:
    plan = plan_context([4], 2, "ring", heads=2, kv_heads=1)
    given_tensors = [torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    with pytest.raises(LayoutError) as caught:
        attend_in_one_process(*given_tensors, plan)
    return str(caught.value)


def test_tensors_that_do_not_go_together() -> None:
    assert refusal([4, 16], [4, 1, 8], [4, 1, 8]) == (
        "Queries [4, 16], keys [4, 1, 8] and values [4, 1, 8] do not go together. Give [tokens, "
        "heads, width] each, keys and values of one shape."
    )
    assert refusal([4, 2, 8], [3, 1, 8], [3, 1, 8]) == (
        "Queries of 4 tokens, width 8 and torch.float32 do not go with keys of 3 tokens, width 8 "
        "and torch.float32. Give them the same tokens, width and dtype."
    )
    assert refusal([5, 2, 8], [5, 1, 8], [5, 1, 8]) == (
        "The plan is of 4 tokens, 2 query heads and 1 key/value heads, the tensors are of 5, 2 "
        "and 1. Plan for these tensors."
    )


def test_ranks_that_wait_for_what_nobody_sends() -> None:
    def wait():
        yield Post([], [Parcel(1, 0, torch.zeros(1, dtype=torch.uint8), 0)])
        yield Await(0)

    with pytest.raises(FaultError) as caught:
        drive_together([wait(), iter(())], np.zeros((2, 2), dtype=np.int64))
    assert str(caught.value) == (
        "Ranks [0] wait for messages that nobody sends. Check the schedule with check_attention."
    )


def test_examples() -> None:
    module = importlib.import_module("equipoise.parallel.context.plan")
    assert doctest.testmod(module).failed == 0
