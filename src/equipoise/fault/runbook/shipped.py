"""The guides that come with equipoise, and which of them fits an alarm.

Kept true (tests/unit/fault/runbook/test_guides.py)
    Each is without flaws, and reaches the right conclusion on the fault that it is for, and none
    on a healthy run.
"""

import functools
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.fault.runbook.guide import Alarm, Guide
from equipoise.fault.runbook.lint import Judge, check_guide, load_guide
from equipoise.fault.runbook.markdown import read_guide


@functools.cache
def shipped_guides() -> tuple[tuple[str, str], ...]:
    """Names and texts of the guides, in order of their names."""
    folder = resources.files("equipoise.fault.runbook") / "guides"
    texts = {
        each.name.removesuffix(".md"): each.read_text(encoding="utf-8")
        for each in folder.iterdir()
        if each.name.endswith(".md")
    }
    return tuple(sorted(texts.items()))


def open_guide(asked: str, judge: Judge) -> Guide:
    """A guide that comes with equipoise, by its name, or one in a file; checked.

    Raises:
        SpecError: there is neither, or the file has flaws: each as ``file:line: sentence``.
    """
    texts = dict(shipped_guides())
    if asked in texts:
        return check_guide(texts[asked], asked, judge, file=f"{asked}.md")
    path = Path(asked)
    if not path.exists() and not path.suffix:
        raise SpecError(
            f'There is neither a guide nor a file called "{asked}". Nearest: '
            f"{nearest(asked, texts)}. All: {', '.join(texts)}."
        )
    return load_guide(path, judge)


def guide_for(event: Mapping[str, Any]) -> str:
    """The name of the guide that fits an event of a journal; empty if none does.

    >>> guide_for({"kind": "fault", "name": "nan-loss", "message": ""})
    'number-gone-bad'
    """
    best, name_of_best = 0, ""
    for name, alarms in _alarms():
        fit = max((_fits(alarm, event) for alarm in alarms), default=0)
        if fit > best:
            best, name_of_best = fit, name
    return name_of_best


@functools.cache
def _alarms() -> tuple[tuple[str, tuple[Alarm, ...]], ...]:
    return tuple((name, read_guide(text, name)[0].alarms) for name, text in shipped_guides())


def _fits(alarm: Alarm, event: Mapping[str, Any]) -> int:
    """0 if an alarm is not about an event; an alarm with a condition fits better."""
    events = alarm.events
    if events.kind != event.get("kind") or events.name not in (event.get("name"), "*"):
        return 0
    if events.where is None:
        return 1
    return 2 if events.where.value(event) is True else 0


def guide_command(name: str, run: str) -> str:
    """The command that runs a guide on a run."""
    return shlex.join(("equipoise", "drill", "--runbook", name, run))
