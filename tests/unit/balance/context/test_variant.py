"""What moves when texts are continued: the choice, and the prices that it rests on."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.context.variant import (
    VARIANTS,
    ContinuedPrice,
    GatheredPrice,
    choose_variant,
)
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import LinkPrice

WIRE = Wire(64, 4)
FREE = ContinuedPrice(0.0, 1e-9, 0.0, LinkPrice(0.0, 1e30))
SLOW = dataclasses.replace(FREE, link=LinkPrice(0.0, 1e8))
HEADS = st.sampled_from([(9, 3), (8, 1), (4, 4)])


def choose(
    cached: int, new: int, price: ContinuedPrice, heads=(9, 3), ranks: int = 2, variants=VARIANTS
):
    return choose_variant(
        [[cached] * ranks],
        [new],
        price,
        WIRE,
        heads=heads[0],
        kv_heads=heads[1],
        variants=variants,
    )


@given(
    st.integers(0, 400),
    st.integers(1, 400),
    HEADS,
    st.integers(1, 4),
    st.floats(0, 1e-3),
    st.floats(1e6, 1e12),
)
@settings(max_examples=20)
def test_the_fastest_wins(cached, new, heads, ranks, latency_s, bytes_per_s) -> None:
    price = ContinuedPrice(1e-5, 1e-9, 1e-8, LinkPrice(latency_s, bytes_per_s), 1e-10, 1e-5)
    chosen = choose(cached, new, price, heads, ranks)
    assert list(chosen.priced_s) == list(VARIANTS)
    assert chosen.priced_s[chosen.strategy] == min(chosen.priced_s.values())
    assert chosen.plan.schedule.strategy == chosen.strategy
    assert choose(cached, new, price, heads, ranks).strategy == chosen.strategy


def test_where_bytes_decide_the_fewest_move() -> None:
    """Queries move if they are less than keys and values; partial outputs count as well."""
    bytes_alone = dataclasses.replace(FREE, pair_s=0.0, link=LinkPrice(0.0, 1e9))
    for heads, kv_heads in ((9, 3), (8, 1), (4, 4)):
        strategies = [
            choose(cached, 64, bytes_alone, (heads, kv_heads)).strategy
            for cached in (0, 16, 64, 256, 1024, 4096)
        ]
        turn = strategies.index("pass-q")
        assert set(strategies[:turn]) <= {"ring", "needed-kv"}
        assert set(strategies[turn:]) == {"pass-q"}


def test_among_equals_the_fewest_bytes_move() -> None:
    """The rank that sends all its keys ends last either way; the other one need not send any."""
    price = dataclasses.replace(SLOW, pair_s=0.0)
    chosen = choose(0, 512, price)
    assert chosen.priced_s["ring"] == chosen.priced_s["needed-kv"]
    assert chosen.strategy == "needed-kv"


def test_what_messages_cost_cores_is_hidden_by_nothing() -> None:
    plan = choose(0, 512, FREE, variants=("ring",)).plan.schedule
    without = FREE.seconds(plan, WIRE)
    with_cores = dataclasses.replace(FREE, core_s_per_byte=1e-9).seconds(plan, WIRE)
    sent = 512 // 2 * 2 * 3 * 64 * 4  # what a rank sends and receives: half of the keys each
    assert with_cores - without == pytest.approx(2 * sent * 1e-9)
    assert SLOW.seconds(plan, WIRE) > without


def test_a_round_and_a_tile_cost_once_each() -> None:
    plan = choose(8, 1, FREE, ranks=3).plan.schedule
    alone = dataclasses.replace(FREE, pair_s=0.0)
    assert alone.seconds(plan, WIRE) < 1e-12
    rounds = max(sum(bool(len(r.tiles) or r.sends or r.receives) for r in of) for of in plan.rounds)
    assert dataclasses.replace(alone, round_s=1.0).seconds(plan, WIRE) >= rounds


def test_single_tokens_cost_what_the_rank_with_most_computes() -> None:
    """Rank 0 computes its own text, which has 4 keys and a new one, and reads 3 of the other's."""
    price = GatheredPrice(1.0, 0.1, 0.01)
    cached, homes = [(4, 0), (3, 3)], [np.array([0]), np.array([1])]
    assert price.seconds(cached, homes) == pytest.approx(1.0 + 2 * 0.1 + (4 + 1 + 3) * 0.01)
    assert GatheredPrice(1.0).seconds(cached * 9, [np.arange(18), np.arange(0)]) == 1.0
