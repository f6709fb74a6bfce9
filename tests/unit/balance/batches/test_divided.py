"""Divided samples: each token once, the cap kept, pieces where they can be computed."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise import balance
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import break_even_curve

CURVE = break_even_curve(500)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(500, 4000),
)
def test_each_token_is_in_one_piece(lengths, ranks, pipeline, cap) -> None:
    try:
        answer = balance.batch(
            lengths,
            ranks,
            price=CURVE,
            max_tokens=cap,
            divides=True,
            pipeline=pipeline,
            may_be_empty=True,
        )
    except LayoutError as error:
        assert "cannot be divided" in str(error)
        return
    runs, places = defaultdict(list), defaultdict(set)
    for rank, row in enumerate(answer.pieces):
        for turn, pieces in enumerate(row):
            assert int((pieces[:, 2] - pieces[:, 1]).sum()) == answer.tokens[rank, turn, 0] <= cap
            for sample, start, stop in pieces.tolist():
                runs[sample].append((start, stop))
                places[sample].add((rank, turn))
    for sample, tokens in enumerate(lengths):
        ends = sorted(runs[sample])
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
        assert ends[-1][1] == tokens
        ranks_of, turns_of = {r for r, _ in places[sample]}, {t for _, t in places[sample]}
        if pipeline == 1:
            assert len(turns_of) == 1
        else:
            assert len(ranks_of) == 1
            assert max(turns_of) - min(turns_of) == len(turns_of) - 1
    assert answer.bound_s <= answer.step_s * (1 + 1e-6)


def test_a_dominant_sample_no_longer_decides() -> None:
    lengths = [8000, 300, 300, 4000, 120, 2500, 900]
    whole = balance.batch(lengths, 2, price="2m")
    divided = balance.batch(lengths, 2, price="2m", divides=True)
    assert whole.skew > 1.3
    assert divided.skew < 1.01
    assert divided.step_s < whole.step_s


def test_no_rank_is_left_without_a_part() -> None:
    with pytest.raises(LayoutError) as caught:
        balance.batch([1], 2, price="7m", divides=True)
    assert str(caught.value) == (
        "1 sample can be divided so that 0 of 1 micro-batch on the emptiest of 2 ranks have a part "
        "that pays. Give more samples, fewer micro-batches or ranks, or may_be_empty=True."
    )
    empty = balance.batch([1], 2, price="7m", divides=True, may_be_empty=True)
    assert int(np.sum(empty.tokens)) == 1


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_counts_are_those_asked_for(lengths, ranks, pipeline, fewest, multiple, empty) -> None:
    try:
        answer = balance.batch(
            lengths,
            ranks,
            price=CURVE,
            divides=True,
            pipeline=pipeline,
            min_micro_batches=fewest,
            multiple_of=multiple,
            may_be_empty=empty,
        )
    except LayoutError as error:
        assert not empty
        assert "have a part that pays" in str(error) or "has a part that pays" in str(error)
        return
    (count,) = {len(row) for row in answer.pieces}
    assert count >= fewest
    assert count % multiple == 0
    assert empty or all(len(pieces) for row in answer.pieces for pieces in row)
