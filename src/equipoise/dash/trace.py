"""A run's spans as a trace for Perfetto: measured, and beneath it what was predicted.

What it decides
    One process of the trace holds the measured spans, a thread a rank; a second one holds what was
    predicted, from where the first rank began: each instruction of a pipeline, else each rank's
    load and the rest of the step. Instructions are named as in ``dash.pipeline_plot``, so that a
    schedule that was explained before a run and the run's own trace read alike.

Kept true (tests/unit/dash/test_trace.py)
    Every span of the steps asked for is there once, at its time; predicted ones begin with the
    step's first instruction.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.base.disk import explain_refusal
from equipoise.base.durable import write_whole
from equipoise.base.errors import SpecError
from equipoise.base.shown import listed
from equipoise.dash.predicted import PredictedSpan, predict_spans
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


def trace_runs(records: Sequence[RunRecord], steps: Sequence[int]) -> list[dict[str, Any]]:
    """Trace events of some steps of a run, or of the sides of one; from their first span on.

    Args:
        records: The run, or each side of a run that compares policies, on one axis of time.
        steps: Numbers of steps.

    Raises:
        SpecError: a run has no span of these steps.
    """
    traced = [_trace_run(record, steps) for record in records]
    if len(traced) == 1:
        return traced[0][0]
    origin = min(begin for _, begin in traced)
    whole = []
    for at, (record, (events, begin)) in enumerate(zip(records, traced, strict=True)):
        for event in events:
            event["pid"] += 2 * at
            if "ts" in event:
                event["ts"] = round(event["ts"] + (begin - origin) * 1e6, 3)
            elif event["name"] == "process_name":
                event["args"] = {"name": f"{record.start.policy}, {event['args']['name']}"}
        whole += events
    return whole


def _trace_run(record: RunRecord, steps: Sequence[int]) -> tuple[list[dict[str, Any]], float]:
    """Trace events of some steps of a run, and the time that they count from [unix seconds].

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
            f"{record.folder} has no span of step {listed(steps)}. Its steps are {known}."
        )
    origin = min(starts)
    events = [_process(MEASURED, "measured")]
    for rank, mine in rows.items():
        spans = record.spans[rank]
        times = zip(mine.tolist(), (spans.t[mine] - origin).tolist(), strict=True)
        events += [
            _event(spans, at, MEASURED, rank, begin, float(spans.duration_s[at]))
            for at, begin in times
        ]
    predicted = predict_spans(record, steps)
    lanes = _lanes([each for mine in predicted.values() for each in mine])
    for rank, loads in predicted.items():
        for each in loads:
            begin, thread = each.begin_s - origin, rank + lanes[each.step] * record.ranks
            if each.row is None:
                fields = {"step": each.step}
                name = each.name
                events.append(_span(name, name, PREDICTED, thread, begin, each.duration_s, fields))
            else:
                spans = record.spans[rank]
                events.append(_event(spans, each.row, PREDICTED, thread, begin, each.duration_s))
    events += [_thread(MEASURED, rank, f"rank {rank}") for rank in rows]
    if lanes:
        events.append(_process(PREDICTED, "predicted"))
    for lane in sorted(set(lanes.values())):
        beside = ", steps that overlap those above" if lane else ""
        for rank in rows:
            events.append(_thread(PREDICTED, rank + lane * record.ranks, f"rank {rank}{beside}"))
    return events, origin


def _lanes(predicted: Sequence[PredictedSpan]) -> dict[int, int]:
    """Which thread of a rank has each step's predictions: the first that is free, from 0 on.

    A step may be predicted to end after the next one began, and a thread of a trace holds spans
    that overlap only where one is inside the other.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for each in predicted:
        begins[each.step] = min(each.begin_s, begins.get(each.step, math.inf))
        ends[each.step] = max(each.begin_s + each.duration_s, ends.get(each.step, -math.inf))
    lanes: dict[int, int] = {}
    free_s: list[float] = []
    for step in sorted(begins, key=lambda step: begins[step]):
        lane = next((at for at, end in enumerate(free_s) if end <= begins[step]), len(free_s))
        free_s[lane : lane + 1] = [ends[step]]
        lanes[step] = lane
    return lanes


def write_run_trace(records: Sequence[RunRecord], steps: Sequence[int], file: Path) -> None:
    """Write the events of ``trace_runs``; https://ui.perfetto.dev opens it.

    Raises:
        SpecError: no such steps, or the file cannot be written.
    """
    whole = {"displayTimeUnit": "ms", "traceEvents": trace_runs(records, steps)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(whole))
    except OSError as fault:
        raise SpecError(
            f"The trace cannot be written to {file}: {explain_refusal(fault, file)}. Give "
            f"another file with --out FILE."
        ) from fault


def _event(
    spans: Spans, at: int, process: int, thread: int, begin_s: float, takes_s: float
) -> dict[str, Any]:
    name = spans.names[spans.name[at]]
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
    return _span(shown, name, process, thread, begin_s, takes_s, known)


def _span(
    shown: str,
    name: str,
    process: int,
    thread: int,
    begin_s: float,
    takes_s: float,
    args: dict[str, int],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": shown,
        "cat": name,
        "pid": process,
        "tid": thread,
        "ts": round(begin_s * 1e6, 3),
        "dur": round(takes_s * 1e6, 3),
        "args": args,
    }


def _process(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    named = {"name": name}
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": named}
