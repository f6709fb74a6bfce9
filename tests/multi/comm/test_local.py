"""Ranks of this machine: what they answer, and how their failures are told."""

import os
from pathlib import Path

import pytest

from equipoise.base.errors import FaultError, LayoutError
from equipoise.comm.local import run_ranks
from support.ranks import on_ranks


def fault_of(world: int, function, *args, timeout_s: float = 60.0) -> str:
    with pytest.raises(FaultError) as caught:
        run_ranks(world, function, *args, timeout_s=timeout_s)
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 3])
def test_results_come_in_the_order_of_ranks(world: int) -> None:
    total = 10 * world + sum(range(world))
    assert run_ranks(world, on_ranks.count, 10) == [(rank, total) for rank in range(world)]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    message = fault_of(2, on_ranks.raise_on_rank_1)
    first, second, *_ = message.splitlines()
    assert first == "Rank 1 of 2 failed."
    assert second == "Traceback (most recent call last):"
    assert message.endswith('    raise ValueError("a bad number")\nValueError: a bad number\n')


def test_an_error_of_ours_comes_as_it_is() -> None:
    with pytest.raises(LayoutError) as caught:
        run_ranks(2, on_ranks.raise_known_on_rank_1)
    assert str(caught.value) == "One sentence."


def test_a_rank_that_dies_is_named_and_not_the_peer_that_lost_it() -> None:
    assert fault_of(2, on_ranks.die_on_rank_1) == (
        "Rank 1 of 2 failed.\nThe process was ended by SIGKILL."
    )


def test_ranks_without_an_answer_are_named_and_ended_even_if_deaf(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    run_ranks(1, on_ranks.count, 0)  # a first call starts their server, which takes seconds
    assert fault_of(2, on_ranks.sleep_deaf_on_rank_1, file, timeout_s=15.0) == (
        "Ranks [1] gave no answer within 15 s."
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_an_answer_that_cannot_be_sent_is_told() -> None:
    message = fault_of(1, on_ranks.answer_with_what_cannot_be_sent)
    assert message.startswith("Rank 0 of 1 failed.\nTraceback (most recent call last):\n")
    assert "pickle" in message
