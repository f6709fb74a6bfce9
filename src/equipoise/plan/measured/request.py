"""Which choice of a run.toml trains fastest here, by training: one call.

What it decides
    Who tries what: ``plan.measured.next`` says which choice is next, a caller's ``train`` trains it
    for some steps (``launch.trial`` does, in a process of its own), and the journal of trials keeps
    how it ended. The fastest becomes a plan of the run.toml (``plan.measured.lock``).

Kept true (tests/unit/cli/plan/test_measure.py, tests/multi/plan/test_plan_measure.py)
    A rank that is killed fails its trial and not the search; the same request goes on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from equipoise import __version__
from equipoise.base.digest import digest
from equipoise.base.errors import FaultError
from equipoise.data.progress import Progress, SilentProgress
from equipoise.plan.answer.final import Finalist
from equipoise.plan.answer.run_steps import RunSteps
from equipoise.plan.measured.lock import measured_plan, trial_folder
from equipoise.plan.measured.next import MeasuredSpace, Trial, best_trial, next_choice
from equipoise.plan.measured.settings import DEGREES, Choices, list_choices, price_choices, prior_of
from equipoise.plan.measured.trials import TrialJournal
from equipoise.plan.run import (
    RunInputs,
    RunPlanRequest,
    digest_run,
    guess_sentence,
    open_corpus,
    ranks_of,
    run_encoders,
    run_options,
)
from equipoise.plan.search.search import Search
from equipoise.sim.machine import Machine
from equipoise.spec.catalog import POLICIES
from equipoise.spec.cluster.spec import this_machine
from equipoise.spec.plan import Plan
from equipoise.spec.run.spec import PackSpec

STEPS = 6
"""Optimizer steps of a trial; the first warms up."""

LIMIT_S = 600.0
"""What a trial may take unless the request says otherwise."""


class Ended(Protocol):
    """How a trial ended."""

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where the trial failed."""

    @property
    def cause(self) -> str:
        """Why it failed."""

    @property
    def message(self) -> str:
        """Its last words."""

    @property
    def wall_s(self) -> float:
        """Seconds from its start to its end."""


class Train(Protocol):
    """Trains a choice for some steps; ``launch.trial.run_trial`` does."""

    def __call__(self, arguments: Sequence[str], folder: Path, *, limit_s: float) -> Ended:
        """Train in a folder, by arguments of ``equipoise train``, for ``limit_s`` at most."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """What is tried, and how."""

    request: RunPlanRequest
    ranks: int
    choices: Choices
    priced: list[Finalist | None]
    """Each choice's step; None where no price knows it."""
    space: MeasuredSpace
    inputs: RunInputs

    @property
    def given_words(self) -> list[str]:
        """Arguments of ``equipoise train``: the run, and the keys that were given."""
        request = self.request
        return [str(request.file), *(part for key in request.keys for part in _flag(*key))]

    def words(self, choice: int) -> list[str]:
        """Arguments of ``equipoise train`` for a choice."""
        keys = self.choices.keys[choice].items()
        return [*self.given_words, *(part for key in keys for part in _flag(*key))]

    def trial_words(self, choice: int, *, limit_s: float) -> list[str]:
        """Likewise for a few steps; ranks that wait for half of the limit are named."""
        spec = self.request.run.spec
        falling = {} if spec.train.decay_steps is None else {"train.decay_steps": 1}
        few = {
            "train.steps": STEPS,
            "train.warmup_steps": min(STEPS - len(falling), spec.train.warmup_steps),
            **falling,
            "checkpoint.every_steps": STEPS,
            "checkpoint.keep": 1,
            "journal.tensorboard": "false",
            "journal.wandb": "false",
            "journal.mlflow": "false",
            "fault.restarts": 0,
            "layout.deadline_s": min(limit_s / 2, spec.layout.deadline_s or limit_s),
        }
        return [
            *self.words(choice),
            *(part for name, value in few.items() for part in _flag(name, value)),
        ]

    @property
    def digest(self) -> str:
        """The digest of everything that seconds depend on."""
        run, device = self.request.run, self.inputs.search.machine.device
        return digest(
            [run.digest, self.ranks, list(self.choices.keys), STEPS, device.title, __version__]
        )


