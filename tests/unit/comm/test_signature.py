"""Calls of two ranks that can and cannot be parts of one collective, from their trails."""

import json

import pytest

from equipoise.comm.signature import (
    Call,
    Trail,
    first_mismatch,
    odd_ranks,
    read_call,
    tell_mismatch,
)


def call(op: str, dtype: str = "Float", inputs=((4,),), outputs=None) -> Call:
    inputs = [list(each) for each in inputs]
    outputs = inputs if outputs is None else [list(each) for each in outputs]
    entry = {"profiling_name": f"gloo:{op}", "input_dtypes": [dtype] if inputs else []}
    return read_call(entry | {"input_sizes": inputs, "output_sizes": outputs})


SUM = call("all_reduce")


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (call("all_reduce", inputs=[(2, 2)]), True),  # as many numbers
        (call("all_reduce", inputs=[(5,)]), False),
        (call("all_reduce", "Int"), False),
        (call("broadcast"), False),
        (call("barrier", inputs=[]), False),
    ],
)
def test_what_matches_a_sum(other: Call, is_same: bool) -> None:
    assert SUM.matches(other) is is_same and other.matches(SUM) is is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call("all_to_all", inputs=[(3,)]), call("all_to_all", inputs=[(9,)])),
        (
            call("scatter", inputs=[(3,), (3,)], outputs=[(3,)]),
            call("scatter", inputs=[], outputs=[(3,)]),
        ),
        (call("gather", outputs=[(4,), (4,)]), call("gather", outputs=[])),
    ],
)
def test_what_ranks_may_bring(one: Call, other: Call) -> None:
    assert one.matches(other) and other.matches(one)


def trail(*calls: Call, first: int = 1, members=(0, 1)) -> Trail:
    made = Trail()
    for number, each in enumerate(calls, start=first):
        made.note("0", members, number, each)
    return made


def test_the_first_difference_counts_and_numbers_line_up() -> None:
    gather = call("all_gather")
    mine = trail(SUM, SUM, gather, SUM)
    assert first_mismatch(mine, trail(SUM, gather, first=2)) is None
    assert first_mismatch(mine, trail(SUM, gather, SUM)) == ("0", 2)  # one was skipped
    assert first_mismatch(mine, trail(gather, members=(0, 1, 2))) is None  # another group's name
    assert first_mismatch(mine, trail(gather, first=9)) is None  # too long ago


def test_what_the_store_holds_is_what_was_left() -> None:
    mine = trail(*[SUM] * 70, call("all_gather", outputs=[(2, 4)]))
    words = json.dumps(mine.as_json())
    read = Trail.read(json.loads(words))
    assert len(words) < 1500  # each call's words once
    assert (min(read.calls["0"]), max(read.calls["0"])) == (8, 71)
    assert read.calls["0"][71] == mine.calls["0"][71]
    assert first_mismatch(mine, read) is None
    assert (mine.partners(0), mine.partners(1), trail(members=(3,)).partners(3)) == ([1], [0], [])


def test_the_majority_is_right_and_of_two_nobody_is() -> None:
    calls = {0: SUM, 1: call("barrier", inputs=[]), 2: SUM}
    assert odd_ranks(calls) == (1,)
    assert odd_ranks({0: SUM, 1: calls[1]}) == ()
    text = tell_mismatch(7, calls, {0: "forward of step 3"}, (0, 1, 2))
    assert text.startswith(
        "Collective 7 of ranks 0, 1, 2 does not match: ranks 0, 2 called all_reduce of float32 [4] "
        "(forward of step 3); rank 1 called barrier. Results from there on are wrong, so the ranks "
        "end. "
    )
