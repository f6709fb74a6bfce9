"""Peak memory of a rank beside its forecast: ZeRO stages, recomputation, precisions, layouts.

What a device takes beside the counted bytes is fitted on ``FITTED`` and scored on ``SCORED``, which
has other models, stages, settings, precisions and numbers of tokens.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from bench.corpus import open_corpus
from bench.stamp import environment
from equipoise.cost.memory import CPU_OVERHEAD

TWO = ("--layout.dp", "2")
FULL = ("--train.recompute", "full")
NARROW = ("--train.precision", "bf16")
MOE = ("--model.preset", "moe-3m")
FITTED = [
    (*TWO, "--model.preset", "2m", "--pack.context_tokens", "256"),
    (*TWO, "--model.preset", "2m"),
    (*TWO, "--model.preset", "2m", *FULL),
    TWO,
]
SCORED = [
    *((*TWO, "--layout.zero", zero) for zero in ("0", "2", "3")),
    *(
        (*TWO, "--train.recompute", setting)
        for setting in ("attention", "every-2", "selective", "full")
    ),
    (*TWO, "--layout.zero", "3", *FULL),
    (*TWO, *NARROW),
    (*TWO, "--layout.zero", "3", *NARROW),
    (*TWO, *NARROW, "--train.recompute", "selective"),
    ("--layout.dp", "1"),
    (*TWO, "--model.preset", "2m", "--pack.context_tokens", "8192"),
    (*TWO, "--pack.context_tokens", "4096"),
    (*TWO, "--model.preset", "30m", "--pack.context_tokens", "1024"),
    (*TWO, *MOE),
    (*TWO, *MOE, "--layout.expert", "2"),
    ("--layout.dp", "1", "--layout.context", "2"),
    ("--layout.dp", "1", "--layout.tensor", "2"),
]
PASSING = ("activations", "loss", "working space", "communication")


@dataclass(frozen=True, slots=True)
class Peak:
    """One rank's forecast and measured peak."""

    forecast_bytes: int
    measured_bytes: int
    tokens: int
    terms: dict[str, int]

    @property
    def error(self) -> float:
        """Of the forecast."""
        return self.forecast_bytes / self.measured_bytes - 1

    @property
    def passing_bytes(self) -> int:
        """Counted bytes that come and go within a step."""
        return sum(self.terms[name] for name in PASSING)

    @property
    def uncounted_bytes(self) -> int:
        """Measured, and not counted."""
        return self.measured_bytes - self.forecast_bytes + self.terms["allocator"]


def run(folder: Path, options: tuple[str, ...]) -> list[Peak]:
    """Train four steps; what each rank wrote down of its memory."""
    command = [
        *(sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder), "--quiet"),
        *("--train.steps", "4", "--train.warmup_steps", "1", "--model.preset", "7m"),
        *("--pack.context_tokens", "2048", "--pack.step_tokens", "16384", *options),
    ]
    subprocess.run(command, check=True)
    found = []
    for file in sorted((folder / "journal").glob("*.jsonl")):
        events = map(json.loads, file.read_text().splitlines())
        found += [
            Peak(**{field.name: event[field.name] for field in fields(Peak)})
            for event in events
            if event["name"] == "memory"
        ]
    return found


def fit(peaks: list[Peak]) -> tuple[float, float]:
    """Fixed bytes and share of what passes that come nearest to what was not counted.

    Nearest relative to what was measured, as the score is.
    """
    weight = np.array([1 / peak.measured_bytes for peak in peaks])
    sides = np.stack([weight, weight * [peak.passing_bytes for peak in peaks]], axis=1)
    wanted = weight * [peak.uncounted_bytes for peak in peaks]
    fixed, share = np.linalg.lstsq(sides, wanted, rcond=None)[0]
    return float(fixed), float(share)


def _row(options: tuple[str, ...], peaks: list[Peak]) -> dict[str, object]:
    """Of the rank whose forecast is furthest off."""
    worst = max(peaks, key=lambda peak: abs(peak.error))
    return {
        "options": " ".join(options),
        "set": "fitted" if options in FITTED else "scored",
        "tokens": worst.tokens,
        "forecast_mib": round(worst.forecast_bytes / 2**20, 1),
        "measured_mib": round(worst.measured_bytes / 2**20, 1),
        "worst_rank_error": round(worst.error, 3),
        "terms_mib": {name: round(value / 2**20, 1) for name, value in worst.terms.items()},
    }


def measure() -> dict[str, object]:
    """Train four steps of each case."""
    open_corpus()
    with tempfile.TemporaryDirectory() as name:
        found = {case: run(Path(name) / str(i), case) for i, case in enumerate(FITTED + SCORED)}
    rows = [_row(case, peaks) for case, peaks in found.items()]
    for row in rows:
        sys.stderr.write(
            f"{row['set']}  {row['options']:72} {row['forecast_mib']:8} {row['measured_mib']:8} "
            f"MiB  {row['worst_rank_error']:+.3f}\n"
        )
    fixed_bytes, share = fit([peak for case in FITTED for peak in found[case]])
    errors = sorted(abs(peak.error) for case in SCORED for peak in found[case])
    return {
        "what": "peak resident bytes of a rank, less the interpreter's, beside cost/memory.py",
        "worst_error (goal 0.10)": round(errors[-1], 3),
        "median_error": round(float(np.median(errors)), 3),
        "within_goal": f"{sum(error <= 0.1 for error in errors)} of {len(errors)} ranks",
        "fitted": {"fixed_mib": round(fixed_bytes / 2**20, 1), "slack_share": round(share, 3)},
        "shipped": {
            "fixed_mib": round(CPU_OVERHEAD.fixed_bytes / 2**20, 1),
            "slack_share": CPU_OVERHEAD.slack_share,
        },
        "rows": rows,
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
