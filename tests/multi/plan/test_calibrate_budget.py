"""A run's calibration on real ranks: killed, it goes on; in part, it prices and says so."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from equipoise.cost.curves.parts import part_curves
from equipoise.schedule.attention.price import LinkPrice
from equipoise.sim.answer import calibration_doubts
from equipoise.spec.cluster.spec import own_cluster
from equipoise.spec.device.file import read_device_file, write_device_file
from equipoise.spec.device.here import calibrated_device
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.train.calibrate.agenda import Task
from equipoise.train.calibrate.budgeted import RunCalibration, calibrate_run, device_file_of
from equipoise.train.calibrate.model import join_parts, put_together
from equipoise.train.calibrate.parts_plan import PartsPlan
from equipoise.train.calibrate.ranks import Target
from equipoise.train.calibrate.session import open_session
from support.devices.small_plan import SMALL
from support.progresses import CountedStages

MODEL = dataclasses.replace(
    preset("2m"), hidden=32, heads=2, kv_heads=2, head_width=16, ffn=48, vocab=64, layers=2
)


class KilledError(Exception):
    """The process ends here."""


def _killed(limit_s: float) -> Any:
    raise KilledError


class PartialStages(CountedStages):
    """Counts stages, some of which are left at the end."""

    def finish(self) -> None:
        assert 0 < self.done < self.total


def test_a_killed_calibration_goes_on_and_a_partial_one_says_so(tmp_path: Path) -> None:
    parts = PartsPlan(MODEL, "fp32", 128, 128, steps=1)
    calibration = RunCalibration(SMALL, parts, "zero-1", Target.cores(2), tmp_path)
    tasks = calibration.tasks()
    names = [task.name for task in tasks]
    needed = [task.name for task in tasks if task.is_needed]
    assert names[: len(needed)] == needed and needed[-1] == "steps by zero-1"
    assert not any("bf16" in name for name in needed)
    assert names[len(needed) :][:2] == ["steps by zero-0", "steps by zero-2"]

    # KilledError at its third task: what was done is in the file, whole.
    file = tmp_path / "this-cpu.session.json"
    killed = [*tasks[:2], dataclasses.replace(tasks[2], run=_killed), *tasks[3:]]
    with pytest.raises(KilledError):
        calibrate_run(killed, open_session(file, calibration.key), CountedStages())
    session = open_session(file, calibration.key)
    assert session.done == names[:2]
    assert open_session(file, "another key").done == []

    # No time at all: a session runs what is needed next, and nothing else; what was done is not run
    # again.
    run: list[str] = []
    counted = [dataclasses.replace(task, run=_counting(task, run)) for task in tasks]
    for at in range(2, len(needed)):
        left = calibrate_run(
            counted, session, PartialStages(), limit_s=0.0, clock=itertools.count().__next__
        )
        assert run == needed[2 : at + 1] and left == tuple(names[at + 1 :])

    measured = device_file_of(session, SMALL, left)
    by_way = put_together(parts, session.ways, LinkPrice(1e-4, 1e9))
    measured = dataclasses.replace(measured, parts=join_parts((), by_way))
    written = tmp_path / "this-cpu.json"
    write_device_file(written, measured)
    assert read_device_file(written) == measured
    device = calibrated_device(measured, written)
    assert device.dtypes == ("fp32",)
    assert part_curves(device, MODEL, "fp32", Layout(dp=2, zero=1)) is not None
    assert part_curves(device, MODEL, "fp32", Layout(dp=2, zero=3)) is None
    doubts = " ".join(calibration_doubts(own_cluster(device, 2)))
    assert "this-cpu is measured in part: steps by zero-0, steps by zero-2" in doubts
    assert "The same equipoise calibrate goes on with them." in doubts


def _counting(task: Task, run: list[str]) -> Any:
    def measured(limit_s: float) -> Any:
        run.append(task.name)
        return task.run(limit_s)

    return measured
