"""Run a guide: ask, decide, act; steps that do not need each other at the same time.

What it decides
    A step waits until all steps that it comes after are settled, then runs if the needs of one of
    its alternatives are met, and is skipped otherwise. Its values are those of the steps before
    it and its own, so that how many run at once changes nothing but the time it takes.
    An unknown condition stops a step, with the name that is unknown: no cause is guessed. An
    action that changes something is proposed, unless the user has agreed; those run one by one.

Kept true (tests/unit/fault/runbook/test_run.py, by Hypothesis)
    Each step is settled once and after all that it comes after; one worker and many give the same.

Sources
    StepFly, arXiv:2510.10074: guides as graphs, an edge's state for each outcome.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Literal

from equipoise.base.errors import EquipoiseError
from equipoise.fault.runbook.expression import Value
from equipoise.fault.runbook.guide import Branch, Guide, GuideStep, Need
from equipoise.fault.runbook.source import Evidence, QuerySource
from equipoise.fault.runbook.words import as_command, command_words, fill, unknown_in
from equipoise.observe.journal_lines import Event

State = Literal["done", "skipped", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended."""

    exit_code: int
    output: str
    """Its last lines."""


Act = Callable[[Sequence[str]], CommandEnd]
"""Runs the words of a command after ``equipoise``; raises an EquipoiseError if it cannot."""


@dataclass(frozen=True, slots=True)
class ActionRun:
    """An action of a step: run, or proposed."""

    command: str
    changes: bool
    exit_code: int | None = None
    """None if it was only proposed."""
    output: str = ""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What became of a step."""

    name: str
    state: State
    after: tuple[tuple[Need, ...], ...] = ()
    outcome: str = ""
    sentence: str = ""
    """Why it was skipped, stopped or failed; empty if it is done."""
    conclusion: str = ""
    evidence: tuple[Evidence, ...] = ()
    action: ActionRun | None = None
    took_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class GuideRun:
    """What a guide says of a run."""

    guide: str
    title: str
    subject: str
    """The run's folder, or the server."""
    state: Literal["concluded", "unknown", "failed"]
    conclusions: tuple[str, ...]
    """Likeliest first, as in the guide; empty unless ``concluded``."""
    steps: tuple[StepEnd, ...]
    t: float = field(default=0.0, compare=False)
    """When it ran [unix seconds]."""
    took_s: float = field(default=0.0, compare=False)

    @property
    def one_by_one_s(self) -> float:
        """What its steps would have taken one after the other."""
        return sum(step.took_s for step in self.steps)


@dataclass(frozen=True, slots=True)
class GuideSubject:
    """What a guide runs on."""

    name: str
    """The run's folder, or the server."""
    source: QuerySource
    start: Event | None = None
    """The newest ``start`` of the run's journal."""


def run_guide(
    guide: Guide, subject: GuideSubject, act: Act, *, agrees: bool = False, workers: int = 4
) -> GuideRun:
    """Run a guide that has been checked.

    Args:
        guide: From ``check_guide``.
        subject: The run, or the server.
        act: Runs commands.
        agrees: Whether actions that change something are run, too; else they are proposed.
        workers: Most steps at the same time.
    """
    runner = _Runner(guide, subject, act, agrees=agrees)
    began, wall = time.perf_counter(), time.time()
    steps = runner.run(workers)
    conclusions = tuple(step.conclusion for step in steps if step.conclusion)
    has_failed = any(step.state == "failed" for step in steps)
    state: Literal["concluded", "unknown", "failed"]
    state = "concluded" if conclusions else "failed" if has_failed else "unknown"
    took_s = time.perf_counter() - began
    return GuideRun(guide.name, guide.title, subject.name, state, conclusions, steps, wall, took_s)


@dataclass(frozen=True, slots=True)
class _End:
    state: State
    outcome: str = ""
    sentence: str = ""


