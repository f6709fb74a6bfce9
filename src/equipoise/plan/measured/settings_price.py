"""What the simulator says of a run's choices: where a measured search begins.

What it decides
    Each choice is priced on the documents that it will pack. One that is forecast not to fit
    costs ten times as much, so that it is tried after all others and not never: a forecast may be
    wrong. One that no price knows has none.

Kept true (tests/unit/plan/measured/test_settings_price.py)
    A choice costs what ``sim.step`` says of its layout and documents.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import EquipoiseError
from equipoise.plan.answer.final import Finalist
from equipoise.plan.answer.run_price import with_memory
from equipoise.plan.answer.run_steps import RunSteps, policies_of
from equipoise.plan.space.choice import Choice
from equipoise.sim.machine import Machine
from equipoise.sim.step import run_step
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.run.resolve import ResolvedRun

_TOO_LARGE_TIMES = 10.0


def price_choices(
    run: ResolvedRun, choices: Sequence[Choice], cluster: ClusterSpec, steps: RunSteps
) -> list[Finalist | None]:
    """A step of each choice, with the memory of this package's ranks; None where no price knows it.

    Args:
        run: Its model and precision.
        choices: Of the run.
        cluster: With as many devices as ranks.
        steps: Of the run.

    Cost: one replayed step a choice, some milliseconds.
    """
    found: list[Finalist | None] = []
    for choice in choices:
        try:
            found.append(_price(run, choice, cluster, steps))
        except EquipoiseError:  # what the simulator does not know, a trial will
            found.append(None)
    return found


def prior_of(priced: Sequence[Finalist | None]) -> npt.NDArray[np.float64]:
    """Seconds that a search begins from, float64 [choices]; NaN where there is no price."""
    return np.array([np.nan if each is None else _worth_s(each) for each in priced])


def _worth_s(finalist: Finalist) -> float:
    price = finalist.run.price
    return price.step_s * (1.0 if price.fits else _TOO_LARGE_TIMES)


def _price(run: ResolvedRun, choice: Choice, cluster: ClusterSpec, steps: RunSteps) -> Finalist:
    """On a machine of its own, which remembers what was extrapolated for this choice alone."""
    machine = Machine(cluster)
    (policy,) = policies_of(choice.options.policy, is_given=True)
    documents = steps.documents(policy, choice.layout)
    priced = run_step(run.model, machine, choice.layout, choice.options, documents=documents)
    tokens = steps.most_tokens(policy, choice.layout)
    finalist = Finalist(choice, priced)
    return with_memory(run.model, finalist, tokens, run.spec.train.precision)