@dataclass(frozen=True, slots=True, eq=False)
class MeasureAnswer:
    """All trials, and the fastest as a plan."""

    run: MeasuredRun
    trials: tuple[Trial, ...]
    best: Trial
    lock: Plan | None
    """None where no price knows the fastest; ``lock.write(file)`` keeps it."""

    def predicted_s(self, trial: Trial) -> float | None:
        """The price of a trial's choice; None where no price knows it."""
        price = float(self.run.space.prior_s[trial.choice])
        return None if np.isnan(price) else price

    def keys(self, trial: Trial) -> Mapping[str, str]:
        """Dotted keys of a trial's choice."""
        return self.run.choices.keys[trial.choice]

    def as_row(self) -> dict[str, Any]:
        """Plain data: what ``equipoise plan --measure --json`` prints, but where the lock is."""
        rows = [
            {
                "keys": self.keys(trial),
                "predicted_s": self.predicted_s(trial),
                "step_s": trial.step_s,
                "cause": trial.cause,
                "message": trial.message,
                "wall_s": trial.wall_s,
            }
            for trial in self.trials
        ]
        return {
            "best": rows[self.trials.index(self.best)],
            "trials": rows,
            "tried": len(rows),
            "exhaustive": len(self.run.choices.keys),
        }


def measure(
    request: RunPlanRequest,
    train: Train,
    *,
    limit_s: float = LIMIT_S,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> MeasureAnswer:
    """Train choices of a run for some steps each, a quarter of all at most.

    Args:
        request: The run; its ``seconds`` are not read. Trials are kept in its ``out``, or in
            ``runs/NAME-measured``.
        train: Trains a choice.
        limit_s: The most that a trial may take [s].
        progress: Shown while a corpus is made, and for each trial.
        say: Given a sentence where this machine was never measured.

    Raises:
        SpecError: nothing is left to choose.
        LayoutError: more ranks than this machine has cores.
        DataError: there is no corpus.
        FaultError: every trial failed.
        KeyboardInterrupt: the trial counts as not tried.
    """
    progress = progress or SilentProgress()
    run = read_measured(request, progress=progress, say=say)
    folder = request.out or Path("runs") / f"{request.run.spec.name}-measured"
    journal = TrialJournal(folder / "trials.jsonl", run.digest)
    while len(trials := journal.trials) < run.space.budget:
        choice = next_choice(run.space, trials)
        if choice is None:
            break
        keys = say_keys(run.choices.keys[choice])
        progress.start(f"trial {len(trials) + 1} of {run.space.budget}, {keys}", 1)
        journal.begin(choice)
        try:
            words = run.trial_words(choice, limit_s=limit_s)
            end = train(words, trial_folder(folder, choice), limit_s=limit_s)
            journal.end(Trial(choice, end.step_s, end.cause, end.message, end.wall_s))
            progress.advance()
        except KeyboardInterrupt:
            journal.stop(choice)
            raise
        finally:
            progress.finish()
    best = best_trial(trials)
    if best is None:
        raise FaultError(
            f"None of {len(trials)} trials trained to its end; the first, "
            f"{say_keys(run.choices.keys[trials[0].choice])}: {trials[0].cause}: "
            f"{trials[0].message} All of them are in {journal.file}."
        )
    lock = measured_plan(run.inputs, run.priced, trials, folder)
    return MeasureAnswer(run, tuple(trials), best, lock)


def read_measured(
    request: RunPlanRequest,
    *,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> MeasuredRun:
    """Read the run's corpus, list its choices and price them.

    Raises:
        SpecError: nothing is left to choose.
        LayoutError: more ranks than cores or devices.
        DataError: there is no corpus.
    """
    run, ranks = request.run, ranks_of(request, "--measure trains")
    cluster = this_machine(ranks)
    if (guess := guess_sentence(cluster)) and say is not None:
        say(guess)
    store, machine = open_corpus(run, progress), Machine(cluster)
    steps = RunSteps(run.spec, run.model, store.doc_tokens, store.mixture)
    policy = run.spec.pack.policy
    counted = PackSpec().policy if POLICIES[policy].divides else policy
    choices = list_choices(
        run,
        ranks,
        run_options(run, machine, policy),
        count_batches=lambda dp: steps.count_batches(counted, dp),
    )
    priced = price_choices(run, choices.laid, cluster, steps)
    if (encoders := run_encoders(run, store, machine, steps)) is not None:
        priced = [each and encoders.added_to(each) for each in priced]
    inputs = RunInputs(
        run,
        request.asked(ranks),
        digest_run(run, store, cluster),
        Search(run.model, machine, choices.space),
        steps,
        policies=(policy,),
        doubt="",
        is_timed=False,
        encoders=encoders,
    )
    space = MeasuredSpace(choices.settings, prior_of(priced))
    return MeasuredRun(request, ranks, choices, priced, space, inputs)


def say_keys(keys: Mapping[str, str]) -> str:
    """A choice in one line.

    >>> say_keys({"layout.dp": "2", "layout.tp": "1", "layout.zero": "3"})
    'dp=2 zero=3'
    """
    shown = (item for item in keys.items() if item[0] not in DEGREES or item[1] != "1")
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in shown)


def _flag(name: str, value: object) -> tuple[str, str]:
    return f"--{name}", str(value)
