"""Remap: a permutation that evens tokens out, moves the fewest, and counts its bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context.remap import remap_counts, remap_tokens
from equipoise.balance.context.sharding import split_context
from equipoise.base.errors import LayoutError

TOKENS = st.lists(st.integers(0, 60), min_size=1, max_size=9).map(np.array)


@given(TOKENS)
def test_the_order_is_a_permutation_and_tokens_come_out_even(tokens) -> None:
    remap = remap_counts(tokens, bytes_per_token=2)
    assert sorted(remap.order.tolist()) == list(range(tokens.sum()))
    assert np.ptp(remap.tokens_after) <= 1
    assert remap.tokens_after.sum() == tokens.sum()


@given(TOKENS, st.integers(0, 9))
def test_bytes_are_the_tokens_that_change_ranks(tokens, size: int) -> None:
    remap = remap_counts(tokens, bytes_per_token=size)
    ranks = len(tokens)
    was_on = np.repeat(np.arange(ranks), tokens)[remap.order]
    is_on = np.repeat(np.arange(ranks), remap.tokens_after)
    counted = np.zeros((ranks, ranks), dtype=int)
    np.add.at(counted, (was_on, is_on), 1)
    np.fill_diagonal(counted, 0)
    assert np.array_equal(remap.moved_bytes, counted * size)
    assert remap.moved_tokens == counted.sum()


@given(TOKENS)
def test_nothing_fewer_would_do(tokens) -> None:
    mean, more = divmod(int(tokens.sum()), len(tokens))
    # The ranks that may keep one token more than the mean are those that have it to keep.
    over = np.maximum(tokens - mean, 0)
    assert remap_counts(tokens, bytes_per_token=1).moved_tokens == over.sum() - min(
        more, int((over > 0).sum())
    )


@given(TOKENS)
def test_kept_tokens_stand_first_and_in_order(tokens) -> None:
    remap = remap_counts(tokens, bytes_per_token=1)
    begins = np.cumsum(tokens) - tokens
    at = np.cumsum(remap.tokens_after) - remap.tokens_after
    for rank, kept in enumerate(np.minimum(tokens, remap.tokens_after).tolist()):
        expected = np.arange(begins[rank], begins[rank] + kept)
        assert np.array_equal(remap.order[at[rank] : at[rank] + kept], expected)


@given(TOKENS)
def test_there_and_back_is_the_identity(tokens) -> None:
    there = remap_counts(tokens, bytes_per_token=3)
    back = there.inverse
    assert there.order[back.order].tolist() == list(range(tokens.sum()))
    assert np.array_equal(back.moved_bytes, there.moved_bytes.T)
    again = back.inverse
    assert np.array_equal(again.order, there.order)
    assert again.tokens_before.tolist() == tokens.tolist()


@given(st.lists(st.integers(0, 3000), max_size=10), st.integers(1, 6))
def test_a_split_is_evened_out(lengths, ranks: int) -> None:
    split = split_context(lengths, ranks, "hierarchical", ranks_per_node=1, tile=16)
    remap = remap_tokens(split, bytes_per_token=4)
    assert remap.tokens_before.tolist() == split.tokens.tolist()
    assert np.ptp(remap.tokens_after) <= 1


def test_an_even_layout_moves_nothing() -> None:
    remap = remap_counts(np.array([5, 4, 5]), bytes_per_token=8)
    assert remap.moved_tokens == 0
    assert remap.tokens_after.tolist() == [5, 4, 5]
    assert remap.order.tolist() == list(range(14))


def test_a_token_of_negative_size() -> None:
    with pytest.raises(LayoutError) as caught:
        remap_counts(np.array([1]), bytes_per_token=-1)
    assert str(caught.value) == "A token of -1 bytes cannot move. Give 0 or more."
