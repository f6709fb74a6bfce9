"""The data that the report's page draws: runs as small, plain tables.

Why
    The page computes no number of its own: it scales, draws and formats. So what it shows
    can be tested here, and the page stays the same when the journal grows a field.

What is left out
    Lines have at most ``LINE_POINTS`` points (each a median, with its lowest and highest
    step beside it), the scatter ``DOTS``; bars and the timeline hold at most
    ``WHOLE_STEPS`` steps, ``SPANS`` spans and ``RANKS`` ranks a run. The page says so
    wherever that left something out. The summary numbers leave out nothing.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.arrays import Floats
from equipoise.base.units import format_count
from equipoise.dash.compare import compare_all
from equipoise.dash.figures_settings import configuration, environment, origin
from equipoise.dash.figures_timeline import draw_timeline
from equipoise.dash.findings import findings, headline
from equipoise.dash.picture import choose_picture
from equipoise.dash.planned import plan_finding, read_plans
from equipoise.dash.runbook.graph import draw_runbooks, runbook_findings, suggest_guides
from equipoise.dash.sample import LAST_STEPS, WHOLE_STEPS, bucket, choose_evenly, plain_list
from equipoise.dash.summary import (
    IN_ORDER,
    find_spikes,
    labels,
    measured_busy_s,
    skew_of,
    steady_steps,
    summarize,
    uneven_share_of,
    wait_share_of,
)
from equipoise.observe.command import flat
from equipoise.observe.run_record import RunRecord

LINE_POINTS = 200
DOTS = 600
RANKS = 64

Table = dict[str, Any]


SHARED_AXES = ("cp", "tp", "pp", "ep", "etp")
"""Degrees of a layout that are shown if they are more than one."""


def page_data(records: Sequence[RunRecord], names: Sequence[str] = ()) -> Table:
    """Everything that the page draws, as JSON's types; NaN as None.

    Args:
        records: Runs, at least one.
        names: What the page calls them; without any, ``labels`` of the runs.
    """
    names = names or labels(records)
    summaries = [summarize(record, name) for record, name in zip(records, names, strict=True)]
    comparisons = compare_all(records, names)
    plans, faults = read_plans(records, names)
    runbooks, bad = draw_runbooks(records, names)
    return {
        "headline": headline(summaries, comparisons),
        "findings": findings(records, summaries)
        | plan_finding(plans, names)
        | runbook_findings(runbooks),
        "comparisons": [each.as_json() for each in comparisons],
        "notes": [
            *_notes(records, names),
            *({"kind": "fault", "text": text} for text in (*faults, *bad)),
        ],
        "histogram": _histogram(records),
        "runs": [
            _run(record, summary.as_json()) | {"plan": None if plan is None else plan.as_json()}
            for record, summary, plan in zip(records, summaries, plans, strict=True)
        ],
        "runbooks": runbooks,
        "configuration": configuration(records),
        "environment": environment(records),
        "origins": [
            origin(record) | {"label": name} for record, name in zip(records, names, strict=True)
        ],
        "picture": picture.as_html() if (picture := choose_picture(records, names)) else "",
    }


def _run(record: RunRecord, summary: Table) -> Table:
    ranks = choose_evenly(record.ranks, RANKS)
    held_out = record.evaluations
    last_held_out = held_out.bucket_loss[-1] if held_out.step.size else np.zeros(0)
    steps, before, after = record.expert_steps or (np.zeros(0, dtype=np.int64), *np.zeros((2, 0)))
    return {
        "label": summary["label"],
        "policy": record.start.policy,
        "is_in_order": record.start.policy == IN_ORDER,
        "about": about(record, int(record.step.size)),
        "status": _status(record),
        "summary": summary,
        "lines": {
            "loss": _line(record.tokens_seen, record.loss) | {"spikes": _spikes(record)},
            "held_out": _line(held_out.step, held_out.loss),
            "held_out_lengths": _line(np.log2(held_out.least_tokens), last_held_out),
            "tokens_per_s": _line(record.step, record.tokens_per_s),
            "mfu": _line(record.step, record.mfu),
            "wait": _line(record.step, wait_share_of(record)),
            "uneven": _line(record.step, uneven_share_of(record)),
            "measured_step_s": _line(record.step, record.step_s),
            "predicted_step_s": _line(record.step, record.predicted_step_s),
            "measured_skew": _line(record.step, skew_of(measured_busy_s(record))),
            "predicted_skew": _line(record.step, record.skew),
            "in_order_skew": _line(record.step, record.in_order_skew),
            "experts_before": _line(steps, before),
            "experts_after": _line(steps, after),
        },
        "scatter": _scatter(record),
        "bars": _bars(record, ranks),
        "memory": _memory(record, ranks),
        "timeline": draw_timeline(record, ranks),
        "ranks_drawn": ranks,
    }


def _line(x: NDArray[Any], y: Floats) -> Table:
    """A point for each step; for more than LINE_POINTS, medians between lowest and highest."""
    x = x.astype(np.float64)
    parts = bucket(np.where(np.isnan(x), np.nan, y), LINE_POINTS)
    line = {
        "x": plain_list([float(np.median(x[part])) for part in parts]),
        "y": plain_list([float(np.median(y[part])) for part in parts]),
        "steps_a_point": max((part.size for part in parts), default=0),
    }
    if line["steps_a_point"] > 1:
        line["low"] = plain_list([float(y[part].min()) for part in parts])
        line["high"] = plain_list([float(y[part].max()) for part in parts])
    return line


def _spikes(record: RunRecord) -> Table:
    """The steps at which the loss spikes, where they lie on the curve."""
    rows = find_spikes(record.loss)
    return {
        "step": plain_list(record.step[rows]),
        "x": plain_list(record.tokens_seen[rows]),
        "y": plain_list(record.loss[rows]),
    }


def _scatter(record: RunRecord) -> Table:
    known = np.flatnonzero(~np.isnan(record.step_s) & ~np.isnan(record.predicted_step_s))
    rows = known[choose_evenly(known.size, DOTS)]
    steady = steady_steps(record)
    return {
        "step": plain_list(record.step[rows]),
        "predicted_s": plain_list(record.predicted_step_s[rows]),
        "measured_s": plain_list(record.step_s[rows]),
        "is_steady": steady[rows].tolist(),
        "of": int(known.size),
    }


def _bars(record: RunRecord, ranks: Sequence[int]) -> Table:
    """Work of each rank at some steps; ``typical`` is the one of median in-order skew."""
    rows = choose_evenly(record.step.size, WHOLE_STEPS, tail=LAST_STEPS)
    skew = record.in_order_skew[rows] if rows else np.zeros(0)
    order = np.argsort(skew, kind="stable")  # NaN last
    known = int((~np.isnan(skew)).sum())
    return {
        "step": plain_list(record.step[rows]),
        "in_order_s": [plain_list(record.in_order_predicted_s[row, ranks]) for row in rows],
        "predicted_s": [plain_list(record.predicted_s[row, ranks]) for row in rows],
        "busy_s": [plain_list(record.busy_s[row, ranks]) for row in rows],
        "tokens": [plain_list(record.rank_tokens[row, ranks]) for row in rows],
        "documents": [plain_list(record.rank_documents[row, ranks]) for row in rows],
        "in_order_skew": plain_list(record.in_order_skew[rows]),
        "predicted_skew": plain_list(record.skew[rows]),
        "measured_skew": plain_list(skew_of(measured_busy_s(record))[rows]),
        "typical": int(order[(known - 1) // 2]) if known else 0,
        "of": int(record.step.size),
    }


def _memory(record: RunRecord, ranks: Sequence[int]) -> Table:
    peaks = [
        float(np.nanmax(column)) if not np.isnan(column).all() else math.nan
        for column in record.peak_memory_bytes.T[list(ranks)]
    ]
    return {
        "forecast_bytes": plain_list(record.memory.forecast_bytes) if record.memory else None,
        "terms": {key: plain_list(value) for key, value in record.memory.terms.items()}
        if record.memory
        else {},
        "peak_bytes": plain_list(peaks),
    }


def _histogram(records: Sequence[RunRecord]) -> Table | None:
    corpus = records[0].start.corpus
    histogram = corpus.get("histogram")
    if not isinstance(histogram, dict) or not histogram.get("documents"):
        return None
    return {
        "edges": histogram["edges"],
        "documents": histogram["documents"],
        "tokens": histogram["tokens"],
        "total_documents": corpus.get("documents"),
        "total_tokens": corpus.get("tokens"),
        "longest_tokens": corpus.get("longest_tokens"),
        "context_tokens": flat(records[0].start.spec).get("pack.context_tokens"),
        "is_shared": all(record.start.corpus == corpus for record in records),
    }


def about(record: RunRecord, steps: int) -> str:
    """The model and how it was trained for some steps, in one line."""
    spec, model = flat(record.start.spec), record.start.model
    layers = model.get("layers", "?")
    parts = [
        f"{layers} layer{'s' * (layers != 1)} of width {model.get('hidden', '?')}",
        f"{record.ranks} rank{'s' if record.ranks > 1 else ''}",
        *(
            f"{axis} {spec[key]}"
            for axis in SHARED_AXES
            if spec.get(key := f"layout.{axis}", 1) not in (None, 1)
        ),
        f"ZeRO {spec['layout.zero']}" if "layout.zero" in spec else "",
        f"{steps:,} step{'' if steps == 1 else 's'}",
        f"{format_count(float(record.tokens_seen[-1]))} tokens"
        if record.step.size and not math.isnan(record.tokens_seen[-1])
        else "",
    ]
    return " · ".join(part for part in parts if part)


def _status(record: RunRecord) -> str:
    if record.stop is None:
        return "running, or killed"
    return record.stop.reason


_FOLLOWED = {
    "restart": "All ranks were started again",
    "shrink": "Fewer ranks went on",
    "stop": "The run ended",
}
_BECAUSE = {
    "killed": "was killed",
    "failed": "failed",
    "hung": "hung",
    "corrupt": "held bytes that had changed",
    "non-finite": "computed what is not a number",
}
"""What follows a fault, and the fault, in the words of a sentence."""


def _notes(records: Sequence[RunRecord], names: Sequence[str]) -> list[Table]:
    """What a reader must know before believing the figures; faults first."""
    notes: list[Table] = []
    for record, name in zip(records, names, strict=True):
        if record.missing_ranks:
            notes.append({"kind": "fault", "text": f"{name}: {record.missing_sentence}"})
        for fault in record.faults[:20]:
            where = "" if math.isnan(fault.step) else f" at step {fault.step:.0f}"
            notes.append(
                {
                    "kind": "fault",
                    "text": f"{name}: {fault.name} on rank {fault.rank}{where}. {fault.message}",
                }
            )
        notes += [{"kind": "note", "text": text} for text in suggest_guides(record, name)]
        for each in record.recoveries[-20:]:
            where = "" if math.isnan(each.step) else f" after step {each.step:.0f}"
            notes.append(
                {
                    "kind": "note",
                    "text": f"{name}: {_FOLLOWED.get(each.action, each.action)}{where}, because a "
                    f"rank {_BECAUSE.get(each.fault, each.fault)}. {each.message}",
                }
            )
        for alarm in record.alarms[-20:]:
            notes.append({"kind": "note", "text": f"{name}: {alarm.message}"})
        if record.stop is None:
            last = f" after step {record.step[-1]}" if record.step.size else ""
            notes.append(
                {
                    "kind": "note",
                    "text": f"{name} has no stop event: it is still running{last}, or was killed.",
                }
            )
        elif record.stop.reason != "done":
            notes.append({"kind": "note", "text": f"{name} was {record.stop.reason}."})
        if len(record.resumed_steps) > 1:
            notes.append(
                {
                    "kind": "note",
                    "text": f"{name} was resumed {len(record.resumed_steps) - 1} time(s), last at "
                    f"step {record.start.resumed_step}; a repeated step is shown by its last run.",
                }
            )
        if record.torn_lines:
            notes.append(
                {
                    "kind": "note",
                    "text": f"{name}: {record.torn_lines} journal line(s) were torn by a kill "
                    "and are not shown.",
                }
            )
    return notes
