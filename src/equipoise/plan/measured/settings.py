"""What a run.toml leaves open, as a list of choices that can be trained one after another.

Why
    Whoever writes a key means it. So a measured search varies only what nobody has written, and
    what it may vary is short: a trial costs seconds, not microseconds.

What it decides
    Of the choices of a plan (``plan.space.trainable``) those that differ in degrees, in ZeRO 1 and
    3 where there is anything to shard, in no, selective and full recomputation; and documents
    packed by work or by tokens: nothing that changes what is learnt from. All else is the run's
    own, even a schedule, a strategy or a policy that has no price: a clock times what no price
    knows. Each choice is a set of keys of run.toml.

    Each choice is priced on the documents that it will pack. One that is predicted not to fit
    costs ten times as much, so it is tried after all others rather than never: a prediction may be
    wrong. Some have no price.

Kept true (tests/unit/plan/measured/test_settings.py, test_settings_price.py)
    No two choices are alike, train accepts each on the same ranks, each is a plan's but for what
    has no price, and no given key varies. A choice costs what ``sim.step`` says of its layout and
    documents.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Flags
from equipoise.base.errors import EquipoiseError, LayoutError, SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.final import Finalist
from equipoise.plan.answer.run_price import with_memory
from equipoise.plan.answer.run_steps import COMPARED, RunSteps, policies_of
from equipoise.plan.space.accepted import require_accepted
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import RECOMPUTES, Space
from equipoise.plan.space.trainable import PRICED, given_keys, list_with, run_keys
from equipoise.sim.machine import Machine
from equipoise.sim.step import run_step
from equipoise.spec.catalog import Policy
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.run.keys import keys
from equipoise.spec.run.obey import is_given, obey
from equipoise.spec.run.render import value_of
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.spec.run.spec import LayoutSpec

DEGREES = ("layout.dp", "layout.cp", "layout.tp", "layout.pp")
DIMENSIONS = (*DEGREES, "layout.zero", "train.recompute", "pack.policy")
"""Keys that are searched where they are not given."""

_OWN = ("layout.ep", "layout.etp", "layout.replicas")
"""Keys whose value is the run's, given or not."""

