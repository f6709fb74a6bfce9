"""Ranks that take turns in one process give what gloo's ranks give, and never hang."""

import torch

from equipoise.comm.local import run_ranks
from support.ranks import turns_ranks


def test_collectives_and_messages_are_those_of_gloo() -> None:
    (played,) = run_ranks(1, turns_ranks.in_turns)
    for mine, theirs in zip(played, run_ranks(4, turns_ranks.use_everything), strict=True):
        assert mine.keys() == theirs.keys()
        for name, found in mine.items():
            torch.testing.assert_close(found, theirs[name], rtol=1e-15, atol=1e-15, msg=name)


def test_who_fails_or_waits_for_ever_ends_all() -> None:
    assert run_ranks(1, turns_ranks.play, "fail", timeout_s=60) == ["ValueError: no more of it"]
    assert run_ranks(1, turns_ranks.play, "miss", timeout_s=60) == [
        "FaultError: All unfinished ranks wait for each other: rank 0 in a receive, rank 1 in "
        "barrier of 3 ranks, rank 2 in barrier of 3 ranks."
    ]
