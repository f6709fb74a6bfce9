"""What the dashboard says of one run: a card of the list, and the head of its page.

What it decides
    Numbers are of the newest steps, as somebody who looks at a running training expects; the
    figures below them draw the whole run.

Kept true (tests/unit/dash/web/test_state.py)
    A card says nothing that the journal does not; unknown is null.
"""

import math
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.dash.figures import about
from equipoise.dash.findings import headline
from equipoise.dash.sample import bucket, plain_list
from equipoise.dash.summary import (
    find_spikes,
    highest,
    measured_busy_s,
    plain,
    skew_of,
    summarize,
    wait_share_of,
)
from equipoise.dash.web.follow import Follower
from equipoise.dash.web.state import State
from equipoise.observe.run_record import RunRecord

Table = dict[str, Any]

_NEWEST = 16
"""Steps whose median is "now"."""
_SPARK_POINTS = 80
_EVENTS = 60


def card(follower: Follower, record: RunRecord | None, state: State, label: str) -> Table:
    """A run in one row of the list; keys without a value are None."""
    row: Table = {
        "label": label,
        "folder": str(follower.folder),
        "state": state.kind,
        "state_sentence": state.sentence,
        "read_share": round(follower.read_share, 2),
        "step": follower.newest_step,
        "about": "",
        "sentence": "",
        "spark": {"x": [], "y": [], "spikes": []},
    }
    if record is None:
        return row
    steps = _steps_of(record)
    step_s = _median(record.step_s)
    left = steps - follower.newest_step if steps else 0
    is_running = state.kind == "running"
    faults = len(record.faults)
    return row | {
        "steps": steps,
        "about": about(record, max(follower.newest_step, int(record.step.size))),
        "sentence": headline([summarize(record, label)], []) if record.step.size else "",
        "loss": plain(_newest(record.loss)),
        "held_out_loss": plain(_newest(record.evaluations.loss)),
        "tokens_seen": plain(_newest(record.tokens_seen)),
        "step_s": plain(step_s),
        "predicted_step_s": plain(_median(record.predicted_step_s)),
        "tokens_per_s": plain(_median(record.tokens_per_s)),
        "skew": plain(_median(skew_of(measured_busy_s(record)))),
        "wait_share": plain(_median(wait_share_of(record))),
        "peak_memory_bytes": plain(highest(record.peak_memory_bytes)),
        "forecast_bytes": plain(record.memory.forecast_bytes) if record.memory else None,
        "left_s": plain(left * step_s) if is_running and left > 0 else None,
        "faults": faults,
        "is_thinned": follower.is_thinned,
        "held_steps": int(record.step.size),
        "spark": _spark(record),
    }


def events(record: RunRecord) -> list[Table]:
    """Starts, evaluations, faults and the stop of a run, oldest first, the newest of them."""
    rows: list[tuple[float, Table]] = []
    for number, step in enumerate(record.resumed_steps):
        text = f"Resumed after step {step:,}." if number else "Started."
        rows.append((float(step), _event("start", step, text)))
    held_out = record.evaluations
    for step, loss in zip(held_out.step.tolist(), held_out.loss.tolist(), strict=True):
        if not math.isnan(loss):
            rows.append((float(step), _event("evaluation", step, f"Held-out loss {loss:.3f}.")))
    last = float(record.step[-1]) if record.step.size else 0.0
    for fault in record.faults:
        at = last if math.isnan(fault.step) else fault.step
        said = fault.message.strip().splitlines()
        text = f"{fault.name} on rank {fault.rank}" + (f": {said[0]}" if said else ".")
        rows.append((at, _event("fault", int(at), text)))
    if record.stop is not None:
        at = last if math.isnan(record.stop.step) else record.stop.step
        word = "Finished." if record.stop.reason == "done" else f"Stopped: {record.stop.reason}."
        rows.append((at, _event("stop", int(at), word)))
    rows.sort(key=lambda row: row[0])  # in order of steps, since clocks are set back
    return [_placed(record, row) for _, row in rows[-_EVENTS:]]


def _event(kind: str, step: int, text: str) -> Table:
    return {"kind": kind, "step": step, "text": text}


def _placed(record: RunRecord, row: Table) -> Table:
    """An event with the tokens that were seen at its step, where a loss curve marks it."""
    known = ~np.isnan(record.tokens_seen)
    tokens = math.nan
    if known.any():
        places = [0, *record.step[known]], [0.0, *record.tokens_seen[known]]
        tokens = float(np.interp(row["step"], *places))
    return row | {"tokens": plain(tokens)}


def _spark(record: RunRecord) -> Table:
    """The loss as a small line over tokens, medians of even parts, and its spikes."""
    parts = bucket(record.loss, _SPARK_POINTS)
    rows = find_spikes(record.loss)
    return {
        "x": plain_list([float(np.median(record.step[part])) for part in parts]),
        "y": plain_list([float(np.median(record.loss[part])) for part in parts]),
        "spikes": [[int(record.step[row]), plain(float(record.loss[row]))] for row in rows],
    }


def _steps_of(record: RunRecord) -> int | None:
    train = record.start.spec.get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) and steps > 0 else None


def _newest(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if known.size else math.nan


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)][-_NEWEST:]
    return float(np.median(known)) if known.size else math.nan
