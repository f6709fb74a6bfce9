"""Predicted times: bounds, relations, and one schedule by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context.sharding import split_context
from equipoise.base.errors import LayoutError
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.attention.price import LinkPrice, price_attention
from equipoise.schedule.attention.strategies import write_attention
from support.placements import schedules, written_out

WIRE = Wire(head_width=8, element_bytes=2)
FREE = LinkPrice(0.0, float("inf"))


def by_pairs(pairs, rounds):
    return pairs * 10.0


@given(schedules(), st.floats(0, 1e-3), st.floats(1e3, 1e9))
def test_links_only_add_to_what_tiles_take(schedule, latency_s: float, speed: float) -> None:
    dear = price_attention(schedule, by_pairs, LinkPrice(latency_s, speed), WIRE)
    free = price_attention(schedule, by_pairs, FREE, WIRE)
    assert dear.total_ns >= free.total_ns * (1 - 1e-12)
    assert free.total_ns >= free.compute_ns.max(initial=0.0) * (1 - 1e-12)
    slower = price_attention(schedule, by_pairs, LinkPrice(latency_s * 2, speed / 2), WIRE)
    assert slower.total_ns >= dear.total_ns * (1 - 1e-12)
    pairs = sum(
        written_out(mask, tokens).sum()
        for mask, tokens in zip(schedule.masks, schedule.doc_tokens.tolist(), strict=True)
    )
    assert dear.compute_ns.sum() == pytest.approx(3.5 * 10 * pairs)


@given(schedules(), st.floats(0, 1e-3), st.floats(1e3, 1e9))
def test_the_replay_is_one_that_can_happen(schedule, latency_s: float, speed: float) -> None:
    """No port carries two messages at a time, and no round ends before what is due is there."""
    link = LinkPrice(latency_s, speed)
    price, counts = price_attention(schedule, by_pairs, link, WIRE), count_attention(schedule, WIRE)
    for replay, sent in (
        (price.forward, counts.forward_bytes),
        (price.backward, counts.backward_bytes),
    ):
        assert sum(f.size_bytes for f in replay.flights) == sent.sum()
        last_of: dict[tuple[str, int], float] = {}
        ends = np.column_stack((replay.begins_ns[:, 1:], replay.ends_ns))
        assert (ends >= replay.begins_ns + replay.compute_ns - 1e-6).all()
        for f in replay.flights:
            assert f.end_ns - f.start_ns == pytest.approx(link.message_ns(f.size_bytes), rel=1e-6)
            for port, rank in (("out", f.source), ("in", f.target)):
                assert f.start_ns >= replay.begins_ns[rank, f.first]
                assert f.end_ns <= ends[rank, f.last]
                assert f.start_ns >= last_of.get((port, rank), 0.0)
                last_of[port, rank] = f.end_ns


def test_one_schedule_by_hand() -> None:
    home = [np.array([[0, 0, 4]]), np.array([[0, 4, 6]])]
    schedule = write_attention("needed-kv", home, [6], heads=2, kv_heads=1)
    # 4 tokens of 1 head: 128 bytes of keys and values there, 256 bytes of gradients back.
    price = price_attention(schedule, by_pairs, LinkPrice(1e-7, 1e9), WIRE)
    assert price.forward_ns.tolist() == [228.0, 228.0 + 80]  # 4 x 2 pairs after the message
    # Backward: tiles of round 1 (200 ns on rank 1), then the gradients, over tiles of round 0.
    assert price.backward_ns.tolist() == [200 + 356, 200 + 356]
    assert price.exposed_ns == pytest.approx(228 + 80 + 556 - 3.5 * 110)


def test_overlap_hides_a_ring_where_tiles_take_longer_than_messages() -> None:
    home = split_context([4096], 4, "head-tail").pieces
    schedule = write_attention("ring", home, [4096], heads=2, kv_heads=1)
    hidden = price_attention(schedule, by_pairs, LinkPrice(1e-6, 1e9), WIRE)
    assert hidden.exposed_ns < 0.03 * hidden.total_ns
    bare = price_attention(schedule, by_pairs, LinkPrice(1.0, 1e9), WIRE)
    assert bare.total_ns == pytest.approx(6e9, rel=0.05)  # three rounds there, three back


def test_an_all_to_all_fills_every_port() -> None:
    home = split_context([4096], 4, "head-tail").pieces
    schedule = write_attention("ulysses", home, [4096], heads=4, kv_heads=4)
    price = price_attention(schedule, lambda pairs, _: pairs * 0.0, LinkPrice(0.0, 1e9), WIRE)
    # Of 1,024 tokens, 3 of 4 heads leave: a query, a key and a value of 16 bytes; then an output.
    assert price.forward_ns.tolist() == [3 * 1024 * 64.0] * 4


def test_full_tiles_may_have_a_price_of_their_own() -> None:
    halves = [np.array([[0, 0, 4]]), np.array([[0, 4, 8]])]
    schedule = write_attention("all-gather", halves, [8], heads=2, kv_heads=1)
    price = price_attention(schedule, by_pairs, FREE, WIRE, full_ns=lambda pairs, _: pairs * 5.0)
    # Both ranks have 10 pairs under the mask, the second one 16 in a full tile as well.
    assert price.compute_ns.tolist() == [3.5 * 10 * 10, 3.5 * (10 * 10 + 16 * 5)]


def test_a_message_between_nodes_holds_up_none_within() -> None:
    home = split_context([4096], 4, "head-tail").pieces
    schedule = write_attention("double-ring", home, [4096], heads=2, kv_heads=1, ranks_per_node=2)
    near, far = LinkPrice(0.0, 1e9), LinkPrice(0.0, 0.5e9)
    price = price_attention(
        schedule, lambda pairs, _: pairs * 0.0, near, WIRE, node_link=far, ranks_per_node=2
    )
    # 32,768 bytes of keys: 65.5 us between nodes, while 32.8 us within; then within once more.
    assert price.forward_ns.tolist() == [32_768 * 3.0] * 4


def test_slow_links_between_nodes_favour_two_levels() -> None:
    home = split_context([4096], 8, "head-tail").pieces
    slow = LinkPrice(3e-3, 1e9)
    exposed = {}
    for strategy in ("ring", "double-ring"):
        schedule = write_attention(strategy, home, [4096], heads=2, kv_heads=1, ranks_per_node=4)
        exposed[strategy] = price_attention(
            schedule, by_pairs, FREE, WIRE, node_link=slow, ranks_per_node=4
        ).exposed_ns
    assert exposed["double-ring"] < 0.5 * exposed["ring"]


def test_a_link_that_carries_nothing() -> None:
    with pytest.raises(LayoutError) as caught:
        LinkPrice(0.0, 0.0)
    assert str(caught.value) == (
        "A link has a latency of 0 s and a bandwidth of 0 bytes/s. Give 0 or more and above 0."
    )
