"""The executor, all ranks in one process: any schedule and mask equals a dense softmax."""

import importlib
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.context.plan import plan_context, plan_pieces
from equipoise.base.errors import FaultError, LayoutError
from equipoise.comm.drive import drive_together
from equipoise.comm.mail import Parcel
from equipoise.comm.steps import Await, Post
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.spec.mask import Mask
from support.dense import WIDTH, errors, one_rank, plans, run, tensors


@given(plans())
def test_any_schedule_equals_one_rank_in_fp64(plan) -> None:
    given_tensors = tensors(plan)
    assert max(errors(run(plan, given_tensors), one_rank(plan, given_tensors))) <= 1e-12


@given(plans(), st.sampled_from([0.0, 0.7, 30.0]), st.booleans())
def test_any_schedule_with_capped_scores_and_sinks_equals_one_rank(
    plan, softcap: float, has_sinks: bool
) -> None:
    *operands, grad_o = tensors(plan)
    sinks = 2 * torch.randn(plan.schedule.heads, dtype=torch.float64)
    given_tensors = [*operands, *([sinks] if has_sinks else []), grad_o]
    actual = run(plan, given_tensors, softcap=softcap)
    assert max(errors(actual, one_rank(plan, given_tensors, softcap=softcap))) <= 1e-12


@given(plans())
@settings(max_examples=25)
def test_any_schedule_equals_one_rank_in_fp32(plan) -> None:
    given_tensors = tensors(plan, torch.float32)
    output, gradient = errors(run(plan, given_tensors), one_rank(plan, given_tensors))
    assert output <= 2e-6
    assert gradient <= 1e-5


@given(plans(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(max_examples=25)
def test_bytes_are_those_of_the_schedule(plan, dtype: torch.dtype) -> None:
    sent = np.zeros((plan.schedule.ranks,) * 2, dtype=np.int64)
    run(plan, tensors(plan, dtype), sent)
    counts = count_attention(
        plan.schedule, Wire(WIDTH, dtype.itemsize, 8 if dtype == torch.float64 else 4)
    )
    assert np.array_equal(sent, counts.forward_bytes + counts.backward_bytes)


@given(plans())
@settings(max_examples=25)
def test_a_rerun_is_equal_bit_for_bit(plan) -> None:
    given_tensors = tensors(plan, torch.float32)
    first, second = run(plan, given_tensors), run(plan, given_tensors)
    assert all(map(torch.equal, first, second))


def test_sinks_are_one_for_each_head() -> None:
    plan = plan_context([9, 3], 2, heads=2, kv_heads=1)
    with pytest.raises(LayoutError) as caught:
        run(plan, [*tensors(plan)[:3], torch.zeros(3), torch.zeros(12, 2, WIDTH)])
    assert str(caught.value) == (
        "The sinks have shape [3], but there are 2 query heads. Give one number for each."
    )


def test_a_mask_for_all_or_one_for_each() -> None:
    one, each, other = (
        plan_context([9, 3], 2, "all-gather", heads=2, kv_heads=1, mask=mask).schedule
        for mask in (Mask("window", 3), [Mask("window", 3)] * 2, [Mask("window", 3), Mask()])
    )
    assert one.digest == each.digest
    # A causal document of 3 tokens has the tiles of a window of 3, and is another plan.
    assert one.digest != other.digest
    assert str(other).splitlines()[1] == "masks: documents 0:1 window 3; documents 1:2 causal"


def test_pieces_placed_by_hand_under_masks() -> None:
    home = [
        np.array([[0, 30, 50], [1, 0, 8]]),
        np.array([[1, 8, 20]]),
        np.array([[0, 0, 30], [2, 0, 7]]),
    ]
    masks = [Mask("window", 12), Mask("prefix", 0, 3, (10, 7)), Mask("full")]
    plan = plan_pieces(home, [50, 20, 7], heads=4, kv_heads=2, mask=masks)
    given_tensors = tensors(plan)
    sent = np.zeros((3, 3), dtype=np.int64)
    found = run(plan, given_tensors, sent)
    assert max(errors(found, one_rank(plan, given_tensors))) <= 1e-12
    # Rank 0 gets the 11 keys before token 30; rank 1 the prefix, and 5 of a branch that it shares.
    token_bytes = 2 * 2 * WIDTH * 8
    assert sent.tolist() == [
        [0, 8 * token_bytes, 11 * token_bytes],  # to rank 2: gradients
        [8 * token_bytes, 0, 0],
        [11 * token_bytes, 0, 0],
    ]


def refusal(*shapes: list[int], dtypes=(torch.float32,) * 3) -> str:
    plan = plan_context([4], 2, "ring", heads=2, kv_heads=1)
    given_tensors = [torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    with pytest.raises(LayoutError) as caught:
        attend_in_one_process(*given_tensors, plan)
    return str(caught.value)


def test_tensors_that_do_not_match() -> None:
    assert refusal([4, 16], [4, 1, 8], [4, 1, 8]) == (
        "Queries [4, 16], keys [4, 1, 8] and values [4, 1, 8] do not match. Each must be [tokens, "
        "heads, width], keys and values of the same shape."
    )
    assert refusal([4, 2, 8], [3, 1, 8], [3, 1, 8]) == (
        "Queries have 4 tokens and width 8, keys have 3 tokens and width 8. Give them the same "
        "tokens and width."
    )
    assert refusal([5, 2, 8], [5, 1, 8], [5, 1, 8]) == (
        "The plan is for 4 tokens, 2 query heads and 1 key/value heads, but the tensors have 5, "
        "2 and 1. Plan for these tensors."
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


def test_the_former_name_of_plans_names_the_new_one() -> None:
    sys.modules.pop("equipoise.parallel.context.plan", None)
    with pytest.warns(DeprecationWarning) as caught:
        former = importlib.import_module("equipoise.parallel.context.plan")
    assert former.plan_context is plan_context
    assert [str(each.message) for each in caught] == [
        "equipoise.parallel.context.plan has moved. Import from equipoise.balance.context.plan."
    ]
