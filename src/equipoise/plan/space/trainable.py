"""Choices that ``equipoise train`` runs for a run.toml, and the keys of run.toml that say them.

Why
    A plan is obeyed only if the run can do it, and only if keys of run.toml say it.

What it decides
    A key that run.toml or a flag gives is not searched. What a pipeline or a context alone reads
    (schedule, virtual stages, strategy) binds choices that have one. Data-parallel ranks are
    outermost, and a micro-batch holds what the packer puts into it: a window, or a little more.
    A measured search tries some of these choices (``plan.measured.settings``), and no others.

Kept true (tests/unit/plan/space/test_trainable.py)
    Keys that were given stand in every choice; the keys of a choice give its layout back, and
    train accepts them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from equipoise.balance.expert.policies import require_balanced
from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import CONTEXT_STRATEGIES, NAMED, SCHEDULES, Space
from equipoise.plan.space.listing import list_space
from equipoise.sim.here import measured_parts
from equipoise.sim.machine import Machine
from equipoise.spec import catalog
from equipoise.spec.run.keys import keys, toml
from equipoise.spec.run.obey import is_given
from equipoise.spec.run.render import value_of
from equipoise.spec.run.resolve import ResolvedRun

_COLUMN = {
    "layout.dp": "dp",
    "layout.cp": "cp",
    "layout.tp": "tp",
    "layout.pp": "pp",
    "layout.ep": "ep",
    "layout.etp": "etp",
    "layout.zero": "zero",
    "layout.replicas": "replicas",
    "train.recompute": "recompute",
}
"""Keys that hold for every choice."""

_COLUMN_OF_PIPELINE = {"layout.schedule": "schedule", "layout.virtual": "virtual"}
_COLUMN_OF_CONTEXT = {"layout.strategy": "context_strategy"}

PRICED = {"layout.schedule": SCHEDULES, "layout.strategy": CONTEXT_STRATEGIES}
"""Values that a price knows."""

_ANY_TOKENS = 1 << 40
"""A window that any number of context ranks can share."""


def list_trainable(
    run: ResolvedRun,
    ranks: int,
    base: StepOptions,
    *,
    count_batches: Callable[[int], int],
) -> Space:
    """Every choice for one step of a run.

    Args:
        run: Its model, and the keys that it was given.
        ranks: Ranks of the run; every one is used.
        base: Window, sequences of the step, precision: what is not to be chosen.
        count_batches: Micro-batches of the fullest of some number of data-parallel ranks.

    Raises:
        SpecError: a key has a value that no price knows, or nothing is left.
        LayoutError: a step has fewer documents than data-parallel ranks.
    """
    given = given_keys(run)
    for name, known in PRICED.items():
        if name in given and given[name] not in known:
            raise SpecError(
                f"{name} = {toml(given[name])} ({run.origins[name]}) has no price that a plan "
                f"could compare. Leave it out, or give {', '.join(map(toml, known))}."
            )
    return list_with(run, ranks, base, given, count_batches=count_batches)


def given_keys(run: ResolvedRun) -> dict[str, int | str]:
    """Keys of a layout that somebody gave, with their values."""
    return {
        name: value_of(run, keys()[name])
        for name in (*_COLUMN, *_COLUMN_OF_PIPELINE, *_COLUMN_OF_CONTEXT)
        if is_given(run, name) and value_of(run, keys()[name]) != "cores"
    }


def list_with(
    run: ResolvedRun,
    ranks: int,
    base: StepOptions,
    fixed: Mapping[str, int | str],
    *,
    count_batches: Callable[[int], int],
) -> Space:
    """Every choice that has given values of some keys.

    Args:
        run: Its model, and what to say of its keys.
        ranks: Ranks of the run; every one is used.
        base: What is not to be chosen.
        fixed: Values by key, of schedule and strategy those of ``PRICED``. ZeRO holds also for
            ranks that have nothing to shard.
        count_batches: Micro-batches of the fullest of some number of data-parallel ranks.

    Raises:
        SpecError: nothing is left.
    """
    # Packers give ranks less than a window each, too: any number of them divides the step. And who
    # asks for context ranks has them, however few tokens they share.
    wide = dataclasses.replace(
        base,
        step_sequences=math.lcm(base.step_sequences, ranks),
        context_tokens=_ANY_TOKENS if fixed.get("layout.cp", 1) != 1 else base.context_tokens,
    )
    columns: dict[str, int | str] = {"order": "dp-pp", "micro_batch": 1}
    columns |= {column: fixed[name] for name, column in _COLUMN.items() if name in fixed}
    zero = columns.pop("zero", None)
    listed = _list(run, ranks, wide, columns, str(fixed.get("layout.schedule", "")))
    if listed is None:
        raise _nothing_left(run, ranks)
    kept = np.ones(len(listed), dtype=bool)
    for table, axis in ((_COLUMN_OF_PIPELINE, "pp"), (_COLUMN_OF_CONTEXT, "cp")):
        for name, column in table.items():
            if name in fixed:
                names = NAMED.get(column)
                value = names.index(str(fixed[name])) if names else fixed[name]
                kept &= (listed[axis] == 1) | (listed[column] == value)
    per_node = run.spec.layout.ranks_per_node
    if per_node is not None:
        kept &= listed["cp"] % per_node == 0
    batches = {dp: _batches(count_batches, dp) for dp in np.unique(listed["dp"]).tolist()}
    own = np.array([batches[dp] for dp in listed["dp"].tolist()], dtype=np.int64)
    kept &= (own > 0) & _obeys_policy(run, listed)
    with_batches = listed.columns | {"micro_batches": own}
    if zero is None:
        kept &= (listed["zero"] != 2) | (own == 1)
    else:  # 2 is legal where 1 is, and listed by itself where it may be the best
        is_alone = listed["dp"] * listed["cp"] == 1
        kept &= is_alone | (listed["zero"] == (1 if zero == 2 else zero))
        with_batches["zero"] = np.full(len(listed), zero, dtype=np.int64)
    if not kept.any():
        raise _nothing_left(run, ranks)
    return Space(with_batches, base).keep(kept)


def _list(
    run: ResolvedRun, ranks: int, base: StepOptions, fixed: dict[str, int | str], schedule: str
) -> Space | None:
    """The space; a schedule that is only listed on request comes with choices of no pipeline."""
    wanted = [fixed]
    if schedule in SCHEDULES and catalog.SCHEDULES[schedule].planned == "when given":
        wanted = [fixed | {"schedule": schedule}]
        wanted += [] if "pp" in fixed else [fixed | {"pp": 1}]
    spaces = []
    for each in wanted:
        try:
            spaces.append(list_space(run.model, ranks, base, fixed=each))
        except SpecError:  # nothing is left of these
            continue
    if not spaces:
        return None
    names = spaces[0].columns
    return Space({name: np.concatenate([each[name] for each in spaces]) for name in names}, base)


def _obeys_policy(run: ResolvedRun, listed: Space) -> NDArray[np.bool_]:
    """Which choices the policy of experts can be obeyed with, as train asks."""
    shares = np.stack([listed[axis] for axis in ("ep", "etp", "tp", "pp")], axis=1)
    kinds, inverse = np.unique(shares, axis=0, return_inverse=True)

    def is_obeyed(ep: int, etp: int, tp: int, pp: int) -> bool:
        try:
            require_balanced(run.spec.experts, run.model.experts, ep=ep, etp=etp, tp=tp, pp=pp)
        except LayoutError:
            return False
        return True

    obeyed = np.array([is_obeyed(*kind) for kind in kinds.tolist()], dtype=np.bool_)
    return obeyed[inverse.reshape(-1)]


def _batches(count_batches: Callable[[int], int], dp: int) -> int:
    try:
        return count_batches(dp)
    except LayoutError:  # fewer documents than ranks
        return 0


def _nothing_left(run: ResolvedRun, ranks: int) -> SpecError:
    given = given_keys(run)
    said = " and ".join(f"{name} = {toml(value)}" for name, value in given.items())
    fix = "Change --ranks, or give fewer of these keys" if said else "Change --ranks"
    return SpecError(
        f"No layout of {ranks} ranks carries {run.model.layers} layers of {run.model.heads} heads "
        f"and steps of {run.spec.pack.step_tokens:,} tokens{' with ' if said else ''}{said}. "
        f"{fix}."
    )


def keep_timed(run: ResolvedRun, machine: Machine, space: Space) -> Space:
    """Choices whose own parts were timed on this machine; none where the model was not timed.

    Seconds of timed parts hold what no kernel's do, so the two are not to be compared.

    Cost: some 50 us a choice.
    """
    kept = [
        measured_parts(run.model, machine, choice.layout, choice.options) is not None
        for choice in map(space.choice, range(len(space)))
    ]
    return space.keep(np.array(kept, dtype=bool))


def run_keys(choice: Choice) -> dict[str, int | str]:
    """A choice as keys of run.toml; those of a pipeline or a context only where there is one.

    >>> from equipoise.spec.layout import Layout
    >>> values = run_keys(Choice(Layout(dp=2), StepOptions(8192, 4)))
    >>> values["layout.dp"], values["pack.policy"], "layout.schedule" in values
    (2, 'by-work', False)
    """
    layout, options = choice.layout, choice.options
    values: dict[str, int | str] = {
        "pack.policy": options.policy,
        "train.recompute": options.recompute,
        "layout.dp": layout.dp,
        "layout.cp": layout.cp,
        "layout.tp": layout.tp,
        "layout.pp": layout.pp,
        "layout.ep": layout.ep,
        "layout.etp": layout.etp,
        "layout.zero": layout.zero,
        "layout.replicas": layout.replicas,
    }
    if layout.pp > 1:
        values |= {"layout.schedule": options.schedule, "layout.virtual": options.virtual}
    if layout.cp > 1:
        values["layout.strategy"] = options.context_strategy
    return values
