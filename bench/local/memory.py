"""Peak memory of a rank beside its forecast: ZeRO stages, recomputation, precisions, layouts.

What a device takes beside the counted bytes is fitted on ``FITTED`` and scored on ``SCORED``, which
has other models, stages, settings, precisions and numbers of tokens.

All cases take a quarter of an hour. In parts: ``python -m bench.local.memory --keep FILE --seconds
200`` adds missing cases to FILE, begins none after 200 seconds, and prints those measured so far.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.lib.corpus import open_corpus
from bench.lib.stamp import environment
from equipoise.cost.memory.overhead import CPU_OVERHEAD

TWO = ("--layout.dp", "2")
SMALL = (*TWO, "--model.preset", "2m")
FULL = ("--train.recompute", "full")
NARROW = ("--train.precision", "bf16")
ONE = ("--pack.step_tokens", "4096")
"""A single micro-batch a step on each rank."""
MOE = ("--model.preset", "moe-3m")
FITTED = [
    (*SMALL, "--pack.context_tokens", "256"),
    SMALL,
    (*SMALL, *FULL),
    (*SMALL, *NARROW),
    (*SMALL, *NARROW, *ONE),
    (*SMALL, *ONE),
    TWO,
]
SCORED = [
    *((*SMALL, "--layout.zero", zero) for zero in ("0", "2", "3")),
    *((*SMALL, "--train.recompute", setting) for setting in ("attention", "every-2", "selective")),
    (*SMALL, "--layout.zero", "3", *FULL),
    (*SMALL, "--layout.zero", "3", *NARROW),
    (*SMALL, *NARROW, "--train.recompute", "selective"),
    (*SMALL, "--pack.step_tokens", "8192"),
    (*SMALL, *FULL, *ONE),
    (*SMALL, "--pack.context_tokens", "4096"),
    (*SMALL, "--pack.context_tokens", "8192"),
    *((*TWO, "--layout.zero", zero) for zero in ("0", "3")),
    (*TWO, *FULL),
    (*TWO, *NARROW),
    (*TWO, *MOE),
    (*TWO, *MOE, "--layout.ep", "2"),
    ("--layout.dp", "1", "--model.preset", "2m", "--layout.cp", "2"),
    ("--layout.dp", "1", "--model.preset", "2m", "--layout.tp", "2"),
    (*TWO, "--model.preset", "30m", "--pack.context_tokens", "1024"),
]
PASSING = ("loss", "working space", "communication")
PARTS = ("fixed_bytes", "kept_share", "passing_share", "size_bytes")
"""What ``fit`` finds of a ``DeviceOverhead``."""


@dataclass(frozen=True, slots=True)
class Peak:
    """What one rank counted and measured."""

    forecast_bytes: int
    measured_bytes: int
    tokens: int
    micro_batches: int
    sizes: int
    terms: dict[str, int]

    @property
    def counted_bytes(self) -> int:
        """Forecast bytes without the device's own."""
        return self.forecast_bytes - self.terms["device"]

    def sides(self, options: tuple[str, ...]) -> list[float]:
        """What each of ``PARTS`` is multiplied by."""
        kept = self.terms["activations"] if self.micro_batches > 1 else 0
        passing = sum(self.terms[name] for name in PASSING)
        if ("--layout.zero", "3") in pairwise(options):
            passing += self.terms["gathered parameters"]
        return [1.0, float(kept), float(passing), float(self.sizes * (NARROW[1] in options))]

    def shipped_bytes(self, options: tuple[str, ...]) -> float:
        """The forecast with the device as it is shipped, which may be fitted on this very run."""
        parts = [float(getattr(CPU_OVERHEAD, name)) for name in PARTS]
        sides = self.sides(options)
        return self.counted_bytes + sum(a * b for a, b in zip(parts, sides, strict=True))

    def error(self, options: tuple[str, ...]) -> float:
        """Relative error of that forecast."""
        return self.shipped_bytes(options) / self.measured_bytes - 1


