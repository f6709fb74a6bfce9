"""Seconds from the command to the end of the first step, with a warm token cache."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.lib.corpus import open_corpus
from bench.lib.stamp import LoadStamp, environment, spread


def _first_step_s(folder: Path, *options: str) -> float:
    began = time.time()
    command = [
        *(sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder), "--quiet"),
        *("--train.steps", "1", "--train.warmup_steps", "0", "--layout.dp", "2", *options),
    ]
    subprocess.run(command, check=True)
    for line in (folder / "journal" / "rank-00000.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "scalar" and event["name"] == "step":
            return float(event["t"]) - began - float(event["step_s"])
    raise RuntimeError(f"no step in {folder}")


def measure() -> dict[str, object]:
    """Start runs of one step; the first after a change of model or machine measures its curve."""
    open_corpus()
    stamp = LoadStamp()
    with tempfile.TemporaryDirectory() as name:
        # No curve is cached for an odd window, so these starts measure one.
        cold = [
            _first_step_s(
                Path(name) / f"cold{index}",
                "--pack.context_tokens",
                str(8192 - 2 * (index + 1 + int(time.time()) % 997)),
                "--pack.step_tokens",
                str(4 * (8192 - 2 * (index + 1 + int(time.time()) % 997))),
            )
            for index in range(2)
        ]
        warm = [_first_step_s(Path(name) / f"warm{index}") for index in range(4)]
    return {
        "what": "command to the start of the first step, two ranks, warm token cache (measured)",
        "with a kept curve (goal 10 s)": spread(warm[1:]),
        "measuring the curve (goal 10 s)": spread(cold),
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
