"""How well ``equipoise calibrate`` predicts training on this machine, nothing fitted to a run.

The machine is measured once; then short runs on two ranks, each with another model,
window, precision or recomputation, are compared with its curves. Both sides are processor time, so
other load counts only through caches and memory. The last rows are predicted by the curves as the
first run corrects them: fitted on that run alone, scored on the others.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.lib.corpus import open_corpus
from bench.lib.stamp import LoadStamp, environment
from equipoise.cost.compare import compare_run, fitted
from equipoise.data.progress import SilentProgress
from equipoise.observe.reader import read_run as read_journal
from equipoise.spec.device.file import write_device_file
from equipoise.spec.device.here import this_cpu
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.load import read_run
from equipoise.train.calibrate.measure import measure_machine
from equipoise.train.calibrate.plan import CalibrationPlan

GOAL = 0.08
COMMON = (
    *("--train.steps", "6", "--train.warmup_steps", "1", "--layout.dp", "2"),
    *("--layout.pin", "true", "--pack.step_tokens", "16384"),
)
CASES = {
    "2m, 8,192": ("--model.preset", "2m", "--pack.context_tokens", "8192"),
    "2m, 2,048": ("--model.preset", "2m", "--pack.context_tokens", "2048"),
    "2m, 4,096, full recompute": (
        *("--model.preset", "2m", "--pack.context_tokens", "4096", "--train.recompute", "full"),
    ),
    "7m, 2,048": ("--model.preset", "7m", "--pack.context_tokens", "2048"),
    "2m, 4,096, bf16": (
        *("--model.preset", "2m", "--pack.context_tokens", "4096", "--train.precision", "bf16"),
    ),
}


def _train(folder: Path, options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder)]
    subprocess.run([*command, "--quiet", *COMMON, *options], check=True)


def _compare(run: Path, file: Path) -> dict[str, Any]:
    record = read_journal(run)
    return compare_run(record, ModelSpec(**record.start.model), this_cpu(file)).as_row()


def measure() -> dict[str, Any]:
    """Calibrate, train, compare."""
    open_corpus()
    stamp = LoadStamp()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, corrected = folder / "this-cpu.json", folder / "corrected.json"
        begin = time.perf_counter()
        plan = CalibrationPlan.for_run(read_run(None, []))
        device = measure_machine(plan, folder, SilentProgress())
        calibrate_s = time.perf_counter() - begin
        write_device_file(file, device)
        rows = {}
        for index, (case, options) in enumerate(CASES.items()):
            _train(folder / str(index), options)
            rows[case] = _compare(folder / str(index), file)
        record = read_journal(folder / "0")
        first = compare_run(record, ModelSpec(**record.start.model), this_cpu(file))
        write_device_file(corrected, fitted(device, first))
        again = {
            case: _compare(folder / str(index), corrected)
            for index, case in enumerate(CASES)
            if index
        }
    return {
        "what": "computing of a step, predicted by calibrated curves beside measured",
        "goal": f"mean absolute error at most {GOAL} for each run",
        "worst mape, nothing fitted": max(row["compute"]["mape"] for row in rows.values()),
        "runs, nothing fitted": rows,
        "runs, curves corrected by the first": again,
        "calibrate_s (goal 60)": calibrate_s,
        "calibrate, cores of other load": device.other_load_cores,
        "calibrate, points of fewer than six samples": device.thin_points,
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