def run(folder: Path, options: tuple[str, ...]) -> list[Peak]:
    """Train four steps and read the memory that each rank recorded."""
    command = [
        *(sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder), "--quiet"),
        *("--train.steps", "4", "--train.warmup_steps", "1", "--model.preset", "7m"),
        *("--pack.context_tokens", "2048", "--pack.step_tokens", "16384", *options),
    ]
    subprocess.run(command, check=True)
    peaks = []
    for file in sorted((folder / "journal").glob("*.jsonl")):
        events = map(json.loads, file.read_text().splitlines())
        peaks += [
            Peak(**{field.name: event[field.name] for field in fields(Peak)})
            for event in events
            if event["name"] == "memory"
        ]
    return peaks


def fit(cases: dict[tuple[str, ...], list[Peak]]) -> list[float]:
    """The ``PARTS`` that best explain uncounted bytes, in errors relative to measured ones."""
    sides, wanted = [], []
    for options, peaks in cases.items():
        for peak in peaks:
            sides.append([each / peak.measured_bytes for each in peak.sides(options)])
            wanted.append(1 - peak.counted_bytes / peak.measured_bytes)
    solution = np.linalg.lstsq(np.array(sides), np.array(wanted), rcond=None)[0]
    return [float(each) for each in solution]


def _row(options: tuple[str, ...], peaks: list[Peak]) -> dict[str, object]:
    """Figures of the rank whose forecast is furthest off."""
    worst = max(peaks, key=lambda peak: abs(peak.error(options)))
    counted = {name: size for name, size in worst.terms.items() if name != "device"}
    return {
        "options": " ".join(options),
        "set": "fitted" if options in FITTED else "scored",
        "tokens": worst.tokens,
        "sizes": worst.sizes,
        "forecast_mib": round(worst.shipped_bytes(options) / 2**20, 1),
        "measured_mib": round(worst.measured_bytes / 2**20, 1),
        "worst_rank_error": round(worst.error(options), 3),
        "terms_mib": {name: round(value / 2**20, 1) for name, value in counted.items()},
    }


def summarize(measured: dict[tuple[str, ...], list[Peak]]) -> dict[str, object]:
    """Errors of the measured cases, and the device parts that fit the fitted runs best.

    Cases may be missing, so that runs of several hours can be put together.
    """
    rows = [_row(case, peaks) for case, peaks in measured.items()]
    for row in rows:
        sys.stderr.write(
            f"{row['set']}  {row['options']:72} {row['forecast_mib']:8} {row['measured_mib']:8} "
            f"MiB  {row['worst_rank_error']:+.3f}\n"
        )
    parts = fit({case: measured[case] for case in FITTED if case in measured})
    errors = sorted(
        abs(each.error(case)) for case in measured if case in SCORED for each in measured[case]
    )
    errors = errors or [float("nan")]
    return {
        "what": "peak resident bytes of a rank, less the interpreter's, beside its forecast",
        "worst_error (goal 0.10)": round(errors[-1], 3),
        "median_error": round(float(np.median(errors)), 3),
        "within_goal": f"{sum(error <= 0.1 for error in errors)} of {len(errors)} ranks",
        "fitted": dict(zip(PARTS, parts, strict=True)),
        "shipped": {name: getattr(CPU_OVERHEAD, name) for name in PARTS},
        "not_measured": [" ".join(case) for case in FITTED + SCORED if case not in measured],
        "rows": rows,
        "environment": environment(),
    }


def measure(keep: Path | None = None, seconds: float = float("inf")) -> dict[str, object]:
    """Train four steps of each case.

    Args:
        keep: File of what was measured before, which this adds to.
        seconds: Begin no case after that [s].
    """
    began = time.monotonic()
    open_corpus()
    measured = {}
    if keep is not None and keep.exists():
        for line in keep.read_text().splitlines():
            case, peaks = json.loads(line)
            measured[tuple(case)] = [Peak(**peak) for peak in peaks]
    for case in FITTED + SCORED:
        if case in measured or time.monotonic() - began > seconds:
            continue
        with tempfile.TemporaryDirectory() as name:
            measured[case] = run(Path(name) / "run", case)
        if keep is not None:
            with keep.open("a") as file:
                file.write(json.dumps([case, [asdict(peak) for peak in measured[case]]]) + "\n")
    return summarize({case: measured[case] for case in FITTED + SCORED if case in measured})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    json.dump(measure(given.keep, given.seconds), sys.stdout, indent=1)
