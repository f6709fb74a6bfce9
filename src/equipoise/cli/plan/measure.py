"""``equipoise plan run.toml --measure``: choices are trained for some steps, and the best is kept.

What it decides
    Who tries what: ``plan.measured.next`` says which choice is next, ``launch.trial`` trains it in
    a process of its own, and the journal of trials keeps how it ended. The fastest is written down
    as a plan.lock (``cli.plan.measure_lock``), where any other plan of the run.toml would be.

Kept true (tests/multi/train/test_plan_measure.py)
    A rank that is killed fails its trial and not the search; the same command goes on.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from equipoise import __version__
from equipoise.balance.packing.pack import DIVIDES
from equipoise.base.digest import digest
from equipoise.base.errors import FaultError, LayoutError, SpecError
from equipoise.cli.console import make_progress
from equipoise.cli.plan.measure_lock import measured_plan
from equipoise.cli.plan.measure_table import as_row, command_of, print_search, say
from equipoise.cli.plan.run import (
    RunInputs,
    digest_run,
    guess_sentence,
    open_corpus,
    require_own_flags,
    run_options,
)
from equipoise.cli.run_arguments import run_from
from equipoise.launch.trial import STEPS, run_trial
from equipoise.observe.machine import usable_cores
from equipoise.plan.answer.final import Finalist
from equipoise.plan.answer.run_steps import POLICIES, RunSteps
from equipoise.plan.measured.next import MeasuredSpace, Trial, best_trial, next_choice
from equipoise.plan.measured.settings import Choices, list_choices, price_choices, prior_of
from equipoise.plan.measured.trials import TrialJournal
from equipoise.plan.search.search import Search
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.device.here import cpu_model
from equipoise.spec.device.spec import THIS_CPU
from equipoise.spec.plan import LOCK, RUN_TOML
from equipoise.spec.run.resolve import ResolvedRun

TRIALS = "trials.jsonl"

_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """What is tried, and how."""

    run: ResolvedRun
    ranks: int
    choices: Choices
    priced: list[Finalist | None]
    """Each choice's step; None where no price knows it."""
    space: MeasuredSpace
    inputs: RunInputs
    given: tuple[tuple[str, str], ...]
    """Keys of the command line."""
    file: Path

    @property
    def given_words(self) -> list[str]:
        """Of ``equipoise train``: the run, and what was given."""
        return [str(self.file), *(part for key in self.given for part in _flag(*key))]

    def words(self, choice: int) -> list[str]:
        """Likewise, and the choice."""
        keys = self.choices.keys[choice].items()
        return [*self.given_words, *(part for key in keys for part in _flag(*key))]

    def trial_words(self, choice: int, *, limit_s: float) -> list[str]:
        """Likewise, for a few steps; ranks that wait for half of the limit are named."""
        few = {
            "train.steps": STEPS,
            "train.warmup_steps": min(STEPS, self.run.spec.train.warmup_steps),
            "checkpoint.every_steps": STEPS,
            "checkpoint.keep": 1,
            "journal.tensorboard": "false",
            "layout.deadline_s": min(limit_s / 2, self.run.spec.layout.deadline_s),
        }
        return [
            *self.words(choice),
            *(part for name, value in few.items() for part in _flag(name, value)),
        ]

    @property
    def digest(self) -> str:
        """Of all that seconds depend on."""
        return digest(
            [self.run.digest, self.ranks, list(self.choices.keys), STEPS, cpu_model(), __version__]
        )


def _flag(name: str, value: object) -> tuple[str, str]:
    return f"--{name}", str(value)


