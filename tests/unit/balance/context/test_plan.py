"""Shares and schedules of packs over context ranks, without tensors."""

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context import plan as context_plan
from equipoise.balance.context.plan import plan_context, share_tokens

SHARDINGS = ["contiguous", "head-tail", "head-tail-document", "by-work", "mixed"]


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


def test_examples() -> None:
    assert doctest.testmod(context_plan).failed == 0
