"""Recommenders whose ranks are killed while they train: they go on, with the same weights."""

import hashlib
import os
import signal
from pathlib import Path

import pytest

from equipoise.comm.local import run_ranks
from equipoise.spec.recommend import read_recommend
from support.launch.held import Held
from support.read_run import events
from support.recsys.clicks import train_part, write_clicks
from support.verbs import train_while, wait_until

FLAGS = {"train.epochs": "12", "layout.deadline_s": "60"}
STEPS, LAST = 12 * 12, 120
"""Steps of a run, and the one that it waits at until a rank has been killed."""


def weights(folder: Path) -> str:
    """A digest of every byte of the last checkpoint."""
    state = hashlib.sha256()
    for file in sorted((folder / "checkpoint" / f"step-{STEPS:06}").iterdir()):
        state.update(file.read_bytes())
    return state.hexdigest()


def process_of(folder: Path, rank: int) -> int:
    """The process of a rank of the run in this folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if str(folder).encode() in words and f"RANK={rank}".encode() in (*words, *variables):
            return int(entry.name)
    raise AssertionError(f"rank {rank} does not run")


def test_a_killed_rank_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, held: type[Held], capfd: pytest.CaptureFixture[str]
) -> None:
    """Two starts of two ranks, and a run that nobody disturbs."""
    run_toml, folder = write_clicks(tmp_path), tmp_path / "run"
    killed, orders = list[int](), held(folder)
    orders.hold(LAST)

    def kill() -> None:
        wait_until(lambda: len(events(folder, "recommend", rank=1)) >= 30)
        killed.append(process_of(folder, 1))
        os.kill(killed[0], signal.SIGKILL)
        orders.go_on()

    flags = [f"--{key}={value}" for key, value in FLAGS.items()]
    code = train_while(kill, run_toml, "--out", folder, *flags)
    out, err = capfd.readouterr()
    assert code == 0, err
    straight = tmp_path / "straight"
    spec, base = read_recommend(run_toml, list(FLAGS.items()))
    run_ranks(2, train_part, straight, spec, base)
    assert (
        f"Rank 1 of 2 (pid {killed[0]}) was ended by SIGKILL; it left no traceback. All ranks "
        "start again from the newest whole checkpoint (restart 1 of at most 8)." in err
    )
    assert "Going on after step " in out
    assert weights(folder) == weights(straight)
    decided = events(folder, "recovery")
    assert [(each["action"], each["fault"], each["fault_rank"]) for each in decided] == [
        ("restart", "killed", 1)
    ]
    begun = [(each["world"], each["resumed_step"] > 0) for each in events(folder, "start")]
    assert begun == [(2, False), (2, True)]
    assert events(folder, "stop")[-1]["step"] == STEPS
