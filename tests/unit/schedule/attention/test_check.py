"""The checker: what strategies write is right; a mutant is not, and the sentence says where."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from equipoise.base.errors import CheckError
from equipoise.schedule.attention.check import check_attention, find_faults
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.schedule import AttentionSchedule, Message, Round
from equipoise.schedule.attention.strategies import write_attention
from equipoise.spec.mask import Mask
from support.placements import pairs_of, schedules, written_out

HOME = [np.array([[0, 0, 4]]), np.array([[0, 4, 6], [1, 0, 2]])]
LENGTHS = [6, 2]


def write(strategy: str, **keys: int) -> AttentionSchedule:
    return write_attention(strategy, HOME, LENGTHS, heads=2, kv_heads=1, **keys)


def change(schedule: AttentionSchedule, rank: int, at: int, **keys: object) -> AttentionSchedule:
    rounds = [list(each) for each in schedule.rounds]
    rounds[rank][at] = dataclasses.replace(rounds[rank][at], **keys)
    return dataclasses.replace(schedule, rounds=tuple(map(tuple, rounds)))


def fault_of(schedule: AttentionSchedule) -> str:
    with pytest.raises(CheckError) as caught:
        check_attention(schedule)
    return str(caught.value)


@given(schedules())
def test_every_strategy_is_right_on_any_placement(schedule) -> None:
    assert list(find_faults(schedule)) == []


@given(schedules(most_ranks=4))
def test_pairs_one_by_one(schedule) -> None:
    counts = Counter(pair for _, _, each in schedule for pair in pairs_of(each.tiles))
    wanted = {
        (document, query, key, head): 1
        for document, (mask, tokens) in enumerate(
            zip(schedule.masks, schedule.doc_tokens.tolist(), strict=True)
        )
        for query, key in np.argwhere(written_out(mask, tokens)).tolist()
        for head in range(schedule.heads)
    }
    assert counts == wanted


@given(schedules(), st.data())
def test_no_mutant_passes(schedule, data) -> None:
    """Drop or double anything, or shift a tile by a token."""
    places = [
        (rank, at, what, index)
        for rank, at, each in schedule
        for what in ("sends", "receives", "tiles")
        for index in range(len(getattr(each, what)))
    ]
    assume(places)
    rank, at, what, index = data.draw(st.sampled_from(places))
    things = list(getattr(schedule.rounds[rank][at], what))
    kinds = ["drop", "double", *(["keys", "queries", "heads", "kind"] if what == "tiles" else [])]
    kind = data.draw(st.sampled_from(kinds))
    if kind == "drop":
        del things[index]
    elif kind == "double":
        things.insert(index, things[index])
    else:
        column = {"keys": 4, "queries": 1, "heads": 6, "kind": 5}[kind]
        things[index] = things[index].copy()
        assume(kind != "kind" or things[index][2] - things[index][1] > 1)  # of 1 all are alike
        things[index][column] += 1
    changed = np.array(things).reshape(-1, 8) if what == "tiles" else tuple(things)
    faults = list(find_faults(change(schedule, rank, at, **{what: changed})))
    assert faults
    assert all(fault.endswith(".") and fault.count("\n") == 0 for fault in faults)


@given(schedules(), st.data())
def test_a_message_moved_to_another_round_is_late_or_harmless(schedule, data) -> None:
    """Both ends of a message a round later: refused, or still right."""
    places = [
        (rank, at, index)
        for rank, at, each in schedule
        for index in range(len(each.sends))
        if at + 1 < len(schedule.rounds[rank])
    ]
    assume(places)
    rank, at, index = data.draw(st.sampled_from(places))
    message = schedule.rounds[rank][at].sends[index]
    moved = schedule
    for end, peer, what in ((rank, message.peer, "sends"), (message.peer, rank, "receives")):
        now, later = (list(getattr(moved.rounds[end][r], what)) for r in (at, at + 1))
        found = next(
            m
            for m in now
            if m.peer == peer
            and m.carries == message.carries
            and np.array_equal(m.runs, message.runs)
        )
        now.remove(found)
        later.insert(0, found)
        moved = change(moved, end, at, **{what: tuple(now)})
        moved = change(moved, end, at + 1, **{what: tuple(later)})
    for fault in find_faults(moved):
        assert (
            "does not have all" in fault
            or "lacks some" in fault
            or "has some" in fault
            or "receives" in fault
            or "in flight" in fault
        )


def test_a_dropped_receive() -> None:
    schedule = change(write("ring"), 1, 0, receives=())
    assert fault_of(schedule) == (
        "ring: Rank 0 sends kv 0[0:4] heads 0:1 to rank 1 in round 0, and rank 1 has no receive "
        "for it."
    )


def test_a_dropped_send() -> None:
    schedule = change(write("ring"), 0, 0, sends=())
    assert fault_of(schedule) == (
        "ring: Rank 1 receives kv 0[0:4] heads 0:1 from rank 0 in round 0, and rank 0 has no send "
        "for it."
    )


def test_a_dropped_message() -> None:
    schedule = change(change(write("ring"), 0, 0, sends=()), 1, 0, receives=())
    assert fault_of(schedule) == (
        "ring: Rank 1 computes in round 1 document 0 queries 4:6 keys 0:4 full, heads 0:2: it "
        "lacks some of these keys."
    )


def test_a_dropped_tile() -> None:
    schedule = write("needed-kv")
    schedule = change(schedule, 1, 1, tiles=schedule.rounds[1][1].tiles[:0])
    assert fault_of(schedule) == (
        "needed-kv: In document 0 query 4 reads key 0 in head 0 0 times instead of once."
    )


def test_a_doubled_tile() -> None:
    schedule = write("needed-kv")
    tiles = np.repeat(schedule.rounds[1][1].tiles, 2, axis=0)
    assert fault_of(change(schedule, 1, 1, tiles=tiles)) == (
        "needed-kv: In document 0 query 4 reads key 0 in head 0 2 times instead of once."
    )


def test_a_tile_that_reads_the_future() -> None:
    schedule = write("needed-kv")
    tiles = schedule.rounds[0][0].tiles.copy()
    tiles[0, 5] = 0
    assert fault_of(change(schedule, 0, 0, tiles=tiles)) == (
        "needed-kv: In document 0 query 0 reads key 1 in head 0 1 times instead of never."
    )


def test_a_tile_that_is_no_square_and_one_of_no_kind() -> None:
    schedule = write("needed-kv")
    tiles = schedule.rounds[0][0].tiles.copy()
    tiles[0, 1] = 1
    assert fault_of(change(schedule, 0, 0, tiles=tiles)) == (
        "needed-kv: Rank 0 computes in round 0 document 0 queries 1:4 keys 0:4 causal, heads 0:2: "
        "it is not square."
    )
    tiles[0, 5] = 3
    assert fault_of(change(schedule, 0, 0, tiles=tiles)) == (
        "needed-kv: Rank 0 computes in round 0 document 0 queries 1:4 keys 0:4 kind 3, heads 0:2: "
        "it is neither full, causal nor anticausal."
    )


def test_a_key_that_has_left_the_window() -> None:
    schedule = write_attention("ring", HOME, LENGTHS, heads=2, kv_heads=1, mask=Mask("window", 3))
    causal = write("ring")
    assert fault_of(dataclasses.replace(causal, masks=schedule.masks)) == (
        "ring: In document 0 query 3 reads key 0 in head 0 1 times instead of never."
    )
    assert fault_of(dataclasses.replace(schedule, masks=causal.masks)) == (
        "ring: In document 0 query 3 reads key 0 in head 0 0 times instead of once."
    )


def test_a_tile_of_heads_across_groups() -> None:
    schedule = write_attention("ring", HOME, LENGTHS, heads=4, kv_heads=2)
    tiles = schedule.rounds[0][0].tiles.copy()
    tiles[0, 7] = 3
    assert fault_of(change(schedule, 0, 0, tiles=tiles)) == (
        "ring: Rank 0 computes in round 0 document 0 queries 0:4 keys 0:4 causal, heads 0:3: it "
        "has heads that are neither whole groups nor part of one."
    )


def test_a_tile_outside_its_document() -> None:
    schedule = write("ring")
    tiles = schedule.rounds[0][0].tiles.copy()
    tiles[0, [2, 4]] = 7
    assert fault_of(change(schedule, 0, 0, tiles=tiles)) == (
        "ring: Rank 0 computes in round 0 document 0 queries 0:7 keys 0:7 causal, heads 0:2: it "
        "lies outside its document."
    )


def test_queries_that_are_not_there() -> None:
    schedule = write("ring")
    tiles = np.array([[1, 0, 1, 0, 1, 1, 0, 2]])
    assert fault_of(change(schedule, 0, 0, tiles=tiles)) == (
        "ring: Rank 0 computes in round 0 document 1 queries 0:1 keys 0:1 causal, heads 0:2: it "
        "lacks some of these queries."
    )


def test_a_message_that_comes_twice() -> None:
    schedule = write("ring")
    for rank, what in ((0, "sends"), (1, "receives")):
        messages = getattr(schedule.rounds[rank][0], what)
        schedule = change(schedule, rank, 1, **{what: messages})
    assert fault_of(schedule) == (
        "ring: Rank 1 receives kv 0[0:4] heads 0:1 in round 1 but has some of it."
    )


def test_an_output_that_stays_away() -> None:
    schedule = write("pass-q")
    at = len(schedule.rounds[0]) - 1
    schedule = change(change(schedule, 0, at, sends=()), 1, at, receives=())
    assert fault_of(schedule) == (
        "pass-q: Rank 0 computes query 4 of document 0 in head 0 but never sends it home."
    )


def test_an_output_that_leaves_too_early() -> None:
    schedule = write("pass-q")
    sends, receives = schedule.rounds[0][2].sends, schedule.rounds[1][2].receives
    schedule = change(change(schedule, 0, 2, sends=()), 1, 2, receives=())
    schedule = change(change(schedule, 0, 1, sends=sends), 1, 1, receives=receives)
    assert fault_of(schedule) == (
        "pass-q: Rank 0 sends partial 0[4:6] heads 0:2 in round 1 but has not computed all of it "
        "for another rank."
    )


def test_half_an_output_that_is_called_whole() -> None:
    schedule = write("pass-q")
    for rank, what in ((0, "sends"), (1, "receives")):
        (message,) = getattr(schedule.rounds[rank][2], what)
        whole = dataclasses.replace(message, carries="output")
        schedule = change(schedule, rank, 2, **{what: (whole,)})
    assert fault_of(schedule) == (
        "pass-q: Rank 1 receives the output of token 4 of document 0 in head 0 as complete, but "
        "2 ranks compute it."
    )


def swap_ends(schedule: AttentionSchedule) -> AttentionSchedule:
    """Two ranks, each of which receives what it asks for only once it has sent it all."""
    (one,), (other,) = schedule.rounds[0][0].sends, schedule.rounds[1][0].sends
    into_0 = Message(1, other.carries, other.runs, other.heads)
    into_1 = Message(0, one.carries, one.runs, one.heads)
    first, second = schedule.rounds[0][1], schedule.rounds[1][1]
    none = first.tiles[:0]
    later = {
        0: (Round((one,), (), none), Round((), (into_0,), none), first),
        1: (Round((other,), (), none), Round((), (into_1,), none), second),
    }
    return dataclasses.replace(schedule, rounds=(later[0], later[1]))


def test_ranks_that_wait_for_each_other() -> None:
    assert fault_of(swap_ends(write("ring"))) == (
        "ring: Rank 0 waits in round 0 for kv 0[0:4] heads 0:1 with rank 1, which lists it in its "
        "round 1 and waits in round 0."
    )


def test_messages_in_another_order() -> None:
    schedule = write_attention("ulysses", HOME, LENGTHS, heads=2, kv_heads=2)
    receives = schedule.rounds[1][0].receives[::-1]
    assert fault_of(change(schedule, 1, 0, receives=receives)) == (
        "ulysses: Rank 0 sends q 0[0:4] heads 1:2 to rank 1 in round 0, and rank 1 receives kv "
        "0[0:4] heads 1:2 first."
    )


def test_a_message_that_outlives_the_schedule() -> None:
    schedule = write("ring")
    for rank, what in ((0, "sends"), (1, "receives")):
        messages = getattr(schedule.rounds[rank][0], what)
        late = tuple(dataclasses.replace(m, rounds=3) for m in messages)
        schedule = change(schedule, rank, 0, **{what: late})
    assert fault_of(schedule) == (
        "ring: Rank 0 has a message in flight until round 2 but only 2 rounds."
    )


def test_a_message_to_nobody() -> None:
    schedule = write("ring")
    (message,) = schedule.rounds[0][0].sends
    sends = (dataclasses.replace(message, peer=2),)
    assert fault_of(change(schedule, 0, 0, sends=sends)) == (
        "ring: Rank 1 receives kv 0[0:4] heads 0:1 from rank 0 in round 0, and rank 0 has no send "
        "for it."
    )
    none = change(schedule, 1, 0, receives=())
    assert fault_of(change(none, 0, 0, sends=sends)) == (
        "ring: A message goes from rank 0 to rank 2 of 2 ranks."
    )


def test_an_empty_message() -> None:
    schedule = write("ring")
    (message,) = schedule.rounds[0][0].sends
    sends = (dataclasses.replace(message, runs=message.runs[:0]),)
    assert fault_of(change(schedule, 0, 0, sends=sends)) == (
        "ring: Rank 0 sends an empty message to rank 1 in round 0."
    )


def home_of(*pieces: list[list[int]]) -> AttentionSchedule:
    home = [np.array(each).reshape(-1, 3) for each in pieces]
    return write_attention("ring", home, [4], heads=1, kv_heads=1)


def test_tokens_without_a_home_or_with_two() -> None:
    assert fault_of(home_of([[0, 0, 2]], [[0, 3, 4]])) == (
        "ring: Token 2 of document 0 is at home on 0 ranks instead of one."
    )
    assert fault_of(home_of([[0, 0, 2]], [[0, 1, 4]])) == (
        "ring: Token 1 of document 0 is at home on 2 ranks instead of one."
    )
    assert fault_of(home_of([[0, 2, 4], [0, 0, 2]])) == (
        "ring: Rank 0 holds its pieces out of order: 0[0:2] comes after document 0 from 2."
    )
    assert fault_of(home_of([[0, 0, 5]])) == (
        "ring: Rank 0 holds tokens 0:5 of document 0, which do not exist in the 1 documents."
    )


def test_too_much_under_way() -> None:
    schedule, wire = write("all-gather"), Wire(8, element_bytes=2)
    check_attention(schedule, wire=wire, in_flight_bytes=256)
    with pytest.raises(CheckError) as caught:
        check_attention(schedule, wire=wire, in_flight_bytes=255)
    assert str(caught.value) == (
        "all-gather: Rank 0 has 256 bytes in flight; the limit is 255. A ring has fewer in flight "
        "than an all-gather."
    )
