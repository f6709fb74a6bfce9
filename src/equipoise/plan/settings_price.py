"""What the simulator says of a run's choices: where a measured search begins.

What it decides
    Each choice is priced on the documents that it will pack. One that is forecast not to fit
    costs ten times as much, so that it is tried after all others and not never: a forecast may be
    wrong. One that no price knows has none.

Kept true (tests/unit/plan/test_settings_price.py)
    A choice costs what ``sim.step`` says of its layout and documents.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import EquipoiseError
from equipoise.cost.step import StepOptions
from equipoise.plan.choice import Choice
from equipoise.plan.run_price import forecast_ranks
from equipoise.plan.run_steps import RunSteps, policies_of
from equipoise.sim.machine import Machine
from equipoise.sim.step import run_step
from equipoise.spec.resolve import ResolvedRun
from equipoise.spec.run import TWO_STAGES

_TOO_LARGE_TIMES = 10.0


def price_settings(
    runs: Sequence[ResolvedRun],
    base: StepOptions,
    machine: Machine,
    doc_tokens: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Seconds of a step of each run; NaN where no price knows it.

    Args:
        runs: Of the same model and corpus on the same ranks; they differ in their settings.
        base: What they have in common.
        machine: With as many devices as ranks.
        doc_tokens: Length of each document of the corpus, int64[documents].

    Cost: one replayed step a run, some milliseconds.
    """
    steps = RunSteps(runs[0].spec, runs[0].model, doc_tokens)
    found = np.full(len(runs), np.nan)
    for at, run in enumerate(runs):
        try:
            found[at] = _price(run, base, machine, steps)
        except EquipoiseError:  # what the simulator does not know, a trial will
            continue
    return found


def _price(run: ResolvedRun, base: StepOptions, machine: Machine, steps: RunSteps) -> float:
    spec = run.spec
    (policy,) = policies_of(spec.pack.policy, is_given=True)
    layout = spec.layout.of_ranks(machine.cluster.devices)
    two = spec.layout.schedule in TWO_STAGES and layout.pp > 1
    options = dataclasses.replace(
        base,
        policy=policy,
        virtual=spec.layout.virtual or (2 if two else 1),
        schedule=spec.layout.schedule,
        recompute=spec.train.recompute,
        context_strategy=spec.layout.strategy,
    )
    documents = steps.documents(policy, layout.dp)
    priced = run_step(run.model, machine, layout, options, documents=documents)
    tokens = steps.most_tokens(policy, layout.dp)
    choice = Choice(layout, options)
    ranks = forecast_ranks(run.model, choice, priced, tokens, spec.train.precision)
    fits = max(rank.total_bytes for rank in ranks) <= priced.price.capacity_bytes
    return priced.price.step_s * (1.0 if fits else _TOO_LARGE_TIMES)
