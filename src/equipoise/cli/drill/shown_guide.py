"""What ``equipoise drill --runbook`` prints: guides, their steps, and what they say of a run."""

import json
import sys
from pathlib import Path

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns
from equipoise.fault.runbook.guide import Guide, GuideStep, Need
from equipoise.fault.runbook.markdown import read_guide
from equipoise.fault.runbook.run import GuideRun, StepEnd
from equipoise.fault.runbook.shipped import shipped_guides
from equipoise.fault.runbook.words import as_command, shown

_STEPS = (
    Column("step", is_left=True, wraps=16),
    Column("state", is_left=True),
    Column("outcome", is_left=True, goes=1, wraps=12),
    Column("numbers, or why", is_left=True, wraps=24),
)
_PLAN = (
    Column("step", is_left=True, wraps=16),
    Column("after", is_left=True, wraps=20),
    Column("does", is_left=True, wraps=20),
)
_LIST = (
    Column("guide", is_left=True),
    Column("when", is_left=True, wraps=20),
    Column("title", is_left=True, goes=1, wraps=20),
)


def print_list(*, is_json: bool) -> None:
    """The guides that come with equipoise."""
    guides = [read_guide(text, name)[0] for name, text in shipped_guides()]
    rows = [(each.name, _when(each), each.title) for each in guides]
    if is_json:
        names = ("guide", "when", "title")
        answer = [dict(zip(names, row, strict=True)) for row in rows]
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return
    print_columns(make_console(), _LIST, rows, box=None, pad_edge=False)
    sys.stdout.write("equipoise drill --runbook GUIDE RUN runs one on a run's folder.\n")


def _when(guide: Guide) -> str:
    names = dict.fromkeys(f"{a.events.kind} {a.events.name}" for a in guide.alarms)
    return ", ".join(names) or "you ask"


def print_guide(guide: Guide, *, is_json: bool) -> None:
    """A guide that was checked: its steps, what they come after, and what they do."""
    rows = [(step.name, _after(step.after), _does(step)) for step in guide.steps]
    if is_json:
        names = ("step", "after", "does")
        steps = [dict(zip(names, row, strict=True)) for row in rows]
        answer = {"guide": guide.name, "title": guide.title, "when": _when(guide), "steps": steps}
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return
    console = make_console()
    console.print(f"{guide.title}. {guide.about}\n", soft_wrap=False)
    print_columns(console, _PLAN, rows, box=None, pad_edge=False)
    console.print(
        f"{len(guide.steps)} steps, no flaw. Run it: equipoise drill --runbook {guide.name} RUN",
        soft_wrap=True,
    )


def _after(after: tuple[tuple[Need, ...], ...]) -> str:
    clauses = (
        " and ".join(f"{need.step}{need.outcome and f' = {need.outcome}'}" for need in clause)
        for clause in after
    )
    return " or ".join(clauses)


def _does(step: GuideStep) -> str:
    parts = []
    if step.queries:
        parts.append(f"asks {', '.join(query.name for query in step.queries)}")
    if step.action is not None:
        command = as_command(step.action.words)
        parts.append(f"{'proposes' if step.action.changes else 'runs'} {command}")
    if step.branches:
        parts.append(f"decides: {', '.join(branch.outcome for branch in step.branches)}")
    if step.conclusion:
        parts.append("concludes")
    return "; ".join(parts)


def print_run(done: GuideRun, *, is_quiet: bool, kept: Path | None) -> None:
    """What a guide says of a run: the steps, the conclusions, the commands."""
    console = make_console()
    if not is_quiet:
        console.print(f"{done.title}: {done.subject}\n", soft_wrap=True)
        rows = [(each.name, each.state, each.outcome, _says(each)) for each in done.steps]
        print_columns(console, _STEPS, rows, box=None, pad_edge=False)
    for sentence in tell(done):
        console.print(sentence, soft_wrap=True)
    if is_quiet:
        return
    saved = f" Kept in {kept}; equipoise report draws it." if kept is not None else ""
    console.print(
        f"{len(done.steps)} steps in {format_seconds(done.took_s)}; one after the other they take "
        f"{format_seconds(done.one_by_one_s)}.{saved}",
        soft_wrap=True,
    )


def tell(done: GuideRun) -> list[str]:
    """The answer in sentences: conclusions with their commands, or that nothing is known."""
    if done.state == "concluded":
        return [_conclusion(step) for step in done.steps if step.conclusion]
    stops = [step.sentence for step in done.steps if step.state in ("stopped", "failed")]
    begin = "Unknown: this guide explains nothing here, so it stops."
    return [begin, *(f"- {sentence[:1].upper()}{sentence[1:]}" for sentence in stops)]


def _conclusion(step: StepEnd) -> str:
    action = step.action
    if action is None:
        return step.conclusion
    if action.exit_code is None:
        return f"{step.conclusion}\n  Proposed (--act runs it): {action.command}"
    return f"{step.conclusion}\n  Ran, exit code {action.exit_code}: {action.command}"


def _says(step: StepEnd) -> str:
    """The numbers of a step and its command, or why there are none."""
    if step.state != "done":
        return step.sentence
    parts = [f"{each.name} {shown(each.name, each.value)}" for each in step.evidence]
    if step.action is not None:
        code = step.action.exit_code
        parts.append(
            f"{step.action.command}: {'proposed' if code is None else f'exit code {code}'}"
        )
    return "; ".join(parts)
