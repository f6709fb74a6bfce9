"""One run compared with another: how many times faster, as measured and as predicted.

Kept true (tests/unit/dash/test_summary.py)
    A ratio between runs is taken over the steps that both have, and only where they
    trained the same documents; anything else is compared by tokens a second. What was
    predicted of a run against an in-order one is taken from one run's prices alone.
    Sides of one run are compared step by step (``dash.paired``), measured and predicted alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.arrays import Floats
from equipoise.dash.paired import pair_steps
from equipoise.dash.summary import IN_ORDER, plain, steady_steps
from equipoise.observe.command import flat
from equipoise.observe.run_record import RunRecord

_DISTURBED = 0.05
"""A machine of its own keeps ranks from a core for less of their time than this."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """One run against another: how many times faster a step is, or a token where steps differ."""

    baseline: str
    label: str
    measured: float
    predicted: float
    steps: int
    is_same_documents: bool
    differs_in: tuple[str, ...]
    """Keys of run.toml whose values differ, the name left out."""
    low: float = math.nan
    """Ends of the 90% interval of ``measured``; NaN unless the runs are sides of one run."""
    high: float = math.nan
    busy: float = math.nan
    """The ratio by processor time of the fullest rank; NaN likewise."""
    busy_low: float = math.nan
    busy_high: float = math.nan
    busy_predicted: float = math.nan
    """The prediction of ``busy``: when the last rank has computed."""
    run_delay: float = math.nan
    """Share of the ranks' time in which other programs had the cores; NaN likewise."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used the cores, so that processor time tells what was won."""
        return self.run_delay > _DISTURBED and not math.isnan(self.busy_low)

    def as_json(self) -> dict[str, Any]:
        """Plain values, None for NaN."""
        return {key: plain(value) for key, value in asdict(self).items()}


def baseline_of(records: Sequence[RunRecord]) -> int:
    """The run that others are compared with: the one that packed in order, else the first."""
    in_order = [index for index, record in enumerate(records) if record.start.policy == IN_ORDER]
    return in_order[0] if len(in_order) == 1 else 0


def compare(
    baseline: RunRecord, record: RunRecord, *, baseline_label: str, label: str
) -> RunComparison:
    """Compare ``record`` with ``baseline``: a ratio above 1 means that ``record`` is faster."""
    common, ours, theirs = np.intersect1d(record.step, baseline.step, return_indices=True)
    is_same = (
        bool(common.size)
        and bool(np.array_equal(record.tokens[ours], baseline.tokens[theirs]))
        and record.start.corpus == baseline.start.corpus
        and setting_of(record, "train", "seed") == setting_of(baseline, "train", "seed")
        and record.ranks == baseline.ranks
    )
    if is_same:
        steady = steady_steps(record)[ours] & steady_steps(baseline)[theirs]
        steady = steady if steady.any() else np.ones_like(steady)
        ours, theirs = ours[steady], theirs[steady]
    else:
        ours, theirs = steady_steps(record).nonzero()[0], steady_steps(baseline).nonzero()[0]

    if is_same and is_paired(baseline, record):
        return _compare_sides(
            baseline, record, theirs, ours, baseline_label=baseline_label, label=label
        )

    def seconds_a_token(of: RunRecord, rows: NDArray[np.intp], seconds: Floats) -> float:
        known = rows[~np.isnan(seconds[rows]) & ~np.isnan(of.tokens[rows])]
        tokens = float(of.tokens[known].sum())
        return float(seconds[known].sum()) / tokens if tokens > 0 else math.nan

    def ratio(theirs_s: float, ours_s: float) -> float:
        return theirs_s / ours_s if ours_s > 0 else math.nan

    predicted_s = baseline.predicted_step_s
    if is_same and baseline.start.policy == IN_ORDER:
        # Each run measured its own prices, and a machine is never the same twice: the ratio is
        # taken within one run, which also predicted the cost of packing in order.
        predicted_s = np.full(baseline.step.size, np.nan)
        predicted_s[theirs] = _in_order_step_s(record)[ours]
    return RunComparison(
        baseline=baseline_label,
        label=label,
        measured=ratio(
            seconds_a_token(baseline, theirs, baseline.step_s),
            seconds_a_token(record, ours, record.step_s),
        ),
        predicted=ratio(
            seconds_a_token(baseline, theirs, predicted_s),
            seconds_a_token(record, ours, record.predicted_step_s),
        ),
        steps=int(ours.size),
        is_same_documents=is_same,
        differs_in=_differing(record, baseline),
    )


def is_paired(one: RunRecord, other: RunRecord) -> bool:
    """Whether two records are sides of one run, which computed each step one after the other."""
    return bool(one.start.compared) and one.start.compared == other.start.compared


def _compare_sides(
    baseline: RunRecord,
    record: RunRecord,
    theirs: NDArray[np.intp],
    ours: NDArray[np.intp],
    *,
    baseline_label: str,
    label: str,
) -> RunComparison:
    """Two sides of one run by the ratios of their steps, given as rows of each."""
    measured = pair_steps(baseline.step_s[theirs], record.step_s[ours])
    predicted = pair_steps(baseline.predicted_step_s[theirs], record.predicted_step_s[ours])
    busy = pair_steps(baseline.busy_s[theirs].max(axis=1), record.busy_s[ours].max(axis=1))
    return RunComparison(
        baseline=baseline_label,
        label=label,
        measured=measured.mean,
        predicted=predicted.mean,
        steps=measured.steps,
        is_same_documents=True,
        differs_in=_differing(record, baseline),
        low=measured.low,
        high=measured.high,
        busy=busy.mean,
        busy_low=busy.low,
        busy_high=busy.high,
        busy_predicted=pair_steps(baseline.longest_s[theirs], record.longest_s[ours]).mean,
        run_delay=_run_delay(((baseline, theirs), (record, ours))),
    )


def _run_delay(sides: Sequence[tuple[RunRecord, NDArray[np.intp]]]) -> float:
    """Share of the ranks' time in which they were ready to compute without a core."""
    delay_s = sum(float(of.run_delay_s[rows].mean(axis=1).sum()) for of, rows in sides)
    return delay_s / sum(float(of.step_s[rows].sum()) for of, rows in sides)


def _differing(record: RunRecord, baseline: RunRecord) -> tuple[str, ...]:
    pairs = _pairs(record.start.spec, baseline.start.spec)
    return tuple(
        sorted(key for key, (one, other) in pairs.items() if one != other and key != "name")
    )


def _in_order_step_s(record: RunRecord) -> Floats:
    """Seconds of each step that the run predicted for an in-order pack of its documents."""
    beside_compute_s = record.predicted_step_s - record.longest_s
    answer: Floats = record.in_order_longest_s + beside_compute_s
    return answer


def compare_all(records: Sequence[RunRecord], names: Sequence[str]) -> list[RunComparison]:
    """Every other run against the baseline, in the order given."""
    base = baseline_of(records)
    return [
        compare(records[base], record, baseline_label=names[base], label=names[index])
        for index, record in enumerate(records)
        if index != base
    ]


def setting_of(record: RunRecord, section: str, key: str) -> object:
    """A key of the run's run.toml; None if the journal does not have it."""
    table = record.start.spec.get(section)
    return table.get(key) if isinstance(table, dict) else None


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    ours, theirs = flat(one), flat(other)
    return {key: (ours.get(key), theirs.get(key)) for key in ours.keys() | theirs.keys()}
