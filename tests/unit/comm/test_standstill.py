"""Whom a wait is blamed on, from what ranks last said of themselves."""

import dataclasses
import json

from equipoise.comm.progress import Standing, Wait
from equipoise.comm.standstill import Beat, Standstill, judge, judge_alone

GATHER = Wait("all_gather of ranks 0, 1, 2", (0, 1, 2), "0", 5)
FIX = (
    "Run the same command again to resume from the last checkpoint; if a rank was only slow, "
    "raise layout.deadline_s = 30."
)


def beat(wait: Wait | None, calls: int = 0, *, phase: str = "forward of step 2", **more) -> Beat:
    return Beat(9, phase, Standing(wait, {"0": calls}, "nn/rope.py:7 (rotate)"), "node", 41, **more)


def judged(beats: dict[int, Beat], silent: set[int] = frozenset(), wait: Wait = GATHER):
    found = judge(0, wait, 31.4, beats, set(silent), advice=FIX)
    head = f"Rank 0 has waited 31 s in {wait.what} (wait of step 2), to which "
    assert found.text.startswith(head) and found.text.endswith(f". {FIX}"), found.text
    return found.missing, found.culprits, found.text.removeprefix(head).removesuffix(f". {FIX}")


MINE = beat(GATHER, 5, phase="wait of step 2")
COME = beat(GATHER, 5)
LINE = "forward of step 2, nn/rope.py:7 (rotate)"


def test_a_rank_that_entered_fewer_has_not_come() -> None:
    assert judged({0: MINE, 1: COME, 2: beat(None, 4)}) == (
        (2,),
        (2,),
        f"rank 2 has not come: it is busy (process 41 on node; in {LINE})",
    )


def test_a_rank_that_came_and_then_was_stopped() -> None:
    assert judged({0: MINE, 1: COME, 2: COME}, {2}) == (
        (2,),
        (2,),
        f"rank 2 has not come: it gives no sign of life (process 41 on node; last in {LINE})",
    )


def test_ranks_that_left_or_never_began() -> None:
    assert judged({0: MINE, 1: beat(None, 4, has_left=True)}) == (
        (1, 2),
        (1, 2),
        "ranks 1, 2 have not come: rank 1 has ended (process 41 on node); rank 2 has given no sign "
        "of life",
    )


def test_stacks_of_named_ranks_are_kept() -> None:
    standing = Standing(None, {"0": 4}, "train/step.py:7 (run)", ("json.py:5 (loads)", "step.py:7"))
    beats = {0: MINE, 1: COME, 2: Beat(9, "forward of step 2", standing, "node", 41)}
    verdict = judge(0, GATHER, 31.4, beats, set(), advice=FIX)
    assert verdict.stacks == {"2": ["json.py:5 (loads)", "step.py:7"]}
    assert Standstill.read(json.loads(json.dumps(dataclasses.asdict(verdict)))) == verdict
    read = Beat.read(json.loads(json.dumps(dataclasses.asdict(beats[2]))))
    assert read == beats[2]


def test_those_who_wait_for_others_are_told_with_whom_they_wait_for() -> None:
    pair = Wait("all_to_all of ranks 1, 2", (1, 2), "7", 3)
    first = Beat(1, "forward of step 2", Standing(pair, {"0": 4, "7": 3}), "node", 40)
    second = Beat(1, "", Standing(None, {"0": 4, "7": 2}), "node", 42)
    assert judged({0: MINE, 1: first, 2: second}) == (
        (1, 2),
        (2,),
        "ranks 1, 2 have not come: rank 1 waits in all_to_all of ranks 1, 2 (forward of step 2); "
        "rank 2 is busy (process 42 on node; in nothing that is known)",
    )


def test_all_have_come_to_different_collectives() -> None:
    other = Wait("broadcast of ranks 0, 1, 2", (0, 1, 2), "0", 5)
    assert judged({0: MINE, 1: COME, 2: beat(other, 5)}) == (
        (),
        (),
        f"all have come and which does not end: rank 1 waits in {GATHER.what} ({LINE}); rank 2 "
        f"waits in {other.what} ({LINE})",
    )


def test_messages_of_ranks_that_wait_for_each_other() -> None:
    mine, other = (Wait(f"messages of rank {rank}", (rank,), "", 8) for rank in (1, 0))
    beats = {0: dataclasses.replace(MINE, standing=Standing(mine)), 1: beat(other)}
    assert judged(beats, wait=mine) == (
        (1,),
        (),
        f"rank 1 has not come: it waits in messages of rank 0 ({LINE})",
    )


def test_a_group_that_is_made_waits_for_those_who_are_elsewhere() -> None:
    making = Wait("new_group", (0, 1, 2))
    beats = {0: dataclasses.replace(MINE, standing=Standing(making)), 1: beat(making)}
    assert judged(beats, wait=making)[:2] == ((2,), (2,))


def test_no_more_than_six_ranks_are_told_of() -> None:
    wide = Wait("all_reduce", tuple(range(20)), "0", 5)
    missing, culprits, text = judged({0: MINE}, wait=wide)
    assert (missing, culprits) == (tuple(range(1, 20)), tuple(range(1, 20)))
    assert text.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 3 more")
    assert text.endswith("rank 6 has given no sign of life; and 13 more")


def test_what_is_left_in_the_store_is_read_back() -> None:
    for each in (MINE, beat(None, has_left=True)):
        assert Beat.read(json.loads(json.dumps(dataclasses.asdict(each)))) == each
    found = judge(0, GATHER, 31.4, {0: MINE}, set(), advice=FIX)
    assert Standstill.read(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_nobody_can_be_asked() -> None:
    found = judge_alone(3, GATHER, 31.4, "save of step 2")
    assert (found.missing, found.culprits) == ((), ())
    assert found.text == (
        "Rank 3 has waited 31 s in all_gather of ranks 0, 1, 2 (save of step 2), and the ranks' "
        "store, which would say who is missing, does not answer. Look at the host that "
        "MASTER_ADDR names and at rank 0, and run the same command again to resume from the last "
        "checkpoint."
    )
