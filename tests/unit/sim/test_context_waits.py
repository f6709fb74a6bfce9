"""What context ranks wait for in programs that compute nothing beside it, and add up afterwards."""

import pytest

from equipoise.sim.attention import AttentionCore, CoreTimes, merges_s
from equipoise.spec.layout import Layout
from equipoise.spec.program.file import read_program
from support.machines import MODEL, h100, options, stack

WINDOW = 65_536
ELEMENT_BYTES, SUM_BYTES = 2, 4


def core(cp: int, **facts: object) -> CoreTimes:
    layout, machine = Layout(dp=16 // cp, cp=cp), h100(16)
    asked = options(stack=stack(**facts), context_strategy="all-gather", sharding="head-tail")
    links = machine.context_links(layout)
    return AttentionCore(MODEL, layout, asked, machine, links).price([WINDOW])


def of_chunk_s(cp: int, element_bytes: int) -> float:
    """One chunk of keys and values between two devices of a node [s]."""
    size = WINDOW // cp * 2 * MODEL.kv_heads * MODEL.head_width * element_bytes
    links = h100(16).context_links(Layout(dp=16 // cp, cp=cp))
    slower = options().residuals.traffic
    return links.near.latency_s + size * slower / links.near.bytes_per_s


@pytest.mark.parametrize("cp", [2, 4])
def test_all_that_travels_is_waited_for(cp: int) -> None:
    found = core(cp, context_waits=True)
    gathers = (cp - 1) * of_chunk_s(cp, ELEMENT_BYTES)
    assert found.forward_exposed_s == pytest.approx(gathers, rel=1e-6)
    hops = cp * of_chunk_s(cp, SUM_BYTES)  # sums of gradients come back to where they began
    assert found.backward_exposed_s == pytest.approx(gathers + hops, rel=1e-6)


def test_messages_beside_computing_are_waited_for_less() -> None:
    beside, waits = core(4), core(4, context_waits=True)
    assert (beside.forward_s, beside.backward_s) == (waits.forward_s, waits.backward_s)
    assert beside.forward_exposed_s < waits.forward_exposed_s
    assert beside.backward_exposed_s < waits.backward_exposed_s


def test_chunks_are_added_up() -> None:
    machine, facts = h100(16), options()
    plain, merged = core(4), core(4, merge_bytes=10.0)
    expected = merges_s(
        10.0,
        WINDOW / 4 * MODEL.head_width,
        MODEL.heads,
        MODEL.kv_heads,
        chunks=4,
        bytes_per_s=machine.bytes_per_s / facts.residuals.moves,
    )
    assert merged.forward_exposed_s - plain.forward_exposed_s == pytest.approx(expected[0])
    assert merged.backward_exposed_s - plain.backward_exposed_s == pytest.approx(expected[1])
    assert core(1, merge_bytes=10.0).forward_exposed_s == 0


def test_torchtitan_waits_and_megatron_core_does_not() -> None:
    compiled, eager = (read_program(name).stack for name in ("torchtitan", "torchtitan-eager"))
    assert (compiled.context_waits, eager.context_waits) == (True, False)
    assert 0 < compiled.merge_bytes < eager.merge_bytes
    megatron = read_program("megatron-core").stack
    assert not megatron.context_waits
    assert megatron.merge_bytes > 0


def test_links_are_as_slow_as_other_messages_of_the_step() -> None:
    links = h100(16).context_links(Layout(dp=1, cp=16))
    slow = links.slowed(2.0)
    assert slow.near.bytes_per_s == links.near.bytes_per_s / 2
    assert links.far is not None and slow.far is not None
    assert slow.far.bytes_per_s == links.far.bytes_per_s / 2
    assert slow.ranks_per_node == links.ranks_per_node