def read_measured(args: argparse.Namespace) -> MeasuredRun:
    """Read the run and its corpus, list its choices and price them.

    Raises:
        SpecError: no run.toml, a flag or a key is wrong, or nothing is left to choose.
        LayoutError: more ranks than cores.
        DataError: there is no corpus.
    """
    if args.run_toml is None:
        raise SpecError(
            "--measure trains a run.toml, and none is given. Write one: equipoise init; then "
            "equipoise plan run.toml --measure."
        )
    if args.export is not None or args.seconds is not None:
        flag = "--export" if args.export is not None else "--seconds"
        raise SpecError(
            f"{flag} is of a search by prices, and --measure times runs for train alone: it ends "
            f"after a quarter of all trials. Leave {flag} away."
        )
    if args.trial_seconds is not None and args.trial_seconds <= 0:
        raise SpecError(f"--trial-seconds is {args.trial_seconds:g}. Give a time above 0.")
    require_own_flags(args)
    run, cores = run_from(args), len(usable_cores())
    ranks = run.spec.layout.count_ranks(cores) if args.ranks is None else args.ranks
    if not 1 <= ranks <= cores:
        raise LayoutError(
            f"--measure times a core a rank, and {ranks} ranks are not 1 to {cores}, the cores of "
            f"this machine. Give --ranks {cores} or less."
        )
    cluster = find_cluster(f"{THIS_CPU}:{ranks}")
    if (guess := guess_sentence(cluster)) and not args.quiet:
        sys.stderr.write(f"{guess}\n")
    store, machine = open_corpus(run, is_quiet=args.quiet or args.json), Machine(cluster)
    steps, policy = RunSteps(run.spec, run.model, store.doc_tokens), run.spec.pack.policy
    counted = POLICIES[0] if policy in DIVIDES else policy
    choices = list_choices(
        run,
        ranks,
        run_options(run, machine, policy),
        count_batches=lambda dp: steps.count_batches(counted, dp),
    )
    priced = price_choices(run, choices.laid, cluster, steps)
    named = [] if args.name is None else [("name", args.name)]
    given = (*args.overrides, *named)
    inputs = RunInputs(
        run,
        {RUN_TOML: str(args.run_toml), "ranks": str(ranks), **dict(given)},
        digest_run(run, store, cluster),
        Search(run.model, machine, choices.space),
        steps,
        policies=(policy,),
        doubt="",
    )
    space = MeasuredSpace(choices.settings, prior_of(priced))
    return MeasuredRun(run, ranks, choices, priced, space, inputs, given, args.run_toml)


def measure(args: argparse.Namespace) -> int:
    """Search, trial by trial, and print the best."""
    asked = read_measured(args)
    folder: Path = args.out or Path("runs") / f"{asked.run.spec.name}-measured"
    journal = TrialJournal(folder / TRIALS, asked.digest)
    budget, limit_s = asked.space.budget, args.trial_seconds or _LIMIT_S
    while len(trials := journal.trials) < budget:
        choice = next_choice(asked.space, trials)
        if choice is None:
            break
        label = f"trial {len(trials) + 1} of {budget}, {say(asked.choices.keys[choice])}"
        progress = make_progress(args.quiet or args.json)
        progress.start(label, 1)
        journal.begin(choice)
        try:
            journal.end(_try(asked, choice, folder, limit_s=limit_s))
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
            f"{say(asked.choices.keys[trials[0].choice])}: {trials[0].cause}: "
            f"{trials[0].message} All of them are in {journal.file}."
        )
    lock = (args.out or args.run_toml.parent) / LOCK
    plan = measured_plan(asked.inputs, asked.priced, trials)
    if plan is not None:
        plan.write(lock)
    if args.json:
        row = as_row(asked.choices, asked.space, trials)
        row |= {"lock": None if plan is None else str(lock)}
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
        return 0
    print_search(asked.choices, asked.space, trials, is_quiet=args.quiet)
    if plan is None:
        command = command_of(asked.words(best.choice))
        sys.stdout.write(f"No price knows it, so there is no plan.lock. Train it: {command}\n")
    else:
        words = [*asked.given_words, "--plan", str(lock)]
        sys.stdout.write(f"Wrote {lock}. Train by it: {command_of(words)}\n")
    return 0


def _try(asked: MeasuredRun, choice: int, folder: Path, *, limit_s: float) -> Trial:
    words = asked.trial_words(choice, limit_s=limit_s)
    end = run_trial(words, folder / "trials" / f"{choice:04}", limit_s=limit_s)
    return Trial(choice, end.step_s, end.cause, end.message, end.wall_s)
