"""Peak memory of a rank beside its forecast, over ZeRO stages, precisions, recomputation."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.corpus import open_corpus
from bench.stamp import environment

CASES = [
    *(("--layout.dp", "2", "--layout.zero", str(zero)) for zero in range(4)),
    ("--layout.dp", "1"),
    ("--layout.dp", "2", "--train.precision", "bf16"),
    ("--layout.dp", "2", "--train.recompute", "full"),
    ("--layout.dp", "2", "--layout.zero", "3", "--train.recompute", "full"),
    ("--layout.dp", "2", "--model.preset", "2m", "--pack.context_tokens", "8192"),
    ("--layout.dp", "2", "--model.preset", "30m", "--pack.context_tokens", "1024"),
]


def _memory(folder: Path, options: tuple[str, ...]) -> dict[str, object]:
    command = [
        *(sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder), "--quiet"),
        *("--train.steps", "4", "--train.warmup_steps", "1", "--model.preset", "7m"),
        *("--pack.context_tokens", "2048", "--pack.step_tokens", "16384", *options),
    ]
    subprocess.run(command, check=True)
    worst, row = 0.0, {}
    for file in sorted((folder / "journal").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            if event["name"] == "memory":
                error = event["forecast_bytes"] / event["measured_bytes"] - 1
                worst = error if abs(error) > abs(worst) else worst
                row = event
    return {
        "options": " ".join(options),
        "forecast_mib": row["forecast_bytes"] / 2**20,
        "measured_mib": row["measured_bytes"] / 2**20,
        "worst_rank_error": worst,
    }


def measure() -> dict[str, object]:
    """Train three steps of each case."""
    open_corpus()
    with tempfile.TemporaryDirectory() as name:
        rows = [_memory(Path(name) / str(i), case) for i, case in enumerate(CASES)]
    errors = [abs(float(str(row["worst_rank_error"]))) for row in rows]
    return {
        "what": "peak resident bytes of a rank, less the interpreter's, beside cost/memory.py",
        "worst_error (goal 0.10)": max(errors),
        "rows": rows,
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
