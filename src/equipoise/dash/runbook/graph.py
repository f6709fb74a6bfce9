"""Guides that were run on runs, as the page draws them: a graph with a row for each step.

What it decides
    Rows are in an order in which no step stands above one that it comes after, else as in the
    guide. A step keeps its lane until the last one that comes after it is drawn, so that no line
    crosses a mark.

Kept true (tests/unit/dash/runbook/test_graph.py, by Hypothesis)
    Lines lead downwards, and no mark lies on a line that passes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.fault.runbook.record import read_records
from equipoise.fault.runbook.run import GuideRun, StepEnd
from equipoise.fault.runbook.shipped import guide_command, guide_for
from equipoise.fault.runbook.words import shown
from equipoise.observe.run_record import RunRecord

Table = dict[str, Any]


def draw_runbooks(
    records: Sequence[RunRecord], names: Sequence[str]
) -> tuple[list[Table], list[str]]:
    """Every guide that was run on a run, and a sentence for each record that cannot be read."""
    drawn: list[Table] = []
    faults: list[str] = []
    for record, name in zip(records, names, strict=True):
        runs, bad = read_records(record.folder)
        faults += bad
        drawn += [_draw(run, name, len(drawn) + index) for index, run in enumerate(runs)]
    return drawn, faults


def runbook_findings(drawn: Iterable[Table]) -> dict[str, str]:
    """What each guide said, by the id of its figure."""
    return {each["id"]: each["finding"] for each in drawn}


def suggest_guides(record: RunRecord, name: str) -> list[str]:
    """A sentence for each guide that fits a fault of a run."""
    fitting: list[str] = []
    for fault in record.faults:
        event = {"kind": "fault", "name": fault.name, "type": fault.type, "message": fault.message}
        fitting.append(guide_for(event))
    return [
        f"{name}: to find out why, {guide_command(guide, str(record.folder))}"
        for guide in dict.fromkeys(filter(None, fitting))
    ]


def _draw(run: GuideRun, name: str, index: int) -> Table:
    ordered = in_order({step.name: _parents(step) for step in run.steps})
    steps = {step.name: step for step in run.steps}
    lanes = lane_of(ordered, {step.name: _parents(step) for step in run.steps})
    row = {each: at for at, each in enumerate(ordered)}
    return {
        "id": f"runbook-{index}",
        "title": f"Runbook: {run.title}",
        "run": name,
        "finding": _finding(run),
        "note": _note(run),
        "lanes": 1 + max(lanes.values(), default=0),
        "steps": [_row(steps[each], lanes[each]) for each in ordered],
        "edges": [
            {"from": row[before], "to": row[each], "is_taken": _is_taken(steps, each, before)}
            for each in ordered
            for before in _parents(steps[each])
        ],
    }


def _parents(step: StepEnd) -> list[str]:
    return list(dict.fromkeys(need.step for clause in step.after for need in clause))


def in_order(parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Names so that none stands before one of its parents, else as given."""
    ordered: list[str] = []
    left = {name: {each for each in own if each in parents} for name, own in parents.items()}
    while left:
        name = next((each for each, own in left.items() if not own), next(iter(left)))
        ordered.append(name)
        del left[name]
        for own in left.values():
            own.discard(name)
    return ordered


def lane_of(ordered: Sequence[str], parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """A lane for each name, in which its line runs down to the last that comes after it."""
    last = {name: at for at, name in enumerate(ordered)}
    for at, name in enumerate(ordered):
        for parent in parents[name]:
            last[parent] = max(last.get(parent, at), at)
    lanes: dict[str, int] = {}
    busy_until: list[int] = []
    for at, name in enumerate(ordered):
        free = (lane for lane, until in enumerate(busy_until) if until <= at)
        lane = next(free, len(busy_until))
        if lane == len(busy_until):
            busy_until.append(0)
        lanes[name], busy_until[lane] = lane, last[name]
    return lanes


def _is_taken(steps: Mapping[str, StepEnd], name: str, before: str) -> bool:
    """Whether a line led to a step: it ran, and the one before came out as it had to."""
    if steps[name].state == "skipped" or before not in steps:
        return False
    return any(
        need.step == before
        and steps[before].state == "done"
        and need.outcome in ("", steps[before].outcome)
        for clause in steps[name].after
        for need in clause
    )


def _row(step: StepEnd, lane: int) -> Table:
    action = step.action
    code = "" if action is None or action.exit_code is None else f" (exit code {action.exit_code})"
    return {
        "name": step.name,
        "state": step.state,
        "outcome": step.outcome,
        "lane": lane,
        "sentence": step.sentence,
        "conclusion": step.conclusion,
        "command": "" if action is None else action.command,
        "command_is": "" if action is None else f"ran{code}" if code else "proposed",
        "numbers": [
            {
                "name": each.name,
                "value": shown(each.name, each.value),
                "asked": each.text,
                "events": each.events,
                "lines": ", ".join(each.lines),
            }
            for each in step.evidence
        ],
    }


def _finding(run: GuideRun) -> str:
    if run.conclusions:
        return " ".join(run.conclusions)
    stops = [step.sentence for step in run.steps if step.state in ("stopped", "failed")]
    return f"It explains nothing here: {' '.join(stops)}" if stops else "It explains nothing here."


def _note(run: GuideRun) -> str:
    day = str(np.datetime64(int(run.t), "s").astype("datetime64[m]")).replace("T", " ")
    return (
        f"{len(run.steps)} steps in {run.took_s:.2f} s, one after the other {run.one_by_one_s:.2f} "
        f"s; run {day} UTC on {run.subject}."
    )
