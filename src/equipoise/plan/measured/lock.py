"""plan.lock of a measured search: the choice that trained fastest, as any plan of the run.toml.

What it decides
    The best is the one of fewest measured seconds, and so are the runners-up; prices stand beside
    them term by term, ``measured_s`` within. A clock knows no lower bound and no term that would
    turn its order, so the lock has a bound of 0 and no flip.

Kept true (tests/unit/cli/plan/test_measure.py, tests/multi/train/test_plan_measure.py)
    ``equipoise train --plan`` obeys the lock, and refuses it when what it read has changed.
"""

import dataclasses
from collections.abc import Sequence

from equipoise.plan.answer.explain import Inputs, decide
from equipoise.plan.answer.final import Finalist
from equipoise.plan.measured.next import Trial
from equipoise.plan.search.deadline import NEVER
from equipoise.plan.search.outcome import Outcome, Progress
from equipoise.spec.plan import MEASURED_S, Candidate, Plan

_CANDIDATES = 4
"""The best and the next three, as of any plan."""


def measured_plan(
    inputs: Inputs, priced: Sequence[Finalist | None], trials: Sequence[Trial]
) -> Plan | None:
    """The plan of a search's trials; None where its best has no price, or nothing was measured.

    Args:
        inputs: What was read.
        priced: Of every choice; None where no price knows it.
        trials: All of them.
    """
    timed = sorted((each.step_s, each.choice) for each in trials if each.step_s is not None)
    if not timed or priced[timed[0][1]] is None:
        return None
    known = [(step_s, each) for step_s, at in timed if (each := priced[at]) is not None]
    known = known[:_CANDIDATES]
    tried = Progress(priced=len(trials), best_s=known[0][0], bound_s=0.0)
    outcome = Outcome((), tried, len(priced), ruled_out=0, bounded=0, least_bytes=0.0)
    plan = decide(inputs, outcome, [each for _, each in known], NEVER)
    every = [
        _timed(candidate, step_s)
        for candidate, (step_s, _) in zip((plan.best, *plan.runners_up), known, strict=True)
    ]
    return dataclasses.replace(plan, best=every[0], runners_up=tuple(every[1:]), flip=None)


def _timed(candidate: Candidate, step_s: float) -> Candidate:
    """With what was measured: a trial splits its layers when it starts, and so is its run to."""
    price = candidate.price | {MEASURED_S: step_s}
    return dataclasses.replace(candidate, price=price, stages=None)
