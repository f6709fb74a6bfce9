"""Ranks that are kept ready take the places of those that were killed."""

import os
import signal
from pathlib import Path

import pytest

from equipoise.fault.drill.facts import spares, state
from support.make_run import share_curve, write_run
from support.read_run import events, ranks_of
from support.verbs import train_while, wait_until

STEPS = 1_000_000
"""More than are ever trained until others are ready, which imports at the lowest priority delay."""


def test_a_killed_run_goes_on_with_the_ranks_that_were_kept_ready(
    texts: Path, cache: Path, priced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two starts of two ranks, and once more a third that is dismissed."""
    path = write_run(tmp_path, texts, cache, steps=STEPS, every_steps=50, layout="dp = 2")
    folder = share_curve(priced, tmp_path / "run")
    killed, kept = list[int](), list[int]()

    def kill() -> None:
        wait_until(lambda: len(spares(folder)) == 2)
        ready, at_work = spares(folder), ranks_of(folder)
        assert not {*ready.values()} & {*at_work.values()}
        killed.append(at_work[1])
        os.kill(killed[0], signal.SIGKILL)
        wait_until(lambda: len(events(folder, "start")) == 2)
        assert ranks_of(folder) == ready
        _, again = events(folder, "start")
        kept.append(again["resumed_step"] + 50)
        wait_until((folder / "checkpoint" / f"step-{kept[0]:06}").exists)  # past the kill
        os.kill(os.getpid(), signal.SIGTERM)

    words = (path, "--out", folder, "--fault.spares", "at-once", "--checkpoint.keep", 1000)
    code = train_while(kill, *words)
    err = capsys.readouterr().err
    assert code == 0, err
    (decided,) = events(folder, "recovery")
    assert (decided["action"], decided["fault"], decided["spares"]) == (
        "restart",
        "killed",
        "ready",
    )
    assert f"Rank 1 of 2 (pid {killed[0]}) was ended by SIGKILL" in err
    assert ranks_of(folder) == {}
    wait_until(lambda: not spares(folder))  # a rank that was never taken ends with its agent
    # Steps that were computed twice had the same loss, bit for bit.
    losses: dict[int, set[float]] = {}
    for event in events(folder, "step"):
        losses.setdefault(event["step"], set()).add(event["loss"])
    assert [step for step, seen in losses.items() if len(seen) > 1] == []
    assert [*losses] == [*range(1, len(losses) + 1)]
    assert state(folder, kept[0])
