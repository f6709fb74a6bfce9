"""The few numbers that say how a run went.

What is measured
    Means leave out the *first step of each session*: it pays for warming up caches,
    allocators and kernels, and would be most of a short run. ``skew`` of a step is its
    fullest rank's seconds over the mean rank's; a run's skew is the mean over steps. What even
    work would give back is the fullest rank's seconds less the mean rank's, over the step's.
    Errors are medians of ``|measured - predicted| / measured``.

Kept true (tests/unit/dash/test_summary.py)
    Every number of a run is the journal's, unknown ones are NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from equipoise.base.arrays import Floats
from equipoise.observe.run_record import RunRecord

IN_ORDER = "in-order"


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers; NaN if the journal does not have it. Keys of ``report --json``."""

    label: str
    folder: str
    policy: str
    ranks: int
    steps: int
    tokens: float
    loss: float
    held_out_loss: float
    step_s: float
    predicted_step_s: float
    tokens_per_s: float
    mfu: float
    skew: float
    predicted_skew: float
    predicted_turn_skew: float
    in_order_skew: float
    wait_share: float
    uneven_share: float
    loss_spikes: tuple[int, ...]
    step_error: float
    busy_error: tuple[float, ...]
    plan_s: float
    peak_memory_bytes: float
    forecast_bytes: float
    stop: str | None
    faults: int
    missing_ranks: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, None for NaN."""
        return {key: plain(value) for key, value in asdict(self).items()}


def steady_steps(record: RunRecord) -> NDArray[np.bool_]:
    """bool[step]: False for the first step of a session, unless there is no other step."""
    steady = np.ones(record.step.size, dtype=np.bool_)
    for session, resumed_step in enumerate(record.resumed_steps):
        later = record.resumed_steps[session + 1 :]
        if all(each > resumed_step for each in later):  # no later session repeated it
            steady[record.step == resumed_step + 1] = False
    return steady if steady.any() else np.ones_like(steady)


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Labels that tell runs apart: policy, else name, else folder, else a number."""
    choices = (
        [record.start.policy for record in records],
        [str(record.start.spec.get("name", record.folder.name)) for record in records],
        [record.folder.name for record in records],
        [str(record.folder) for record in records],
    )
    for choice in choices:
        if len(set(choice)) == len(records):
            return choice
    return [f"{record.folder} ({number})" for number, record in enumerate(records, start=1)]


def measured_busy_s(record: RunRecord) -> Floats:
    """Busy seconds, float64 [step, rank]; NaN for steps of which a rank's are not known."""
    is_lost = np.isnan(record.busy_s) & ~np.isnan(record.predicted_s)
    busy_s = record.busy_s.copy()
    busy_s[is_lost.any(axis=1) | bool(record.missing_ranks)] = np.nan
    return busy_s


def skew_of(seconds: Floats) -> Floats:
    """Max over mean of each step's ranks; NaN for a step without a known rank."""
    answer = np.full(seconds.shape[0], np.nan)
    known = ~np.isnan(seconds).all(axis=1) if seconds.size else np.zeros(0, dtype=np.bool_)
    if known.any():
        mean = np.nanmean(seconds[known], axis=1)
        answer[known] = np.nanmax(seconds[known], axis=1) / np.where(mean > 0, mean, np.nan)
    return answer


def wait_share_of(record: RunRecord) -> Floats:
    """Share of each step's rank-seconds in `wait` spans and between a pipeline's instructions."""
    answer = np.full(record.step.size, np.nan)
    known = ~np.isnan(record.wait_s).all(axis=1) if record.wait_s.size else answer.astype(bool)
    known &= not record.missing_ranks
    if record.step.size and known.any():
        answer[known] = np.nanmean(record.wait_s[known], axis=1) / record.step_s[known]
    return answer


def uneven_share_of(record: RunRecord) -> Floats:
    """Share of each step's rank-seconds that even work would give back, of those spent waiting.

    Until the fullest rank has computed, the others cannot go on: on average for the fullest rank's
    busy seconds less the mean rank's. The rest of what ranks wait is spent meeting, or on another
    program. Where ranks waited less than that, they overlapped it with something else.
    """
    answer = np.full(record.step.size, np.nan)
    busy_s = measured_busy_s(record)
    known = ~np.isnan(busy_s).all(axis=1) if busy_s.size else answer.astype(bool)
    if known.any():
        fullest_s, mean_s = np.nanmax(busy_s[known], axis=1), np.nanmean(busy_s[known], axis=1)
        answer[known] = (fullest_s - mean_s) / record.step_s[known]
    return np.fmin(answer, wait_share_of(record)) if known.any() else answer


