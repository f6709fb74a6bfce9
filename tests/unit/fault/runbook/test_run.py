"""Guides as graphs: order, once, the same for any number of workers; actions and their consent."""

import threading
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import FaultError
from equipoise.fault.runbook.expression import Value, parse_expression
from equipoise.fault.runbook.guide import Action, Branch, Guide, GuideStep, Need
from equipoise.fault.runbook.lint import check_guide, find_flaws
from equipoise.fault.runbook.query import Query, parse_query
from equipoise.fault.runbook.run import CommandEnd, GuideRun, GuideSubject, run_guide
from equipoise.fault.runbook.source import Evidence


class Recorder:
    """Answers each query by its expression, and keeps the order in which they were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def answer(self, query: Query, values: Mapping[str, Value]) -> Evidence:
        with self._lock:
            self.asked.append(query.name)
        value = None if query.expression is None else query.expression.value(values)
        return Evidence(query.name, query.text, value)


def no_act(words: Sequence[str]) -> CommandEnd:
    raise AssertionError(words)


@st.composite
def guides(draw: st.DrawFn) -> Guide:
    """Graphs of steps with one value each, whose outcomes follow from it."""
    count = draw(st.integers(1, 9))
    steps: list[GuideStep] = []
    for at in range(count):
        clauses = draw(
            st.lists(
                st.lists(
                    st.tuples(st.integers(0, max(0, at - 1)), st.sampled_from(["", "low", "high"])),
                    min_size=1,
                    max_size=3,
                    unique_by=lambda each: each[0],
                ),
                max_size=2 if at else 0,
            )
        )
        after = tuple(
            tuple(Need(f"s{index}", outcome) for index, outcome in clause) for clause in clauses
        )
        number = draw(st.integers(0, 9))
        unknown = draw(st.sampled_from([f"v{at} > 4"] * 4 + [f"v{at} > nothing"]))
        stop = draw(st.sampled_from(["", "", "it stops"]))
        steps.append(
            GuideStep(
                f"s{at}",
                at + 1,
                after,
                queries=(parse_query(f"v{at} = {number}", at + 1),),
                branches=(
                    Branch(at + 1, "high", parse_expression(unknown), stop),
                    Branch(at + 1, "low", None),
                ),
                conclusion=draw(st.sampled_from(["", f"value {{v{at}}}"])),
            )
        )
    return Guide("drawn", "Drawn", "", (), tuple(draw(st.permutations(steps))))


def run_with(guide: Guide, workers: int) -> tuple[GuideRun, list[str]]:
    source = Recorder()
    return run_guide(guide, GuideSubject("run", source), no_act, workers=workers), source.asked


@settings(max_examples=20)
@given(guide=guides())
def test_each_step_is_settled_once_and_after_what_it_needs(guide: Guide) -> None:
    one, asked = run_with(guide, 1)
    many, asked_by_many = run_with(guide, 8)
    assert one == many
    assert sorted(asked) == sorted(asked_by_many)
    assert len(asked) == len(set(asked))
    assert [step.name for step in one.steps] == [step.name for step in guide.steps]
    ended = {step.name: step for step in one.steps}
    for order in (asked, asked_by_many):
        place = {name.replace("v", "s"): at for at, name in enumerate(order)}
        for step in guide.steps:
            met = not step.after or any(
                all(
                    ended[need.step].state == "done"
                    and need.outcome in ("", ended[need.step].outcome)
                    for need in clause
                )
                for clause in step.after
            )
            assert (step.name in place) == met == (ended[step.name].state != "skipped")
            if met:
                ran = [parent for parent in step.parents if parent in place]
                assert all(place[parent] < place[step.name] for parent in ran)


def test_independent_steps_run_at_the_same_time() -> None:
    """Two actions that each wait for the other to have begun can only end together."""
    meet = threading.Barrier(2, timeout=120)

    def act(words: Sequence[str]) -> CommandEnd:
        meet.wait()
        return CommandEnd(0, "")

    steps = tuple(
        GuideStep(f"s{at}", at, action=Action(at, ("doctor",), changes=False)) for at in (1, 2)
    )
    done = run_guide(
        Guide("g", "G", "", (), steps), GuideSubject("run", Recorder()), act, workers=2
    )
    assert [step.state for step in done.steps] == ["done", "done"]


CHANGE = """\
# Change
## Look
```query
size = 3
```
```action
equipoise doctor RUN
```
- if `exit_code == 5`: **broken**
- else: **sound**; stop: nothing is wrong.
## Change it
after: Look = broken
> The size is {size}.
```action
equipoise train run.toml --train.steps {size}
```
"""


@pytest.mark.parametrize("agrees", [False, True])
def test_what_changes_something_runs_only_if_the_user_agrees(agrees: bool) -> None:
    ran: list[tuple[str, ...]] = []

    def act(words: Sequence[str]) -> CommandEnd:
        ran.append(tuple(words))
        return CommandEnd(5 if words[0] == "doctor" else 0, "words")

    guide = check_guide(CHANGE, "change", lambda words: "", file="change.md")
    start = {
        "spec": {"train": {"lr": 0.5}},
        "origins": {"train.steps": "my.toml:3", "train.lr": "--train.lr"},
    }
    done = run_guide(guide, GuideSubject("runs/a", Recorder(), start), act, agrees=agrees)
    change = ("train", "my.toml", "--train.lr", "0.5", "--train.steps", "3", "--out", "runs/a")
    assert ran == [("doctor", "runs/a"), *([change] if agrees else [])]
    last = done.steps[-1].action
    assert last is not None
    assert last.command == f"equipoise {' '.join(change)}"
    assert last.exit_code == (0 if agrees else None)
    assert done.conclusions == ("The size is 3.",)


def test_a_change_that_fails_fails_its_step_and_what_comes_after_is_skipped() -> None:
    text = CHANGE + "## Then\nafter: Change it\n> done\n"

    def act(words: Sequence[str]) -> CommandEnd:
        if words[0] == "doctor":
            return CommandEnd(5, "")
        return CommandEnd(2, "refused")

    guide = check_guide(text, "change", lambda words: "", file="change.md")
    done = run_guide(guide, GuideSubject("runs/a", Recorder()), act, agrees=True)
    assert [step.state for step in done.steps] == ["done", "failed", "skipped"]
    assert done.steps[1].sentence == (
        "equipoise train run.toml --train.steps 3 --out runs/a ended with exit code 2."
    )
    assert done.steps[2].sentence == '"Change it" failed.'
    assert (done.state, done.conclusions) == ("failed", ())


def test_an_unknown_condition_stops_and_names_what_is_unknown() -> None:
    def act(words: Sequence[str]) -> CommandEnd:
        raise FaultError("It did not end.")

    guide = check_guide(CHANGE, "change", lambda words: "", file="change.md")
    done = run_guide(guide, GuideSubject("runs/a", Recorder()), act)
    assert [step.state for step in done.steps] == ["failed", "skipped"]
    assert done.steps[0].sentence == "It did not end."
    text = CHANGE.replace("size = 3", "size = 3 / 0").replace("exit_code == 5", "size > 1")
    guide = check_guide(text, "change", lambda words: "", file="change.md")
    done = run_guide(guide, GuideSubject("runs/a", Recorder()), lambda words: CommandEnd(0, ""))
    assert [step.state for step in done.steps] == ["stopped", "skipped"]
    assert done.steps[0].sentence == "Whether `size > 1` holds cannot be known: size is unknown."
    assert done.state == "unknown"


def test_a_command_with_an_unknown_value_is_not_written() -> None:
    text = CHANGE.replace("size = 3", "size = 3 / 0")
    guide = check_guide(text, "change", lambda words: "", file="change.md")
    done = run_guide(guide, GuideSubject("runs/a", Recorder()), lambda words: CommandEnd(5, ""))
    assert done.steps[1].state == "stopped"
    assert done.steps[1].sentence == "The command cannot be written: size is unknown."


def test_a_guide_of_too_many_steps_is_refused() -> None:
    steps = tuple(
        GuideStep(f"s{at}", at, conclusion="x", conclusion_line=at) for at in range(1, 202)
    )
    flaws = find_flaws(Guide("g", "G", "", (), steps), lambda words: "")
    assert [(flaw.line, flaw.sentence) for flaw in flaws] == [
        (201, "A guide has at most 200 steps.")
    ]
