"""Check a guide before it runs: every step can be reached, every way ends, every name is known.

What it decides
    Which ways through the graph there are: a step is reached by a set of outcomes of the steps
    before it, and sets that contradict themselves are none. What a step reads must have been set
    on every way to it.

Kept true (tests/unit/fault/runbook/test_lint.py)
    A guide without flaws never meets an unset name, a step that waits for ever, or an end that
    says nothing.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_bytes
from equipoise.fault.runbook.expression import SAID, GuideError, ValueKind
from equipoise.fault.runbook.guide import Flaw, Guide, GuideStep, Need
from equipoise.fault.runbook.markdown import read_guide
from equipoise.fault.runbook.query import METRIC, kind_of, require_condition

Judge = Callable[[Sequence[str]], str]
"""Says what is wrong with the words of a command after ``equipoise``; empty if nothing is."""

SLOT = re.compile(r"\{([a-z]\w*)\}")
_MOST_WAYS = 4096
_MOST_STEPS = 200

_Way = frozenset[tuple[str, str]]
"""Outcomes by step; an empty outcome is that of a step that has none."""


def load_guide(path: Path, judge: Judge) -> Guide:
    """Read a guide from a file and check it.

    Raises:
        SpecError: no such file, or every flaw of it as ``file:line: sentence``.
    """
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}:1: The file is not UTF-8 text, so it is not a guide.") from error
    except OSError as error:
        raise SpecError(
            f"The guide {path} cannot be read ({explain_refusal(error, path)}). Give a Markdown "
            f"file, or the name of a guide: equipoise drill --runbook list."
        ) from error
    return check_guide(text, path.stem, judge, file=str(path))


def check_guide(text: str, name: str, judge: Judge, *, file: str) -> Guide:
    """A guide that has no flaw.

    Args:
        text: Markdown.
        name: What the guide is called.
        judge: Of commands.
        file: Where the text stands, for messages.

    Raises:
        SpecError: every flaw, as ``file:line: sentence``.
    """
    guide, flaws = read_guide(text, name)
    flaws += find_flaws(guide, judge)
    if flaws:
        rows = dict.fromkeys(sorted((flaw.line, flaw.sentence) for flaw in flaws))
        raise SpecError("\n".join(f"{file}:{line}: {sentence}" for line, sentence in rows))
    return guide


def find_flaws(guide: Guide, judge: Judge) -> list[Flaw]:
    """What is wrong with a guide that could be read."""
    if len(guide.steps) > _MOST_STEPS:
        return [Flaw(guide.steps[_MOST_STEPS].line, f"A guide has at most {_MOST_STEPS} steps.")]
    check = _Check(guide, judge)
    check.alarms()
    if check.names() and check.order():
        check.ways()
        check.values()
    check.ends()
    check.actions()
    return check.flaws


@dataclass
class _Check:
    guide: Guide
    judge: Judge
    flaws: list[Flaw] = field(default_factory=list)
    ordered: list[GuideStep] = field(default_factory=list)
    """Steps behind all that they come after."""

    @property
    def steps(self) -> dict[str, GuideStep]:
        return {step.name: step for step in self.guide.steps}

    def flaw(self, line: int, sentence: str) -> None:
        self.flaws.append(Flaw(line, sentence))

    def alarms(self) -> None:
        for alarm in self.guide.alarms:
            try:
                require_condition(alarm.events, {})
            except GuideError as error:
                self.flaw(alarm.line, str(error))
            if alarm.events.kind == METRIC:
                self.flaw(alarm.line, "An alarm is an event of a journal, not a metric.")

    def names(self) -> bool:
        """Whether every step and outcome that is named exists."""
        is_whole = True
        for step in self.guide.steps:
            for need in step.needs:
                before = self.steps.get(need.step)
                if before is None:
                    near = nearest(need.step, self.steps)
                    self.flaw(step.after_line, f'No step is called "{need.step}". Nearest: {near}.')
                    is_whole = False
                elif need.outcome and need.outcome not in _outcomes(before):
                    known = ", ".join(_outcomes(before)) or "none"
                    self.flaw(
                        step.after_line,
                        f'"{need.step}" never comes out as "{need.outcome}". Its outcomes: '
                        f"{known}.",
                    )
                    is_whole = False
        return is_whole

    def order(self) -> bool:
        """Whether steps can be put in order; a cycle cannot."""
        left = {step.name: set(step.parents) for step in self.guide.steps}
        while ready := [name for name, parents in left.items() if not parents]:
            for name in ready:
                self.ordered.append(self.steps[name])
                del left[name]
            for parents in left.values():
                parents.difference_update(ready)
        if left:
            cycle = _cycle(left)
            line = self.steps[cycle[0]].after_line
            self.flaw(line, f"These steps wait for each other: {' -> '.join(cycle)}.")
        return not left

    def ways(self) -> None:
        """Every step must be reached by a set of outcomes that can all happen."""
        reached: dict[str, list[_Way]] = {}
        for step in self.ordered:
            ways: set[_Way] = set() if step.after else {frozenset()}
            for clause in step.after:
                partial: set[_Way] = {frozenset()}
                for need in clause:
                    partial = {
                        joined
                        for way in partial
                        for before in reached[need.step]
                        for outcome in self._leaving(need.step, need.outcome)
                        if _agrees(joined := way | before | {(need.step, outcome)})
                    }
                    if len(partial) > _MOST_WAYS:
                        break
                ways |= partial
            if len(ways) > _MOST_WAYS:
                self.flaw(step.after_line, f"More than {_MOST_WAYS:,} ways lead to this step.")
                ways = set(list(ways)[:1])
            if not ways:
                self.flaw(
                    step.after_line or step.line,
                    f'"{step.name}" is never reached: what it comes after cannot all happen.',
                )
            reached[step.name] = list(ways)

    def _leaving(self, name: str, outcome: str) -> tuple[str, ...]:
        """Outcomes with which a step can be left for another."""
        if outcome:
            return () if _stops(self.steps[name], outcome) else (outcome,)
        going = tuple(each.outcome for each in self.steps[name].branches if not each.stop)
        return going or (() if self.steps[name].branches else ("",))

    def values(self) -> None:
        """Every name that is read must have been set, with a value of the right kind."""
        surely: dict[str, set[str]] = {}
        set_by: dict[str, dict[str, ValueKind]] = {}
        owner: dict[str, int] = {}
        for step in self.ordered:
            clauses = [
                set().union(*({need.step} | surely[need.step] for need in clause))
                for clause in step.after
            ]
            surely[step.name] = set.intersection(*clauses) if clauses else set()
            kinds: dict[str, ValueKind] = {}
            for name in surely[step.name]:
                kinds |= set_by[name]
            own: dict[str, ValueKind] = {}
            for query in step.queries:
                if query.name in owner:
                    line = owner[query.name]
                    self.flaw(query.line, f"Line {line} sets `{query.name}`, too. Rename one.")
                owner[query.name] = query.line
                own[query.name] = self._kind(query.line, partial(kind_of, query, kinds | own))
            set_by[step.name] = own
            self._read(step, kinds | own)

    def _kind(self, line: int, judge: Callable[[], ValueKind]) -> ValueKind:
        try:
            return judge()
        except GuideError as error:
            self.flaw(line, str(error))
            return "any"

    def _read(self, step: GuideStep, kinds: Mapping[str, ValueKind]) -> None:
        """What outcomes, the conclusion and the action of a step read."""
        has_code = step.action is not None and not step.action.changes
        code: dict[str, ValueKind] = {"exit_code": "number"} if has_code else {}
        for branch in step.branches:
            self._slots(branch.line, branch.stop, {**kinds, **code})
            if branch.condition is None:
                continue
            judge = partial(branch.condition.kind, {**kinds, **code})
            kind = self._kind(branch.line, judge)
            if kind not in ("flag", "any"):
                self.flaw(
                    branch.line, f"`{branch.condition.text}` is {SAID[kind]}, not a condition."
                )
        self._slots(step.conclusion_line, step.conclusion, {**kinds, **code})
        if step.action is not None:
            self._slots(step.action.line, " ".join(step.action.words), kinds)

    def _slots(self, line: int, text: str, kinds: Mapping[str, ValueKind]) -> None:
        for name in SLOT.findall(text):
            if name not in kinds:
                near = f" Nearest: {nearest(name, kinds)}." if kinds else ""
                self.flaw(line, f"Nothing has set `{name}` here.{near}")

    def ends(self) -> None:
        """Every step must lead somewhere, and say what is left when no condition holds."""
        followed = {need for step in self.guide.steps for need in step.needs}
        for step in self.guide.steps:
            is_last = not any(need.step == step.name for need in followed)
            if not step.branches:
                if is_last and not step.conclusion and step.action is None:
                    self.flaw(
                        step.line,
                        f'"{step.name}" leads nowhere. Let a step come after it, or conclude '
                        f"something (>).",
                    )
                continue
            self._branches(step)
            any_follows = Need(step.name) in followed or bool(step.conclusion)
            for branch in step.branches:
                is_followed = any_follows or Need(step.name, branch.outcome) in followed
                if not branch.stop and not is_followed:
                    self.flaw(
                        branch.line,
                        f'"{step.name}" = "{branch.outcome}" leads nowhere. Let a step come after '
                        f"it, or stop: and why.",
                    )

    def _branches(self, step: GuideStep) -> None:
        *_, last = step.branches
        for branch in step.branches[:-1]:
            if branch.condition is None:
                self.flaw(branch.line, "else: stands behind all conditions, once.")
        if last.condition is not None:
            self.flaw(
                last.line,
                f'"{step.name}" says nothing for the case that no condition holds. Add - else: '
                f"**outcome**.",
            )
        seen: set[str] = set()
        for branch in step.branches:
            if branch.outcome in seen:
                self.flaw(branch.line, f'"{step.name}" has the outcome "{branch.outcome}" twice.')
            seen.add(branch.outcome)

    def actions(self) -> None:
        for step in self.guide.steps:
            if step.action is None:
                continue
            if fault := self.judge(step.action.words):
                command = shlex.join(("equipoise", *step.action.words))
                self.flaw(step.action.line, f"{command}: {fault}")


def _outcomes(step: GuideStep) -> list[str]:
    return [branch.outcome for branch in step.branches]


def _stops(step: GuideStep, outcome: str) -> bool:
    return any(branch.outcome == outcome and branch.stop for branch in step.branches)


def _agrees(way: _Way) -> bool:
    return len({step for step, _ in way}) == len(way)


def _cycle(left: Mapping[str, set[str]]) -> list[str]:
    """One cycle among steps that all wait for another of them."""
    path = [next(iter(left))]
    while True:
        before = min(left[path[-1]])
        if before in path:
            return [*path[path.index(before) :], before][::-1]
        path.append(before)
