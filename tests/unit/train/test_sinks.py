"""Sinks: figures where they are wanted, one notice where a sink fails, and never a run's end."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.run.keys import keys
from equipoise.spec.run.spec import JournalSpec
from equipoise.train.sinks.catalog import SINKS, SinkRow, Sinks, wanted_sinks
from equipoise.train.sinks.sink import SinkRun
from support.wandb_log import read_runs


def test_every_sink_has_a_key_and_every_key_a_sink() -> None:
    assert [f"journal.{name}" for name in SINKS] == [
        name for name in keys() if name.startswith("journal.")
    ]


def test_no_sink_is_wanted_and_nothing_is_written(tmp_path: Path) -> None:
    sinks = Sinks(SinkRun(tmp_path, "run", {}), wanted_sinks(JournalSpec()))
    sinks.write(1, {"loss": 2.0})
    sinks.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "row"), SINKS.items())
def test_a_sink_is_not_installed(name: str, row: SinkRow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, row.package, None)
    with pytest.raises(SpecError) as caught:
        wanted_sinks(JournalSpec(**{name: True}))
    assert str(caught.value) == (
        f"journal.{name} is true and {row.label} is not installed. Run "
        f"`pip install 'equipoise[{name}]'`, or set it to false."
    )


class Kept:
    """A sink that remembers, or fails at some steps."""

    def __init__(self, faults: Mapping[int, Exception]) -> None:
        self.faults = faults
        self.rows: list[tuple[int, Mapping[str, float]]] = []

    def open(self, run: SinkRun) -> "Kept":
        del run
        return self

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if step in self.faults:
            raise self.faults[step]
        self.rows.append((step, figures))

    def close(self) -> None:
        raise RuntimeError("closing fails, too")


def write_steps(folder: Path, *kept: Kept) -> list[list[str]]:
    """Four steps; the notices after each."""
    rows = {f"sink{i}": SinkRow(f"Sink {i}", "sys", each.open) for i, each in enumerate(kept)}
    sinks = Sinks(SinkRun(folder, "run", {}), list(rows), rows)
    notices = []
    for step in range(1, 5):
        sinks.write(step, {"loss": step}, "eval")
        notices.append(sinks.take_notices())
    sinks.close()
    return notices


def test_a_failing_sink_is_given_up_with_one_notice(tmp_path: Path) -> None:
    broken, whole = Kept(dict.fromkeys((2, 3), ValueError("no\nway"))), Kept({})
    assert write_steps(tmp_path, broken, whole) == [
        [],
        ["Sink 0 failed (ValueError: no). The run goes on without it."],
        [],
        [],
    ]
    assert broken.rows == [(1, {"eval/loss": 1.0})]
    assert whole.rows == [(step, {"eval/loss": float(step)}) for step in range(1, 5)]


def test_a_disk_that_refuses_is_tried_again(tmp_path: Path) -> None:
    kept = Kept(dict.fromkeys((2, 3), PermissionError(13, "Permission denied")))
    assert write_steps(tmp_path, kept) == [
        [],
        [
            f"Sink 0's files in {tmp_path}/sink0 cannot be written (Permission denied). The run "
            "goes on without them."
        ],
        [],
        [f"Sink 0's files in {tmp_path}/sink0 can be written again; 2 steps are missing."],
    ]
    assert [step for step, _ in kept.rows] == [1, 4]


# In a process of its own: the libraries warn of things that are not ours, and start threads.
WRITE = """
import socket, sys
from pathlib import Path
from equipoise.train.sinks.catalog import Sinks
from equipoise.train.sinks.sink import SinkRun

def refuse(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
        print("network:", address)
        raise OSError(101, "Network is unreachable")
    return connect(self, address)

connect, socket.socket.connect = socket.socket.connect, refuse
name, folder = sys.argv[1], Path(sys.argv[2])
for steps in ((1, 2), (3,)):  # a run, and its resume
    sinks = Sinks(SinkRun(folder, "mine", {"train.lr": 0.5, "layout.virtual": None}), [name])
    for step in steps:
        sinks.write(step, {"loss": 4.0 - step, "lr": 0.5})
    sinks.write(steps[-1], {"loss": 7.0}, "eval")
    assert not sinks.take_notices()
    sinks.close()
"""
LOSSES = [(1, 3.0), (2, 2.0), (3, 1.0)]


def write_with(name: str, folder: Path, code: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITE + code, name, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    code = (
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "board = EventAccumulator(str(folder / name)).Reload()\n"
        "print(board.Tags()['scalars'], [(e.step, e.value) for e in board.Scalars('train/loss')])"
    )
    tags = "['train/loss', 'train/lr', 'eval/loss']"
    assert write_with("tensorboard", tmp_path, code) == f"{tags} {LOSSES}\n"


def test_wandb_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert write_with("wandb", tmp_path) == ""
    first, second = read_runs(tmp_path)
    assert first["id"] == second["id"] != ""
    assert (first["name"], first["project"]) == ("mine", "equipoise")
    assert first["config"]["train.lr"] == 0.5
    rows = [*first["history"], *second["history"]]
    assert [(row["_step"], row["train/loss"]) for row in rows] == LOSSES
    assert [row.get("eval/loss") for row in rows] == [None, 7.0, 7.0]


def test_mlflow_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code = (
        "from mlflow.tracking import MlflowClient\n"
        "client = MlflowClient(tracking_uri=(folder / name).as_uri())\n"
        "(run,) = client.search_runs(client.get_experiment_by_name('equipoise').experiment_id)\n"
        "print(run.info.run_name, run.info.status, run.data.params)\n"
        "for metric in ('train/loss', 'eval/loss'):\n"
        "    rows = client.get_metric_history(run.info.run_id, metric)\n"
        "    print([(row.step, row.value) for row in rows])"
    )
    assert write_with("mlflow", tmp_path, code).splitlines() == [
        "mine FINISHED {'layout.virtual': 'None', 'train.lr': '0.5'}",
        str(LOSSES),
        "[(2, 7.0), (3, 7.0)]",
    ]
