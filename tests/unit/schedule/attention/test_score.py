"""Figures of a strategy: they add up, and the link decides what is exposed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context.sharding import split_context
from equipoise.base.errors import LayoutError
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.attention.score import AssumedMachine, score_attention
from equipoise.schedule.attention.strategies import write_attention
from support.placements import schedules


@given(schedules(), st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_the_parts_add_up_to_the_predicted_time(schedule, latency_s: float, speed: float) -> None:
    machine = AssumedMachine(1e12, LinkPrice(latency_s, speed))
    score = score_attention(schedule, Wire(8), machine, sharding="any")
    parts = (score.compute_ns, score.peers_ns, score.exposed_ns)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(score.price.total_ns, rel=1e-9, abs=1e-6)
    assert 0 <= score.exposed_share <= 1
    assert score.messages == 2 * sum(len(each.sends) for _, _, each in schedule)
    flop = 3.5 * 4 * 8 * float(score.counts.pairs.sum())  # backward takes 2.5 forwards
    assert score.price.compute_ns.sum() == pytest.approx(1e9 * flop / 1e12)


def test_fast_links_in_a_node_expose_less() -> None:
    home = split_context([4096], 4, "head-tail").pieces
    schedule = write_attention("double-ring", home, [4096], heads=2, kv_heads=1, ranks_per_node=2)
    slow, fast = LinkPrice(1e-2, 1e9), LinkPrice(1e-6, 1e12)
    machines = (
        AssumedMachine(1e12, slow),
        AssumedMachine(1e12, slow, fast, 2),
        AssumedMachine(1e12, fast),
    )
    exposed = [
        score_attention(schedule, Wire(64), machine, sharding="head-tail").exposed_ns
        for machine in machines
    ]
    assert exposed[0] > exposed[1] > exposed[2] >= 0


def test_no_tokens_take_no_time() -> None:
    none = [np.empty((0, 3), dtype=np.int64)] * 2
    schedule = write_attention("ring", none, [], heads=2, kv_heads=1)
    machine = AssumedMachine(1e12, LinkPrice(1e-6, 1e9))
    score = score_attention(schedule, Wire(8), machine, sharding="mixed")
    assert (score.messages, score.compute_ns, score.exposed_share) == (0, 0.0, 0.0)


def test_what_is_assumed_is_said() -> None:
    link = LinkPrice(1e-5, 5e10)
    assert str(AssumedMachine(4e14, link)) == ("400 TFLOP/s a rank, links of 10 us and 50 GB/s")
    assert str(AssumedMachine(4e14, link, LinkPrice(5e-6, 4.5e11), 8)) == (
        "400 TFLOP/s a rank, links of 5 us and 450 GB/s within a node, 10 us and 50 GB/s between "
        "nodes"
    )
    assert str(AssumedMachine(4e14, link, block=128, tile_s=5e-6)) == (
        "400 TFLOP/s a rank in blocks of 128, 5 us a tile, links of 10 us and 50 GB/s"
    )
    with pytest.raises(LayoutError) as caught:
        AssumedMachine(0.0, link)
    assert str(caught.value) == "A rank's speed is 0 FLOP/s. Give a speed above 0."
    with pytest.raises(LayoutError) as caught:
        AssumedMachine(4e14, link, block=0, tile_s=-1.0)
    assert str(caught.value) == (
        "A kernel's block is 0 tokens and its fixed time -1 s. Give 1 or more and 0 or more."
    )
