"""Ranks that are kept ready take the places of those that were killed."""

import os
import signal
from pathlib import Path

from equipoise.fault.drill.facts import spares, state
from support.make_run import share_curve, write_run
from support.read_run import events, ranks_of
from support.verbs import end_of, start, wait_until

STEPS = 4000
"""More than are trained until others are ready."""


def test_a_killed_run_goes_on_with_the_ranks_that_were_kept_ready(
    texts: Path, cache: Path, priced: Path, tmp_path: Path
) -> None:
    """Two starts of two ranks, and once more a third that is dismissed."""
    path = write_run(tmp_path, texts, cache, steps=STEPS, every_steps=50, layout="dp = 2")
    folder = share_curve(priced, tmp_path / "run")
    process = start(path, "--out", folder, "--fault.spares", "at-once", "--checkpoint.keep", 1000)
    wait_until(lambda: len(spares(folder)) == 2)
    ready, killed = spares(folder), ranks_of(folder)[1]
    assert not {*ready.values()} & {*ranks_of(folder).values()}
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: len(events(folder, "start")) == 2)
    assert ranks_of(folder) == ready
    _, again = events(folder, "start")
    done = again["resumed_step"]
    wait_until((folder / "checkpoint" / f"step-{done + 50:06}").exists)  # past the kill
    (decided,) = events(folder, "recovery")
    assert (decided["action"], decided["fault"], decided["spares"]) == (
        "restart",
        "killed",
        "ready",
    )
    process.send_signal(signal.SIGTERM)
    code, _, err = end_of(process)
    assert code == 0, err
    assert f"Rank 1 of 2 (pid {killed}) was ended by SIGKILL" in err
    assert (ranks_of(folder), spares(folder)) == ({}, {})
    # Steps that were computed twice had the same loss, bit for bit.
    losses: dict[int, set[float]] = {}
    for event in events(folder, "step"):
        losses.setdefault(event["step"], set()).add(event["loss"])
    assert [step for step, seen in losses.items() if len(seen) > 1] == []
    assert [*losses] == [*range(1, len(losses) + 1)]
    assert state(folder, done + 50)
