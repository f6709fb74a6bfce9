"""Experts on ranks: every row computed once, and bytes counted link by link."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.schedule.expert.schedule import schedule_experts
from equipoise.schedule.expert.skew import layer_skews, load_skew
from equipoise.spec.model.experts import split_experts, turn_of


@given(st.integers(1, 12), st.integers(1, 60))
def test_every_expert_lives_on_one_rank_or_ranks_are_refused(ranks: int, experts: int) -> None:
    most = -(-experts // ranks)
    owners = {expert // most for expert in range(experts)}
    if len(owners) < ranks:
        with pytest.raises(LayoutError):
            split_experts(experts, ranks=ranks)
        assert len(split_experts(experts, ranks=len(owners))) == len(owners)
        return
    shares = split_experts(experts, ranks=ranks)
    assert shares == [sum(x // most == rank for x in range(experts)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("experts", "ranks", "message"),
    [
        (
            0,
            2,
            "The model has no experts that 2 ranks could share. Set ep (layout.ep) = 1 and "
            "etp (layout.etp) = 1, or give the model experts.",
        ),
        (
            4,
            6,
            "4 experts in runs of 1 leave 2 of 6 ranks without any. Set ep (layout.ep) to 4.",
        ),
        (
            6,
            4,
            "6 experts in runs of 2 leave 1 of 4 ranks without any. Set ep (layout.ep) to 3.",
        ),
    ],
)
def test_ranks_without_experts_are_refused(experts: int, ranks: int, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        split_experts(experts, ranks=ranks)
    assert str(caught.value) == message


@st.composite
def tables(draw) -> np.ndarray:
    ranks = draw(st.integers(1, 5))
    run = draw(st.integers(1, 3))
    experts = draw(st.integers((ranks - 1) * run + 1, ranks * run))
    row = st.lists(st.integers(0, 7), min_size=experts, max_size=experts)
    return np.array(draw(st.lists(row, min_size=ranks, max_size=ranks)), dtype=np.int64)


@given(tables())
def test_each_row_is_computed_where_its_expert_lives(rows: np.ndarray) -> None:
    ranks, experts = rows.shape
    schedule = schedule_experts(rows)
    owner = np.repeat(np.arange(ranks), split_experts(experts, ranks=ranks))
    expected = np.zeros((ranks, ranks), dtype=np.int64)
    for rank in range(ranks):
        for expert in range(experts):
            expected[rank, owner[expert]] += rows[rank, expert]
    assert schedule.sent.tolist() == expected.tolist()
    assert int(schedule.computed.sum()) == int(rows.sum())
    assert 1.0 <= schedule.skew <= ranks


@given(tables(), st.integers(1, 8), st.integers(1, 2))
def test_bytes_go_there_and_back_in_both_passes(
    rows: np.ndarray, width: int, forwards: int
) -> None:
    ranks, experts = rows.shape
    schedule = schedule_experts(rows)
    found = schedule.bytes(width, element_bytes=2, forwards=forwards)
    planned = schedule.bytes(width, element_bytes=2, forwards=forwards, is_planned=True)
    as_exact = dataclasses.replace(schedule, policy="exact")
    named = as_exact.bytes(width, element_bytes=2, forwards=forwards)
    assert named.tolist() == planned.tolist()
    shares = split_experts(experts, ranks=ranks)
    for one in range(ranks):
        assert found[one, one] == 0
        for other in range(ranks):
            if one != other:
                there_and_back = schedule.sent[one, other] + schedule.sent[other, one]
                counts = forwards * 8 * shares[other]
                rows_bytes = (forwards + 1) * 2 * width * there_and_back
                assert found[one, other] == rows_bytes + counts
                assert planned[one, other] == rows_bytes + forwards * 8 * (experts + 1)


@given(st.integers(2, 8), st.integers(1, 20))
def test_over_as_many_layers_as_ranks_all_have_equally_many_experts(ranks: int, run: int) -> None:
    for experts in range((ranks - 1) * run + 1, ranks * run + 1):
        shares = split_experts(experts, ranks=ranks)
        held = np.zeros(ranks, dtype=np.int64)
        for layer in range(ranks):
            turn = turn_of(layer, experts=experts, ranks=ranks)
            held += np.roll(shares, turn)
        assert (held == experts).all()


def test_skew_is_the_largest_over_the_mean() -> None:
    assert load_skew([4, 4, 4, 4]) == 1.0
    assert list(layer_skews([[8, 0, 0, 0], [3, 1, 2, 2], [0, 0, 0, 0]])) == [4.0, 1.5, 1.0]