_ZERO = (1, 3)
_RECOMPUTE = ("none", "selective", "full")
_ORDER = ("dp", "cp", "tp", "pp", "zero", "recompute")
"""Columns that choices ascend by."""


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Everything that a run leaves open."""

    space: Space
    """Rows that they come from, each under one policy or more."""
    laid: tuple[Choice, ...]
    """Layout and options of each."""
    keys: tuple[dict[str, str], ...]
    """Keys of each choice that are not given, with their values as flags take them."""
    settings: npt.NDArray[np.int64]
    """Which value each has of each of ``DIMENSIONS``, int64[choices, dimensions]."""


def list_choices(
    run: ResolvedRun, ranks: int, base: StepOptions, *, count_batches: Callable[[int], int]
) -> Choices:
    """Every choice of a run.

    Args:
        run: What is given, and where it comes from.
        ranks: All of them are used.
        base: Window, sequences of the step, precision: what is not to be chosen.
        count_batches: Micro-batches of the fullest of some number of data-parallel ranks.

    Raises:
        SpecError: at most one choice is left.

    Cost: some 0.2 ms a choice.

    >>> from equipoise.spec.run.load import read_run
    >>> run = read_run(None, [("train.recompute", "none")])
    >>> choices = list_choices(run, 2, StepOptions(8192, 4), count_batches=lambda dp: 4 // dp)
    >>> len(choices.keys), choices.keys[0]["layout.pp"], "train.recompute" in choices.keys[0]
    (12, '2', False)
    """
    given = given_keys(run)
    space = list_with(run, ranks, base, given | _own_keys(run), count_batches=count_batches)
    space = space.keep(_of_trials(space, given))
    space = space.keep(np.lexsort([space[name] for name in _ORDER[::-1]]))
    policies = COMPARED
    named = [name for name in DIMENSIONS if name in given]
    if is_given(run, "pack.policy"):
        policies = (run.spec.pack.policy,)
        named.append("pack.policy")
    laid = tuple(
        choice
        for row in range(len(space))
        for policy in policies
        if _is_accepted(run, choice := _as_run(run, space.choice(row), policy), ranks)
    )
    if len(laid) < 2:
        said = ", ".join(f"{name} ({run.origins[name]})" for name in named)
        raise SpecError(
            f"--measure needs two or more choices, and {ranks} ranks leave {len(laid)} with "
            f"{said or 'no keys'} given. Remove one of these keys to search it."
        )
    rows = [run_keys(choice) for choice in laid]
    codes = np.zeros((len(rows), len(DIMENSIONS)), dtype=np.int64)
    for at, name in enumerate(DIMENSIONS):
        values = list(dict.fromkeys(row[name] for row in rows))
        codes[:, at] = [values.index(row[name]) for row in rows]
    open_keys = [name for name in DIMENSIONS if name not in named]
    return Choices(
        space, laid, tuple({name: str(row[name]) for name in open_keys} for row in rows), codes
    )


_PLAINEST = {"layout.schedule": "1f1b", "layout.strategy": "needed-kv"}


def _own_keys(run: ResolvedRun) -> dict[str, int | str]:
    """Keys that are not searched, as a price may know them: unknown ones as the plainest."""
    layout, values = run.spec.layout, {name: value_of(run, keys()[name]) for name in _OWN}
    own = {"layout.schedule": layout.schedule, "layout.strategy": layout.strategy}
    known = {
        name: value if value in PRICED[name] else _PLAINEST[name] for name, value in own.items()
    }
    is_known = known["layout.schedule"] == layout.schedule
    return values | known | {"layout.virtual": _virtual(layout) if is_known else 1}


def _virtual(layout: LayoutSpec) -> int:
    """Stages of each pipeline rank, where there is a pipeline."""
    return dataclasses.replace(layout, pp=2).stages // 2


def _of_trials(space: Space, given: Mapping[str, int | str]) -> Flags:
    """Rows whose columns are worth a trial each."""
    kept = np.ones(len(space), dtype=bool)
    if "layout.zero" not in given:
        kept &= np.isin(space["zero"], _ZERO)
    if "train.recompute" not in given:
        kept &= np.isin(space["recompute"], [RECOMPUTES.index(each) for each in _RECOMPUTE])
    return kept


def _as_run(run: ResolvedRun, choice: Choice, policy: Policy) -> Choice:
    """With the run's own schedule, stages and strategy, also those that no price knows."""
    layout = run.spec.layout
    options = dataclasses.replace(
        choice.options,
        policy=policy,
        schedule=layout.schedule,
        virtual=_virtual(layout) if choice.layout.pp > 1 else 1,
        context_strategy=layout.strategy,
    )
    return Choice(choice.layout, options)


def _is_accepted(run: ResolvedRun, choice: Choice, ranks: int) -> bool:
    try:
        require_accepted(obey(run, run_keys(choice), "").spec, run.model, ranks)
    except LayoutError:
        return False
    return True


_TOO_LARGE_TIMES = 10.0


def price_choices(
    run: ResolvedRun, choices: Sequence[Choice], cluster: ClusterSpec, steps: RunSteps
) -> list[Finalist | None]:
    """A step of each choice, with the memory of this package's ranks; None where no price knows it.

    Args:
        run: Its model and precision.
        choices: Choices of the run.
        cluster: With as many devices as ranks.
        steps: Its first steps.

    Cost: one replayed step a choice, some milliseconds.
    """
    prices: list[Finalist | None] = []
    for choice in choices:
        try:
            prices.append(_price(run, choice, cluster, steps))
        except EquipoiseError:  # what the simulator does not know, a trial will
            prices.append(None)
    return prices


def prior_of(priced: Sequence[Finalist | None]) -> npt.NDArray[np.float64]:
    """Seconds that a search begins from, float64 [choices]; NaN without a price."""
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
