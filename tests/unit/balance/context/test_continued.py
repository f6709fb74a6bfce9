"""Texts that are continued over ranks: who computes the new tokens, and what moves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context.continued import fill_up, plan_continued
from equipoise.base.errors import CheckError, LayoutError
from equipoise.schedule.attention.check import check_attention
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.attention.strategies import BY_HEADS, STRATEGIES

FOR_CACHED = [name for name in STRATEGIES if name not in BY_HEADS]
WIRE = Wire(head_width=8, element_bytes=2, sum_bytes=4)


@st.composite
def continued(draw: st.DrawFn, most_new: int = 40) -> tuple[list[list[int]], list[int]]:
    """Tokens of each text that each rank has, and new ones."""
    ranks, texts = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks)
    cached = draw(st.lists(sizes, min_size=texts, max_size=texts))
    new = draw(st.lists(st.integers(1, most_new), min_size=texts, max_size=texts))
    return cached, new


@given(continued(), st.sampled_from(FOR_CACHED), st.sampled_from([(1, 1), (4, 2), (9, 3)]))
def test_every_schedule_passes_the_checker(texts, strategy: str, heads) -> None:
    cached, new = texts
    plan = plan_continued(
        cached, new, strategy, heads=heads[0], kv_heads=heads[1], ranks_per_node=1
    )
    check_attention(plan.schedule)
    assert sorted(np.concatenate(plan.rows).tolist()) == list(range(sum(new)))
    assert np.array_equal(np.sum(plan.key_tokens, axis=0), np.sum(cached, axis=1) + new)


@given(continued())
def test_ranks_that_were_even_stay_even_within_one(texts) -> None:
    cached, new = texts
    ranks = len(cached[0])
    have = np.zeros((len(new), ranks), dtype=np.int64)
    for tokens in (new, [1] * len(new), new):  # a prompt, a token each, more prompt
        plan = plan_continued(have, tokens, "gather-q", heads=2, kv_heads=1)
        have = np.stack(plan.key_tokens, axis=1)
        assert (have.max(axis=1) - have.min(axis=1)).max() <= 1


@given(continued())
def test_ranks_with_fewer_keys_catch_up(texts) -> None:
    cached, new = texts
    plan = plan_continued(cached, new, "gather-q", heads=2, kv_heads=1)
    after = np.stack(plan.key_tokens, axis=1)
    for before, have in zip(np.array(cached), after, strict=True):
        added = have > before
        assert have[added].max() - have.min() <= 1 or not added.any()


def test_single_tokens_of_many_texts_spread_over_the_ranks() -> None:
    plan = plan_continued([[8, 8, 8]] * 9, [1] * 9, "gather-q", heads=2, kv_heads=1)
    assert [len(rows) for rows in plan.rows] == [3, 3, 3]


def test_pairs_of_a_long_prompt_are_even_after_a_long_cache() -> None:
    plan = plan_continued([[500, 500, 500, 500]], [4_000], "ring", heads=1, kv_heads=1)
    assert count_attention(plan.schedule, WIRE).pair_skew < 1.001


@given(continued())
def test_what_is_sent_is_the_papers_formula(texts) -> None:
    """A ring of keys sends every rank's keys to all others; one of queries the new tokens."""
    cached, new = texts
    ranks, earlier, tokens = len(cached[0]), int(np.sum(cached)), sum(new)
    sent = {
        name: count_attention(
            plan_continued(cached, new, name, heads=4, kv_heads=2).schedule, WIRE
        ).forward_bytes.sum()
        for name in ("ring", "all-gather")
    }
    assert set(sent.values()) == {(ranks - 1) * (earlier + tokens) * 2 * 2 * 8 * 2}
    for name in ("pass-q", "gather-q"):
        schedule = plan_continued(cached, new, name, heads=4, kv_heads=2).schedule
        queries = [m for _, _, each in schedule for m in each.sends if m.carries == "q"]
        assert sum(map(WIRE.forward_bytes, queries)) == (ranks - 1) * tokens * 4 * 8 * 2


def test_the_first_share_is_filled_to_one_level() -> None:
    none = np.zeros(4, dtype=np.int64)
    assert fill_up(np.array([9, 1, 0, 4]), 2, none).tolist() == [0, 1, 1, 0]
    assert fill_up(np.array([9, 1, 0, 4]), 3, none).tolist() == [0, 1, 2, 0]
    assert fill_up(np.array([2, 2]), 1, np.array([5, 4])).tolist() == [0, 1]


def test_a_cached_key_that_two_ranks_have_is_found() -> None:
    schedule = plan_continued([[2, 2]], [4], "gather-q", heads=1, kv_heads=1).schedule
    twice = type(schedule)(
        *(schedule.strategy, schedule.doc_tokens, schedule.masks, 1, 1),
        *(schedule.home, schedule.rounds, (schedule.cached[0], schedule.cached[0])),
    )
    with pytest.raises(CheckError) as caught:
        check_attention(twice)
    assert str(caught.value) == (
        "gather-q: Token 0 of document 0 is at home on 2 ranks instead of one."
    )
    assert twice.digest != schedule.digest


def test_what_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        plan_continued([[2, 2]], [0], "ring", heads=1, kv_heads=1)
    assert str(caught.value) == (
        "Give one text or more, each with at least one new token, and no negative number of "
        "cached ones."
    )
    with pytest.raises(LayoutError) as caught:
        plan_continued([[2, 2]], [4], "ulysses", heads=2, kv_heads=2)
    assert str(caught.value) == (
        "ulysses would send every rank its heads of all cached keys. Where keys are cached, use "
        "all-gather, needed-kv, ring, double-ring, pass-q, token-ring, gather-q."
    )
