"""What was predicted of one step, as spans of each rank.

What it decides
    A pipeline's instructions were predicted one by one. Elsewhere a rank computes for as long as
    its pack was priced, from where the first rank began; when the last rank is done, all do the
    rest of the step together: the overhead that the run measured on its first step.

Kept true (tests/unit/dash/test_picture.py, test_trace.py)
    Without a pipeline, each rank's computing is its predicted load, and a step's last span ends
    after the predicted step's seconds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.observe.run_record import RunRecord

COMPUTE, REST = "compute", "rest"
"""Names of predicted spans outside pipelines."""

_COMPUTES = ("forward", "backward")
"""How names of spans begin in which a rank computes."""


@dataclass(frozen=True, slots=True)
class PredictedSpan:
    """A span of one rank, as predicted."""

    name: str
    step: int
    begin_s: float
    """Unix seconds: predictions are relative to when the step's first rank began to compute."""
    duration_s: float
    row: int | None = None
    """The measured span that it predicts, in the rank's spans; None outside pipelines."""


def predict_spans(
    record: RunRecord, steps: Sequence[int], ranks: Sequence[int] | None = None
) -> dict[int, list[PredictedSpan]]:
    """The predicted spans of some steps, by rank; no span where nothing was predicted.

    Args:
        record: The run.
        steps: Numbers of steps.
        ranks: Whose spans; all ranks' by default.
    """
    chosen = range(record.ranks) if ranks is None else ranks
    begins = _begins_s(record, steps)
    rows = {int(step): row for row, step in enumerate(record.step.tolist())}
    spans = {}
    for rank in chosen:
        spans[rank] = list(_staged(record, begins, rank))
        staged = {span.step for span in spans[rank]}
        for step, begin_s in begins.items():
            if step not in staged and step in rows:
                spans[rank] += _whole(record, rows[step], rank, begin_s)
    return spans


def _begins_s(record: RunRecord, steps: Sequence[int]) -> dict[int, float]:
    """When the first rank began to compute each step [unix seconds], of steps that one began."""
    begins = dict.fromkeys(steps, math.inf)
    for spans in record.spans:
        names = [at for at, name in enumerate(spans.names) if name.startswith(_COMPUTES)]
        rows = np.flatnonzero(np.isin(spans.step, steps) & np.isin(spans.name, names))
        for step, t in zip(spans.step[rows].tolist(), spans.t[rows].tolist(), strict=True):
            begins[step] = min(begins[step], t)
    return {int(step): t for step, t in begins.items() if math.isfinite(t)}


def _staged(record: RunRecord, begins: Mapping[int, float], rank: int) -> Iterator[PredictedSpan]:
    """The instructions of a pipeline's rank."""
    spans = record.spans[rank]
    for at in np.flatnonzero(np.isin(spans.step, list(begins)) & ~np.isnan(spans.predicted_s)):
        step = int(spans.step[at])
        yield PredictedSpan(
            spans.names[spans.name[at]],
            step,
            begins[step] + float(spans.predicted_begin_s[at]),
            float(spans.predicted_s[at]),
            int(at),
        )


def _whole(record: RunRecord, row: int, rank: int, begin_s: float) -> Iterator[PredictedSpan]:
    """A rank's load, and what follows when the last rank has computed."""
    step, longest_s = int(record.step[row]), float(record.longest_s[row])
    computes_s = float(record.predicted_s[row, rank])
    rest_s = float(record.predicted_step_s[row]) - longest_s
    if computes_s > 0:
        yield PredictedSpan(COMPUTE, step, begin_s, computes_s)
    if rest_s > 0:
        yield PredictedSpan(REST, step, begin_s + longest_s, rest_s)
