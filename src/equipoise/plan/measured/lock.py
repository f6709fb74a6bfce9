"""plan.lock of a measured search: the choice that trained fastest, as any plan of the run.toml.

What it decides
    The best is the one of fewest measured seconds, and so are the runners-up; prices stand beside
    them term by term, ``measured_s`` within. A clock gives no lower bound and no term that could
    reverse the order, so the lock has a bound of 0 and no flip.

Kept true (tests/unit/cli/plan/test_measure.py, tests/multi/plan/test_plan_measure.py)
    ``equipoise train --plan`` obeys the lock, and refuses it when what it read has changed.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from equipoise.base.errors import EquipoiseError
from equipoise.observe.reader import read_run
from equipoise.plan.answer.final import Finalist
from equipoise.plan.measured.next import Trial
from equipoise.plan.request import decide
from equipoise.plan.run import RunInputs
from equipoise.plan.search.deadline import NEVER
from equipoise.plan.search.incumbent import Outcome, SearchProgress
from equipoise.spec.plan import MEASURED_S, Candidate, Plan, Stages

_CANDIDATES = 4
"""The best and the next three, as of any plan."""


def measured_plan(
    inputs: RunInputs, priced: Sequence[Finalist | None], trials: Sequence[Trial], folder: Path
) -> Plan | None:
    """The plan of a search's trials; None if its best has no price, or nothing was measured.

    Args:
        inputs: What was read.
        priced: Of every choice; None where no price knows it.
        trials: All of them.
        folder: Where each trial has a folder.
    """
    timed = sorted((each.step_s, each.choice) for each in trials if each.step_s is not None)
    if not timed or priced[timed[0][1]] is None:
        return None
    known = [(step_s, at, each) for step_s, at in timed if (each := priced[at]) is not None]
    known = known[:_CANDIDATES]
    tried = SearchProgress(priced=len(trials), best_s=known[0][0], bound_s=0.0)
    outcome = Outcome((), tried, len(priced), ruled_out=0, bounded=0, least_bytes=0.0)
    plan = decide(inputs, outcome, [each for _, _, each in known], NEVER)
    every = [
        _timed(candidate, step_s, trial_folder(folder, at))
        for candidate, (step_s, at, _) in zip((plan.best, *plan.runners_up), known, strict=True)
    ]
    return dataclasses.replace(plan, best=every[0], runners_up=tuple(every[1:]), flip=None)


def trial_folder(folder: Path, choice: int) -> Path:
    """Where the trial of a choice keeps its journal."""
    return folder / "trials" / f"{choice:04}"


def _timed(candidate: Candidate, step_s: float, trial: Path) -> Candidate:
    """With the seconds that its trial took, and the stages that its ranks made of the layers."""
    price, stages = candidate.price | {MEASURED_S: step_s}, None
    try:
        split = read_run(trial).start.stages
    except EquipoiseError:
        split = {}  # the folder was cleared: a run by this lock splits its layers when it starts
    if split:
        stages = Stages(tuple(split["edges"]), tuple(split["ranks"]))
    return dataclasses.replace(candidate, price=price, stages=stages)
