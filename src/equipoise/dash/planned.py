"""A run beside the plan that it obeyed: planned seconds and bytes, and measured ones.

Why
    A prediction that nobody checks is a rumour. The plan was made before any weight existed, on
    curves that were measured apart from any run.

What it decides
    Medians over the run's steps, the first of each session left out. Terms of a price that only
    computing has are one part, *computing*, held against the processor time of the rank that
    computed most; encoders of images and sound against the rank whose encoders had its core
    longest, the optimizer against its spans; messages, bubbles and waiting are what is left of the
    step. A run whose newest session did not obey a plan has none, whatever lies in its folder.

Kept true (tests/unit/dash/test_planned.py)
    Planned parts and measured parts each add up to their step, to a median's rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.errors import PlanError
from equipoise.base.units import GIB, format_bytes, format_seconds
from equipoise.cost.compare import optimizer_s
from equipoise.cost.step.spread import SHARE
from equipoise.dash.summary import plain, steady_steps
from equipoise.observe.run_record import RunRecord
from equipoise.spec.plan import LOCK, Plan, read_plan

COMPUTING = (
    "products",
    "experts",
    "attention",
    "element-wise",
    "gradient sums",
    "launches",
)
"""Terms of a price that are a rank's own computing."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One quantity, planned and measured; NaN where it was not measured."""

    name: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """Planned over measured, minus 1."""
        return self.planned / self.measured - 1 if self.measured > 0 else math.nan


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan beside its run."""

    keys: dict[str, int | str]
    """Decisions of the plan, in run.toml's words."""
    steps: int
    """Steps whose median is the measured side."""
    step_s: Beside
    interval_s: tuple[float, float] | None
    """Where 80% of such steps were expected [s]; None if the plan does not say."""
    parts: tuple[Beside, ...]
    """Seconds of computing, encoders if there are any, optimizer, and messages and waiting."""
    terms: dict[str, float]
    """Terms of the planned seconds, largest first."""
    memory_bytes: Beside
    """Peak memory of the fullest rank."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, None for NaN."""

        def beside(each: Beside) -> dict[str, Any]:
            return {key: plain(value) for key, value in asdict(each).items()} | {
                "error": plain(each.error)
            }

        return {
            "keys": self.keys,
            "steps": self.steps,
            "step_s": beside(self.step_s),
            "interval_s": None if self.interval_s is None else list(self.interval_s),
            "parts": [beside(each) for each in self.parts],
            "terms": self.terms,
            "memory_bytes": beside(self.memory_bytes),
        }


def read_planned(record: RunRecord) -> Planned | None:
    """The plan that a run obeyed, beside it; None if it obeyed none.

    Raises:
        PlanError: the plan in the folder is of another version, or torn.
    """
    if LOCK not in record.start.origins.values() or not (record.folder / LOCK).is_file():
        return None
    return hold(read_plan(record.folder / LOCK), record)


def read_plans(
    records: Sequence[RunRecord], names: Sequence[str]
) -> tuple[list[Planned | None], list[str]]:
    """The plan of every run, and a sentence for each that cannot be read."""
    plans: list[Planned | None] = []
    faults = []
    for record, name in zip(records, names, strict=True):
        try:
            plans.append(read_planned(record))
        except PlanError as error:
            plans.append(None)
            faults.append(f"{name}: {error}")
    return plans, faults


def plan_finding(plans: Sequence[Planned | None], names: Sequence[str]) -> dict[str, str]:
    """The sentence of the plan's figure, by the figure's name; empty if no run obeyed one."""
    sentences = [
        (name, planned_sentence(plan)) for plan, name in zip(plans, names, strict=True) if plan
    ]
    if not sentences:
        return {}
    return {
        "plan": " ".join(f"{name}: {text}" if len(names) > 1 else text for name, text in sentences)
    }


def hold(plan: Plan, record: RunRecord) -> Planned:
    """A plan beside a run."""
    price = plan.best.price
    terms = dict(sorted(price["terms"].items(), key=lambda each: -each[1]))
    computing = sum(value for name, value in terms.items() if name in COMPUTING)
    optimizer = float(terms.get("optimizer", 0.0))
    step_s = float(price["step_s"])
    sure = price.get("interval")
    steady = steady_steps(record)
    steps = record.step_s[steady]
    busy = _fullest(record.busy_s[steady])
    update = _fullest(optimizer_s(record)[steady])
    encode, encoded = _encode_s(record)[steady], float(terms.get("encoders", 0.0))
    has_encoders = record.encoders is not None or encoded > 0
    return Planned(
        keys=plan.best.keys,
        steps=int((~np.isnan(steps)).sum()),
        step_s=Beside("step", step_s, _median(steps)),
        interval_s=None if sure is None else (float(sure["low_s"]), float(sure["high_s"])),
        parts=(
            Beside("computing", computing, _median(busy)),
            *([Beside("encoders", encoded, _median(encode))] * has_encoders),
            Beside("optimizer", optimizer, _median(update)),
            Beside(
                "messages and waiting",
                step_s - computing - encoded - optimizer,
                _median(steps - busy - encode - update),
            ),
        ),
        terms=terms,
        memory_bytes=Beside(
            "memory",
            float(price["memory_gib_max"]) * GIB,
            float(np.nanmax(record.peak_memory_bytes))
            if not np.isnan(record.peak_memory_bytes).all()
            else math.nan,
        ),
    )


def planned_sentence(planned: Planned) -> str:
    """Step and memory, planned and measured, in one line.

    >>> step, memory = Beside("step", 1.05, 1.0), Beside("memory", 2.0**20, math.nan)
    >>> planned_sentence(Planned({}, 9, step, None, (), {}, memory))
    'A step was planned to take 1.05 s, and the median of 9 takes 1.00 s (plan +5.0%).'
    >>> planned_sentence(Planned({}, 9, step, (0.9, 1.2), (), {}, memory))[:73]
    'A step was planned to take 1.05 s (80% of such steps: 900.0 ms to 1.20 s)'
    """
    step, memory = planned.step_s, planned.memory_bytes
    said = f"A step was planned to take {format_seconds(step.planned)}"
    if planned.interval_s is not None:
        low, high = map(format_seconds, planned.interval_s)
        said += f" ({SHARE:.0%} of such steps: {low} to {high})"
    if math.isnan(step.error):
        return f"{said}; none has been measured yet."
    said += (
        f", and the median of {planned.steps:,} takes {format_seconds(step.measured)} "
        f"(plan {step.error:+.1%})"
    )
    if not math.isnan(memory.error):
        said += (
            f"; the fullest rank was planned to hold {format_bytes(memory.planned)} and holds "
            f"{format_bytes(memory.measured)} (plan {memory.error:+.1%})"
        )
    return f"{said}.".replace("(plan -", "(plan −")


def _encode_s(record: RunRecord) -> Floats:
    """Seconds that the longest encoder had its core for in each step; 0 without items."""
    seconds = np.zeros(len(record.step))
    if record.encoders is not None:
        both = np.intersect1d(record.step, record.encoders.step, return_indices=True)
        seconds[both[1]] = record.encoders.fullest_s[both[2]]
    return seconds


def _fullest(seconds: Floats) -> Floats:
    """The most that any rank has in each step; NaN where none is known."""
    answer = np.full(len(seconds), np.nan)
    known = ~np.isnan(seconds).all(axis=1)
    answer[known] = np.nanmax(seconds[known], axis=1)
    return answer


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else math.nan
