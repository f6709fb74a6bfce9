"""A run's spans as a trace for Perfetto: measured, and beneath it what was predicted.

What it decides
    One process of the trace holds the measured spans, a thread a rank; if ranks are stages of a
    pipeline, a second one holds the times that their schedules predicted, from where the first rank
    began. Instructions are named as in ``dash.pipeline_plot``, so that a schedule that was
    explained before a run and the run's own trace read alike.

Kept true (tests/unit/dash/test_trace.py)
    Every span of the steps asked for is there once, at its time; predicted ones begin with the
    step's first instruction.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.disk import explain_refusal
from equipoise.base.durable import write_whole
from equipoise.base.errors import SpecError
from equipoise.dash.summary import steady_steps
from equipoise.observe.run_record import RunRecord, Spans
from equipoise.schedule.pipeline.instruction import Op

MEASURED, PREDICTED = 0, 1
"""Processes of the trace."""

_LETTERS = {op.span: op.letter for op in Op}


def typical_step(record: RunRecord) -> int:
    """The step of median duration, without the first step of each session.

    Raises:
        SpecError: no step has finished.
    """
    if not record.step.size:
        raise SpecError(f"{record.folder} has no finished step to trace. Let it train one.")
    steady = np.flatnonzero(steady_steps(record))
    order = steady[np.argsort(record.step_s[steady], kind="stable")]
    return int(record.step[order[(len(order) - 1) // 2]])


def pipeline_begins(record: RunRecord, rows: Mapping[int, NDArray[np.intp]]) -> dict[float, float]:
    """When the first rank began each step's pipeline [unix seconds]; empty without a pipeline.

    Args:
        record: The run.
        rows: Which spans of each rank count.
    """
    begins: dict[float, float] = {}
    for rank, chosen in rows.items():
        spans = record.spans[rank]
        staged = chosen[~np.isnan(spans.predicted_s[chosen])]
        for step, t in zip(spans.step[staged].tolist(), spans.t[staged].tolist(), strict=True):
            begins[step] = min(t, begins.get(step, math.inf))
    return begins


def trace_run(record: RunRecord, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Trace events of some steps of a run; times are from their first span on.

    Args:
        record: The run.
        steps: Numbers of steps.

    Raises:
        SpecError: the run has no span of these steps.
    """
    rows = {
        rank: np.flatnonzero(np.isin(spans.step, steps) & ~np.isnan(spans.duration_s))
        for rank, spans in enumerate(record.spans)
    }
    starts = [record.spans[rank].t[mine].min() for rank, mine in rows.items() if mine.size]
    if not starts:
        known = f"{record.step[0]} to {record.step[-1]}" if record.step.size else "none"
        raise SpecError(
            f"{record.folder} has no span of step {', '.join(map(str, steps))}. Its steps are "
            f"{known}."
        )
    begins = pipeline_begins(record, rows)
    origin = min(starts)
    events = [_process(MEASURED, "measured")]
    if begins:
        events.append(_process(PREDICTED, "predicted"))
    for rank, mine in rows.items():
        spans = record.spans[rank]
        times = zip(mine.tolist(), (spans.t[mine] - origin).tolist(), strict=True)
        events += [_event(spans, at, MEASURED, rank, begin) for at, begin in times]
        for at in mine[~np.isnan(spans.predicted_s[mine])].tolist():
            begin = begins[spans.step[at]] + spans.predicted_begin_s[at] - origin
            events.append(_event(spans, at, PREDICTED, rank, begin))
    processes = (MEASURED, PREDICTED) if begins else (MEASURED,)
    return events + [_thread(process, rank) for process in processes for rank in rows]


def write_run_trace(record: RunRecord, steps: Sequence[int], file: Path) -> None:
    """Write the events of ``trace_run``; https://ui.perfetto.dev opens it.

    Raises:
        SpecError: no such steps, or the file cannot be written.
    """
    whole = {"displayTimeUnit": "ms", "traceEvents": trace_run(record, steps)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(whole))
    except OSError as fault:
        raise SpecError(
            f"The trace cannot be written to {file}: {explain_refusal(fault, file)}. Give "
            f"another file with --out FILE."
        ) from fault


def _event(spans: Spans, at: int, process: int, rank: int, begin_s: float) -> dict[str, Any]:
    name = spans.names[spans.name[at]]
    takes_s = spans.duration_s[at] if process == MEASURED else spans.predicted_s[at]
    fields = {
        "step": spans.step[at],
        "stage": spans.stage[at],
        "micro_batch": spans.micro_batch[at],
    }
    known = {key: int(value) for key, value in fields.items() if not math.isnan(value)}
    if "stage" in known:
        shown = f"{known['stage']}{_LETTERS[name]}{known['micro_batch']}"
    else:
        shown = f"{name} {known['micro_batch']}" if "micro_batch" in known else name
    return {
        "ph": "X",
        "name": shown,
        "cat": name,
        "pid": process,
        "tid": rank,
        "ts": round(begin_s * 1e6, 3),
        "dur": round(float(takes_s) * 1e6, 3),
        "args": known,
    }


def _process(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _thread(process: int, rank: int) -> dict[str, Any]:
    named = {"name": f"rank {rank}"}
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": named}