SPIKE_BEFORE = 16
"""Steps whose median a loss is held against."""
SPIKE_TIMES = 6.0
"""How many times the usual scatter a spike lies above that median."""
_LEAST_BEFORE = 8
_LEAST_SCATTER = 1e-3
"""Share of the loss itself; a smaller scatter counts as this."""


def find_spikes(loss: Floats) -> list[int]:
    """Rows of a loss curve's spikes, the highest of each run of neighbours.

    A loss spikes if it lies more than six times the usual scatter above the median of the 16 steps
    before it. The scatter is the median distance of all steps from that median, times 1.4826, so
    that a spike does not widen the measure by which it is judged.

    Args:
        loss: Of each step, NaN where unknown [nats].

    >>> find_spikes(np.array([3.0, 3.1, 2.9, 3.0, 3.1, 2.9, 3.0, 3.1, 2.9, 9.0, 7.0, 3.0]))
    [9]
    """
    rows = np.flatnonzero(~np.isnan(loss))
    known = loss[rows]
    if known.size <= _LEAST_BEFORE:
        return []
    early = [np.median(known[:at]) for at in range(_LEAST_BEFORE, min(SPIKE_BEFORE, known.size))]
    later = sliding_window_view(known[:-1], min(SPIKE_BEFORE, known.size - 1))
    medians = [*early, *np.median(later, axis=1)] if known.size > SPIKE_BEFORE else early
    above = known[_LEAST_BEFORE:] - np.array(medians)
    scatter = 1.4826 * float(np.median(np.abs(above - np.median(above))))
    least = SPIKE_TIMES * max(scatter, _LEAST_SCATTER * float(np.median(np.abs(known))))
    spikes: list[int] = []
    last = -2
    for at in np.flatnonzero(above > least).tolist():
        row = at + _LEAST_BEFORE
        if at != last + 1:
            spikes.append(row)
        elif known[row] > known[spikes[-1]]:
            spikes[-1] = row
        last = at
    return [int(rows[at]) for at in spikes]


def summarize(record: RunRecord, label: str) -> Summary:
    """The numbers of one run, over its steady steps."""
    steady = steady_steps(record)
    seconds = float(np.nansum(record.step_s[steady]))
    peak = record.peak_memory_bytes
    return Summary(
        label=label,
        folder=str(record.folder),
        policy=record.start.policy,
        ranks=record.ranks,
        steps=int(record.step.size),
        tokens=_last(record.tokens_seen),
        loss=_last(record.loss),
        held_out_loss=_last(record.evaluations.loss),
        step_s=_mean(record.step_s[steady]),
        predicted_step_s=_mean(record.predicted_step_s[steady]),
        tokens_per_s=(
            float(np.nansum(record.tokens[steady])) / seconds if seconds > 0 else math.nan
        ),
        mfu=(
            float(np.nansum((record.mfu * record.step_s)[steady])) / seconds
            if seconds > 0 and not np.isnan(record.mfu[steady]).all()
            else math.nan
        ),
        skew=_mean(skew_of(measured_busy_s(record))[steady]),
        predicted_skew=_mean(record.skew[steady]),
        predicted_turn_skew=_mean(record.turn_skew[steady]),
        in_order_skew=_mean(record.in_order_skew[steady]),
        wait_share=_mean(wait_share_of(record)[steady]),
        uneven_share=_mean(uneven_share_of(record)[steady]),
        loss_spikes=tuple(record.step[find_spikes(record.loss)].tolist()),
        step_error=_error(record.step_s[steady], record.predicted_step_s[steady]),
        busy_error=tuple(
            _error(record.busy_s[steady, rank], record.predicted_s[steady, rank])
            for rank in range(record.ranks)
        ),
        plan_s=_mean(record.plan_s[steady]),
        peak_memory_bytes=math.nan if record.missing_ranks else highest(peak),
        forecast_bytes=record.memory.forecast_bytes if record.memory else math.nan,
        stop=record.stop.reason if record.stop else None,
        faults=len(record.faults),
        missing_ranks=record.missing_ranks,
    )


def plain(value: Any) -> Any:
    """A value as JSON has it: None for NaN, lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def highest(values: Floats) -> float:
    """The greatest known value; NaN if none is known."""
    known = values[~np.isnan(values)]
    return float(known.max()) if known.size else math.nan


def _last(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if known.size else math.nan


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def _error(measured: Floats, predicted: Floats) -> float:
    """Median of |measured - predicted| / measured, where both are known."""
    known = ~np.isnan(measured) & ~np.isnan(predicted) & (measured > 0)
    if not known.any():
        return math.nan
    return float(np.median(np.abs(measured - predicted)[known] / measured[known]))
