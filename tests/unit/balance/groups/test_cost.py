"""Costs of documents on groups: one rank pays the curve; travel is paid, or hidden."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.groups.cost import (
    FLEXSP_7B_A100,
    Exchange,
    GroupCosts,
    flexsp_cap_tokens,
    kv_ring,
)
from equipoise.base.errors import SpecError
from equipoise.cost.curve import LoadCurve, break_even_curve
from equipoise.cost.work import kv_bytes_per_token
from equipoise.spec.model.presets import ModelSpec

MODEL = ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=300, head_width=16)
CURVE = break_even_curve(1000)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=9))
def test_one_rank_pays_the_curve(lengths: list[int]) -> None:
    exchange = Exchange("ring", 1e3, ((1, 1e6),), latency_s=1.0)
    for costs in (GroupCosts(CURVE), GroupCosts(CURVE, exchange)):
        assert (
            costs.share_ns(np.array(lengths), np.array(1)).tolist()
            == costs.document_ns(np.array(lengths)).tolist()
        )


@given(tokens=st.integers(100, 200_000), power=st.integers(1, 6))
def test_the_published_form_of_flexsp_is_met_to_the_nanosecond(tokens: int, power: int) -> None:
    ranks = 2**power
    compute_ms = (5.128e-6 * tokens**2 + 0.1839576 * tokens) / ranks
    rate = {2: 154, 4: 137, 8: 121}.get(ranks, 8.7)
    travel_ms = 4 * 2 * 32 * 4096 * tokens * 2 / 1024 / 1024 / ranks / rate
    found = int(FLEXSP_7B_A100.share_ns(np.array([tokens]), np.array(ranks))[0])
    # A rank computes whole tokens, the form parts of one.
    part = (-(-tokens // ranks) - tokens / ranks) * (0.1839576 - 5.128e-6)
    assert found == pytest.approx((compute_ms + part + travel_ms) * 1e6, abs=2)
    assert FLEXSP_7B_A100.fixed_ns == 629_356_300


def test_flexsp_caps_follow_from_the_device() -> None:
    assert flexsp_cap_tokens(64) == int((40 * 1024 - 1792) / 4.71)
    assert flexsp_cap_tokens(16) < flexsp_cap_tokens(64) < flexsp_cap_tokens(64, device_gb=80)


def test_travel_of_a_ring_and_of_an_all_to_all() -> None:
    tokens, ranks = np.array([1200]), np.array(4)
    ring = Exchange("ring", 100.0, ((2, 1e9), (8, 1e6)), latency_s=1e-3)
    assert ring.exchange_ns(tokens, ranks).tolist() == [1200 * 3 / 4 * 100 * 1e3 + 3e6]
    every = Exchange("all-to-all", 100.0, ((2, 1e9), (8, 1e6)), latency_s=1e-3)
    assert every.exchange_ns(tokens, ranks).tolist() == [1200 / 4 * 100 * 1e3 + 1e6]
    assert ring.exchange_ns(tokens, np.array(1)).tolist() == [0.0]
    beyond = ring.exchange_ns(tokens, np.array(16)) - ring.exchange_ns(tokens, np.array(8))
    assert beyond.tolist() == pytest.approx([1200 * (15 / 16 - 7 / 8) * 1e5 + 8e6])


def test_a_hidden_exchange_costs_what_outlasts_the_attention() -> None:
    curve = LoadCurve(0.0, 10.0, (1.0,), (2.0,), 1.0, measured=False)
    tokens, ranks = np.array([999]), np.array(2)
    alone = int(GroupCosts(curve).share_ns(tokens, ranks)[0])
    attention = 999 * 1000 / 2
    for factor, paid in ((0.5, 0.0), (1.0, 0.0), (3.0, 2 * attention)):
        rate = 999 / 2 * 1e9 / (factor * attention)
        exchange = Exchange("ring", 1.0, ((2, rate),), is_hidden=True)
        found = int(GroupCosts(curve, exchange).share_ns(tokens, ranks)[0])
        assert found == pytest.approx(alone + paid, abs=1)


def test_a_ring_sends_keys_and_values_twice_and_their_gradients_once() -> None:
    exchange = kv_ring(MODEL, ((8, 1e9),), latency_s=1e-6)
    once = kv_bytes_per_token(MODEL)
    assert exchange.bytes_per_token == MODEL.layers * (2 * once + 2 * once)
    assert exchange.latency_s == pytest.approx(4e-6)
    assert exchange.is_hidden


def test_bandwidths_out_of_order_are_refused() -> None:
    with pytest.raises(SpecError) as error:
        Exchange("ring", 1.0, ((8, 1e9), (2, 1e9)))
    assert str(error.value) == (
        "The group sizes [8, 2] of an exchange are not in ascending order. Give one bandwidth "
        "for each size, smallest first."
    )
