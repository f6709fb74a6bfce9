"""The timeline of a report: spans of some whole steps, and what was predicted of them.

What it decides
    Which steps a page holds: evenly chosen ones and the last, few enough to keep it light.

Kept true (tests/unit/dash/test_report.py, tests/browser/test_report.py)
    A step that is there is whole.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.dash.predicted import PredictedSpan, predict_spans
from equipoise.dash.sample import LAST_STEPS, WHOLE_STEPS, choose_evenly, plain_list
from equipoise.observe.run_record import RunRecord, Spans

SPANS = 24_000
OUTSIDE_STEPS = ("load", "measure")
"""Spans that carry a step's number and happen before any step."""

LATEST_S = 1e11
"""Later times are damage [unix seconds]; their µs would not fit in 64 bits."""
Table = dict[str, Any]


def draw_timeline(record: RunRecord, ranks: Sequence[int]) -> Table:
    """Spans of some whole steps, as columns for each rank, times in µs from the first."""
    spans_each = sum(record.spans[rank].name.size for rank in ranks) / max(1, record.step.size)
    most = max(2, min(WHOLE_STEPS, int(SPANS / max(1.0, spans_each))))
    chosen = record.step[choose_evenly(record.step.size, most, tail=min(LAST_STEPS, most // 2))]
    predicted = predict_spans(record, chosen.tolist(), ranks)
    names = sorted(
        {name for rank in ranks for name in record.spans[rank].names}
        | {each.name for mine in predicted.values() for each in mine}
    )
    origin = math.inf
    kept: list[tuple[int, NDArray[np.intp]]] = []
    for rank in ranks:
        spans = record.spans[rank]
        is_known = (np.abs(spans.t) < LATEST_S) & (np.abs(spans.duration_s) < LATEST_S)
        rows = np.flatnonzero(np.isin(spans.step, chosen) & is_known)
        kept.append((rank, rows))
        if rows.size:
            origin = min(origin, float(spans.t[rows[0]]))
    extent: dict[int, list[float]] = {}
    columns = []
    for rank, rows in kept:
        spans = record.spans[rank]
        start_us = ((spans.t[rows] - origin) * 1e6).round().astype(np.int64)
        duration_us = (spans.duration_s[rows] * 1e6).round().astype(np.int64)
        step = spans.step[rows].astype(np.int64)
        legend = np.array([names.index(name) for name in spans.names], dtype=np.int64)
        name = legend[spans.name[rows]] if rows.size else np.zeros(0, dtype=np.int64)
        columns.append(
            {
                "rank": rank,
                "name": name.tolist(),
                "t": start_us.tolist(),
                "d": duration_us.tolist(),
                "step": step.tolist(),
                "micro_batch": plain_list(spans.micro_batch[rows]),
                "predicted": _predicted(spans, predicted[rank], names, origin),
            }
        )
        inside = ~np.isin(
            spans.name[rows],
            [index for index, name in enumerate(spans.names) if name in OUTSIDE_STEPS],
        )
        for number in np.unique(step[inside]).tolist():
            at = inside & (step == number)
            low, high = float(start_us[at].min()), float((start_us + duration_us)[at].max())
            known = extent.setdefault(number, [low, high])
            known[:] = [min(known[0], low), max(known[1], high)]
    steps = [
        {"step": number, "from": extent[number][0], "to": extent[number][1]}
        for number in sorted(extent)
    ]
    # A gap follows a step whose successor in the run is not on the page.
    successor = dict(zip(record.step[:-1].tolist(), record.step[1:].tolist(), strict=True))
    for each in steps:
        following = successor.get(int(each["step"]))
        each["is_before_gap"] = following is not None and following not in extent
    return {
        "names": names,
        "ranks": columns,
        "steps": steps,
        "of": int(record.step.size),
        "ranks_of": record.ranks,
    }


def _predicted(
    spans: Spans, predicted: Sequence[PredictedSpan], names: Sequence[str], origin: float
) -> Table | None:
    """The predicted spans of a rank as columns; None if there are none."""
    if not predicted:
        return None
    micro_batch = [
        math.nan if each.row is None else float(spans.micro_batch[each.row]) for each in predicted
    ]
    return {
        "name": [names.index(each.name) for each in predicted],
        "t": [round((each.begin_s - origin) * 1e6) for each in predicted],
        "d": [round(each.duration_s * 1e6) for each in predicted],
        "micro_batch": plain_list(micro_batch),
    }
