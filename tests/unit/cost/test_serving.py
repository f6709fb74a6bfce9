"""The price of an iteration: points are met, nothing gets cheaper by growing, shares add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.serving import ContextExchange, CurvePrice, PacedPrice, read_points
from equipoise.spec.device.serving import ServingCurve
from equipoise.spec.serving import IterationWork

CURVE = ServingCurve(
    tokens=((1, 4e-3), (64, 5e-3), (4096, 0.2)),
    logits=((1, 1e-4), (64, 4e-4)),
    pair_s=1e-8,
    kv_token_s=1e-7,
    sequence_s=1e-5,
    swap_token_s=1e-7,
    chunk_kv_token_s=3e-7,
    call_s=2e-3,
)
PRICE = CurvePrice(CURVE)
EXCHANGE = ContextExchange(3e-3, 1e-6, 2e-5, 1e-3, 3e-5, 1e-5, ranks=4)
OVER_RANKS = CurvePrice(CURVE, EXCHANGE)
sizes = st.tuples(*(st.integers(0, 10_000) for _ in range(7)))


def test_points_are_met() -> None:
    assert PRICE.iteration_s(IterationWork(64, 0, 0, 0, 0)) == 5e-3
    assert PRICE.iteration_s(IterationWork(4096, 0, 0, 0, 64)) == pytest.approx(0.2 + 4e-4)
    assert PRICE.iteration_s(IterationWork(0, 5, 7, 3, 0)) == pytest.approx(5e-8 + 7e-7 + 3e-5)
    assert PRICE.swap_s(10) == 1e-6


def test_each_chunk_lays_its_keys_out_and_attends_by_itself() -> None:
    decodes = IterationWork(2, 60, 60, 2, 2)
    for one, sooner, kv_tokens in (
        (decodes.with_chunk(100, 20, 0), 1, 120),
        (decodes.with_chunk(100, 20, 0).with_chunk(0, 8, 1), 2, 128),
        (IterationWork(0, 0, 0, 0, 0).with_chunk(100, 20, 0).with_decode(30), 1, 120),
        (IterationWork(0, 0, 0, 0, 0).with_chunk(100, 20, 0), 0, 120),
    ):
        plain = IterationWork(*one[:5])
        more_s = PRICE.iteration_s(one) - PRICE.iteration_s(plain)
        assert more_s == pytest.approx(kv_tokens * 3e-7 + sooner * 2e-3)


def test_a_pace_follows_what_is_measured_and_passes_over_one_stall() -> None:
    price, work = PacedPrice(PRICE), IterationWork(64, 0, 0, 0, 0)
    for _ in range(60):
        price.note(price.iteration_s(work), 5e-2)
    assert price.iteration_s(work) == pytest.approx(5e-2)
    price.note(price.iteration_s(work), 100.0)
    assert price.iteration_s(work) == pytest.approx(5e-2, rel=0.051)
    for _ in range(100):
        price.note(price.iteration_s(work), 1e9)
    assert price.iteration_s(work) == pytest.approx(16 * PRICE.iteration_s(work))
    assert price.prompt_s(0, 64) == PRICE.prompt_s(0, 64)


def test_a_single_point_grows_in_proportion() -> None:
    assert read_points(((4, 2.0),), 2) == 2.0 and read_points(((4, 2.0),), 8) == 4.0


@given(one=sizes, more=sizes)
def test_more_work_never_takes_less_time(one: tuple[int, ...], more: tuple[int, ...]) -> None:
    both = [a + b for a, b in zip(one, more, strict=True)]
    assert PRICE.iteration_s(IterationWork(*both)) >= PRICE.iteration_s(IterationWork(*one))


@given(one=sizes, more=sizes)
def test_nor_over_ranks(one: tuple[int, ...], more: tuple[int, ...]) -> None:
    """Also where the fewer tokens are single ones, which go another way."""
    tokens, pairs, read, _, logits, *_ = one
    single = IterationWork(tokens, pairs, read, tokens, logits)
    both = IterationWork(*(a + b for a, b in zip(single, more, strict=True)))
    assert OVER_RANKS.iteration_s(both) >= OVER_RANKS.iteration_s(single)


def test_single_tokens_go_to_all_ranks_at_once() -> None:
    """Four ranks: three hops around the ring, or one each way; own rows are a quarter."""
    home_s = 1e-3 + 10 * 3e-5
    for alone_s, own_s in ((1e-3, 1e-3 + 10 * 1e-5), (8e-3, 2e-3)):
        mixed = EXCHANGE.attention_s(alone_s, 10, 10**6)
        assert mixed == pytest.approx(max(alone_s, 3e-3 + 10 * 2e-5) + home_s)
        single = EXCHANGE.attention_s(alone_s, 10, 10**6, are_single=True)
        assert single == pytest.approx(own_s + alone_s * 3 / 4 + home_s)


@given(start=st.integers(0, 5000), first=st.integers(0, 5000), second=st.integers(0, 5000))
def test_shares_of_ranges_that_touch_add_up(start: int, first: int, second: int) -> None:
    for share in (PRICE.prompt_s, PRICE.output_s):
        whole = share(start, first + second)
        parts = share(start, first) + share(start + first, second)
        assert parts == pytest.approx(whole)