class _Runner:
    def __init__(self, guide: Guide, subject: GuideSubject, act: Act, *, agrees: bool) -> None:
        self._guide, self._subject, self._act, self._agrees = guide, subject, act, agrees
        self._settled: dict[str, StepEnd] = {}
        self._values: dict[str, dict[str, Value]] = {}
        self._one_change = threading.Lock()

    def run(self, workers: int) -> tuple[StepEnd, ...]:
        """Settle every step; this thread alone decides which may begin."""
        left = {step.name: step for step in self._guide.steps}
        under_way: dict[Future[tuple[StepEnd, dict[str, Value]]], GuideStep] = {}
        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="step") as pool:
            while left or under_way:
                for step in [*left.values()]:
                    if any(parent not in self._settled for parent in step.parents):
                        continue
                    del left[step.name]
                    if sentence := self._why_skipped(step):
                        self._settle(StepEnd(step.name, "skipped", step.after, "", sentence), {})
                    else:
                        under_way[pool.submit(self._step, step, self._before(step))] = step
                if not under_way:
                    continue  # what was skipped may have settled what others wait for
                ended, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in ended:
                    del under_way[future]
                    self._settle(*future.result())
        return tuple(self._settled[step.name] for step in self._guide.steps)

    def _settle(self, run: StepEnd, own: dict[str, Value]) -> None:
        self._settled[run.name] = run
        self._values[run.name] = own

    def _meets(self, need: Need) -> bool:
        run = self._settled[need.step]
        return run.state == "done" and need.outcome in ("", run.outcome)

    def _why_skipped(self, step: GuideStep) -> str:
        """Why a step does not run; empty if it does."""
        if not step.after or any(all(map(self._meets, clause)) for clause in step.after):
            return ""
        missed = next(need for need in step.needs if not self._meets(need))
        run = self._settled[missed.step]
        if run.state != "done":
            return f'"{missed.step}" {"was skipped" if run.state == "skipped" else run.state}.'
        return f'"{missed.step}" came out as "{run.outcome}", not "{missed.outcome}".'

    def _before(self, step: GuideStep) -> dict[str, Value]:
        """Values of all steps before it that are done."""
        values: dict[str, Value] = {}
        names = [*step.parents]
        seen: set[str] = set()
        steps = {each.name: each for each in self._guide.steps}
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            values |= self._values[name]
            names += steps[name].parents
        return values

    def _step(self, step: GuideStep, before: dict[str, Value]) -> tuple[StepEnd, dict[str, Value]]:
        """One step, on any thread."""
        began = time.perf_counter()
        own: dict[str, Value] = {}
        evidence: list[Evidence] = []
        try:
            for query in step.queries:
                answer = self._subject.source.answer(query, {**before, **own})
                own[query.name] = answer.value
                evidence.append(answer)
            values = {**before, **own}
            action, fault = self._action(step, values)
        except EquipoiseError as error:
            action, values, fault = None, before, _End("failed", "", str(error))
        end = fault or _End("done")
        if fault is None and step.branches:
            code = None if action is None else action.exit_code
            values = {**values, "exit_code": None if code is None else float(code)}
            end = _come_out(step.branches, values)
        conclusion = fill(step.conclusion, values) if end.state == "done" else ""
        run = StepEnd(
            step.name,
            end.state,
            step.after,
            end.outcome,
            end.sentence,
            conclusion,
            tuple(evidence),
            action,
            time.perf_counter() - began,
        )
        return run, own

    def _action(
        self, step: GuideStep, values: Mapping[str, Value]
    ) -> tuple[ActionRun | None, _End | None]:
        """What became of a step's action, and how it ended the step if it did."""
        action = step.action
        if action is None:
            return None, None
        if unknown := unknown_in(action.words, values):
            names = ", ".join(unknown)
            return None, _End("stopped", "", f"The command cannot be written: {names} is unknown.")
        words = command_words(action.words, values, self._subject.name, self._subject.start)
        command = as_command(words)
        if action.changes and not self._agrees:
            return ActionRun(command, changes=True), None
        if action.changes:
            with self._one_change:
                end = self._act(words)
        else:
            end = self._act(words)
        run = ActionRun(command, action.changes, end.exit_code, end.output)
        if action.changes and end.exit_code:
            return run, _End("failed", "", f"{command} ended with exit code {end.exit_code}.")
        return run, None


def _come_out(branches: Sequence[Branch], values: Mapping[str, Value]) -> _End:
    """How a step with branches ends."""
    for branch in branches:
        holds = True if branch.condition is None else branch.condition.value(values)
        if holds is None and branch.condition is not None:
            names = [name for name in sorted(branch.condition.names) if values.get(name) is None]
            what = f"{', '.join(names)} is unknown" if names else "its values are unknown"
            said = f"Whether `{branch.condition.text}` holds cannot be known: {what}."
            return _End("stopped", "", said)
        if holds is True:
            state: State = "stopped" if branch.stop else "done"
            return _End(state, branch.outcome, fill(branch.stop, values))
    raise AssertionError(branches)  # a guide's last branch is else
