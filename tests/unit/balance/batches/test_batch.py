"""``balance.batch``: each sample once, caps kept, nobody empty, near the best there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise import balance
from equipoise.base.errors import EquipoiseError
from equipoise.cost.curve import break_even_curve
from equipoise.spec.workload import draw_lengths

CURVE = break_even_curve(500)
LENGTHS = st.lists(st.integers(1, 2000), min_size=1, max_size=40)


def samples(answer) -> list[int]:
    return sorted(each for rank in answer.micro_batches for row in rank for each in row)


@given(
    LENGTHS,
    st.integers(1, 6),
    st.integers(2000, 6000),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_each_sample_once_and_the_cap_holds(
    lengths, ranks, cap, meets, equal, empty, fewest, multiple
) -> None:
    if not equal:
        meets = False
    try:
        answer = balance.batch(
            lengths,
            ranks,
            price=CURVE,
            max_tokens=cap,
            meets_each_turn=meets,
            equal_counts=equal,
            min_micro_batches=fewest,
            multiple_of=multiple,
            may_be_empty=empty,
        )
    except EquipoiseError:
        assert not empty
        least = max(fewest, -(-sum(lengths) // (ranks * cap)))
        assert len(lengths) < ranks * (least + 2 * multiple + len(lengths) // ranks)
        return
    assert samples(answer) == list(range(len(lengths)))
    tokens = np.array(lengths)
    for rank, row in enumerate(answer.micro_batches):
        assert len(row) >= fewest
        assert len(row) % multiple == 0
        assert all(row) or empty, "an empty micro-batch"
        for at, batch in enumerate(row):
            assert batch == sorted(batch)
            assert int(tokens[batch].sum()) == int(answer.tokens[rank, at, 0]) <= cap
            if not batch:
                continue
            predicted = 1e-9 * CURVE.document_ns(tokens[batch]).sum()
            assert answer.seconds[rank, at, 0] == pytest.approx(predicted)
    if equal:
        assert len({len(row) for row in answer.micro_batches}) == 1
    assert answer.bound_s <= answer.step_s * (1 + 1e-9)
    assert answer.gap >= 0
    assert answer.skew >= 1 - 1e-9
    assert answer.turn_skew >= answer.skew - 1e-9


@given(LENGTHS, st.integers(1, 60), st.integers(2000, 3000))
def test_with_fillers_every_batch_fits_any_ranks(lengths, ranks, cap) -> None:
    answer = balance.batch(lengths, ranks, price=CURVE, max_tokens=cap, may_be_empty=True)
    assert samples(answer) == list(range(len(lengths)))
    assert len({len(row) for row in answer.micro_batches}) == 1
    assert int(answer.tokens.max()) <= cap


@given(LENGTHS, st.integers(1, 6))
def test_the_answer_depends_on_the_arguments_alone(lengths, ranks) -> None:
    first = balance.batch(lengths, ranks, price=CURVE, may_be_empty=True)
    again = balance.batch(np.array(lengths), ranks, price=CURVE, may_be_empty=True)
    assert first.digest == again.digest


SMALL = st.integers(1, 2).flatmap(
    lambda phases: st.lists(
        st.lists(st.integers(1, 60), min_size=phases, max_size=phases), min_size=2, max_size=6
    )
)


@given(SMALL, st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_near_the_best_of_all_assignments(seconds, ranks, turns, meets) -> None:
    units, cells = len(seconds), ranks * turns
    if units < cells:
        return
    answer = balance.batch(
        [1] * units, ranks, seconds=seconds, min_micro_batches=turns, meets_each_turn=meets
    )
    best = np.inf
    for cell_of in itertools.product(range(cells), repeat=units):
        if len({*cell_of}) < cells:
            continue
        table = np.zeros((cells, len(seconds[0])))
        np.add.at(table, list(cell_of), np.array(seconds, dtype=float))
        table = table.reshape(turns, ranks, -1)
        whole = table.max(1).sum() if meets else table.sum(0).max(0).sum()
        best = min(best, float(whole))
    assert best - 1e-9 <= answer.step_s
    assert answer.bound_s <= best + 1e-9
    assert answer.step_s <= best * (4 / 3 if turns == 1 and len(seconds[0]) == 1 else 2)


def test_work_is_even_where_tokens_are_not() -> None:
    lengths = np.minimum(draw_lengths("pretrain-128k", 2000, seed=3), 65_536)
    answer = balance.batch(lengths, 16, price="llama3-8b")
    assert answer.skew < 1.001
    tokens = answer.tokens.sum((1, 2))
    assert tokens.max() / tokens.mean() > 1.01


def test_two_costs_are_both_even() -> None:
    rng = np.random.default_rng(0)
    lengths = np.stack((rng.integers(0, 4, 400) * 576, rng.integers(10, 3000, 400)), axis=1)
    answer = balance.batch(lengths, 8, price=["7m", "30m"], max_tokens=[20_000, 60_000])
    heaviest, mean = answer.seconds.sum(1).max(0), answer.seconds.sum(1).mean(0)
    assert (heaviest / mean < 1.01).all()
    assert (answer.tokens.max((0, 1)) <= [20_000, 60_000]).all()
    one = balance.batch(lengths.sum(1), 8, price="30m", max_tokens=60_000)
    images = np.array([lengths[rank[0], 0].sum() for rank in one.micro_batches])
    assert images.max() / images.mean() > 1.02  # what evening out one cost leaves of the other


def test_prices_that_are_given_are_what_is_evened_out() -> None:
    answer = balance.batch([10, 10, 10, 10], 2, seconds=[3, 1, 1, 1])
    assert answer.micro_batches == [[[0]], [[1, 2, 3]]]
    assert answer.step_s == pytest.approx(3)
    assert answer.gap == pytest.approx(0)


def test_ranks_that_meet_at_the_end_may_have_their_own_counts() -> None:
    lengths = [1000] + [100] * 30
    answer = balance.batch(
        lengths,
        2,
        seconds=[3000, *[100] * 30],
        max_tokens=1000,
        meets_each_turn=False,
        equal_counts=False,
    )
    assert sorted(len(rank) for rank in answer.micro_batches) == [1, 3]
    assert answer.skew == 1.0


def test_a_single_rank_gets_everything() -> None:
    answer = balance.batch([3, 4], price="7m")
    assert answer.micro_batches == [[[0, 1]]]
    assert answer.pieces[0][0].tolist() == [[0, 0, 3], [1, 0, 4]]
    assert (answer.skew, answer.turn_skew, answer.micro_batch_skews) == (1.0, 1.0, [1.0])


def test_given_prices_may_have_any_unit() -> None:
    wanted = balance.batch([1] * 6, 2, seconds=[5, 4, 3, 3, 2, 1]).micro_batches
    for unit in (1e-300, 1e-12, 1e12, 1e300):
        answer = balance.batch([1] * 6, 2, seconds=unit * np.array([5, 4, 3, 3, 2, 1]), pipeline=1)
        assert answer.micro_batches == wanted
        assert answer.step_s == pytest.approx(9 * unit)
        piped = balance.batch([1] * 6, 2, seconds=unit * np.array([5, 4, 3, 3, 2, 1]), pipeline=2)
        assert piped.bound_s <= piped.step_s
