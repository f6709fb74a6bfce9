"""Every choice for one step: degrees that multiply to the devices, times what they leave open.

Why
    ``plan.space.columns`` says which columns there are; here is which numbers they may have
    together. One function says it, for lists and for lattices that are never listed.

What it decides
    As the table of ``plan.space.columns``, axis by axis. What a cell is crossed with depends on a
    few of its numbers: ZeRO and copies on the ranks that share weights; schedules on stages and
    micro-batches; strategies on heads and context ranks.

Kept true (tests/unit/plan/space/test_columns.py, tests/unit/plan/space/test_lattice.py)
    Every row is a legal layout of the model on the devices, and no row appears twice; rows of a
    published layout are there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from equipoise.base.arrays import Flags, Ints
from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.columns import (
    CONTEXT_STRATEGIES,
    NAMED,
    RECOMPUTES,
    SCHEDULES,
    WHOLE_LAYERS,
    Rows,
    Space,
    schedules_with,
)
from equipoise.plan.space.lattice import Lattice, ValueLists
from equipoise.plan.space.runnable import keep_runnable
from equipoise.spec import catalog
from equipoise.spec.catalog import Policy, ScheduleTraits
from equipoise.spec.layout import ORDERS
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import OFFLOADS, Offload
from equipoise.spec.program.spec import DEFAULT, ProgramSpec
from equipoise.spec.recompute import planned_modules

_ALONE = "1f1b"
"""The schedule of rows without a pipeline, where it says nothing."""
_MOST_MICRO_BATCH = 16
_MOST_TOKENS = 65_536
"""The most tokens of a micro-batch of more windows than that."""
_MOST_TP = 16
_LEAST_TOKENS = 1024
"""The fewest tokens of a context rank: below, messages take longer than they save."""

_CELL = ("tp", "cp", "pp", "dp", "ep", "etp", "micro_batch", "micro_batches")

Fixed = Mapping[str, int | str]
"""Columns that have one value, by ``plan.space.columns.COLUMNS``; of those that are named, a
name."""


def list_lattice(
    model: ModelSpec,
    devices: int,
    base: StepOptions,
    *,
    fixed: Fixed | None = None,
    policies: Sequence[Policy] = (),
    modules: Sequence[str] = (),
) -> Lattice:
    """Every choice for one step, numbered and not listed.

    Args:
        model: Sizes.
        devices: Devices of the cluster; every one is used.
        base: Window, sequences of the step, precision, stack: what is not to be chosen.
        fixed: Columns that have one value.
        policies: Policies to choose from for packed documents; that of the base unless given.
        modules: Settings of modules to choose from, beside those of whole layers.

    Raises:
        SpecError: nothing is left; says what was fixed.

    Cost: some 10 ms, and about 0.2 us a cell.
    """
    given = dict(fixed or {})
    cells = _list_cells(model, devices, base, given)
    factors = []
    if len(cells["tp"]):
        factors = [
            _share(cells, devices, given),
            _order(cells, given),
            _pipe(cells, model, given, policies or (base.policy,)),
            _repeat(cells, given, modules),
            _exchange(cells, model, given),
        ]
    offload = OFFLOADS.index(cast(Offload, given.get("offload", "none")))
    lattice = Lattice({name: cells[name] for name in _CELL}, tuple(factors), base, offload)
    if not factors or not len(lattice):
        said = ", ".join(f"{name} = {value}" for name, value in given.items())
        less = ", or fix less" if said else ""
        raise SpecError(
            f"No layout of {devices:,} devices carries {model.layers} layers of {model.heads} "
            f"heads and {base.step_sequences:,} sequences a step"
            f"{' with ' if said else ''}{said}. Give sequences that more data-parallel "
            f"ranks divide{less}."
        )
    return lattice.restrict({})


def list_runnable(
    program: ProgramSpec,
    model: ModelSpec,
    devices: int,
    base: StepOptions,
    *,
    fixed: Fixed,
    policies: Sequence[Policy] = (),
) -> Lattice:
    """Every choice for one step that a program can run, with the modules that it recomputes.

    Raises:
        SpecError: nothing is left, or it can run nothing of it.
    """
    modules = planned_modules(model, program.modules)
    lattice = list_lattice(model, devices, base, fixed=fixed, policies=policies, modules=modules)
    return lattice if program.name == DEFAULT else keep_runnable(program, lattice)


def list_space(
    model: ModelSpec,
    devices: int,
    base: StepOptions,
    *,
    fixed: Fixed | None = None,
    policies: Sequence[Policy] = (),
    modules: Sequence[str] = (),
) -> Space:
    """Every choice for one step, as columns: ``list_lattice``, listed.

    Args:
        model: Sizes.
        devices: Devices of the cluster; every one is used.
        base: Window, sequences of the step, precision, stack: what is not to be chosen.
        fixed: Columns that have one value.
        policies: Policies to choose from for packed documents; that of the base unless given.
        modules: Settings of modules to choose from, beside those of whole layers.

    Raises:
        SpecError: nothing is left; says what was fixed.

    Cost: about 0.3 us a choice.

    >>> from equipoise.spec.model.presets import preset
    >>> space = list_space(preset("llama3-8b"), 6, StepOptions(8192, 6), fixed={"tp": 2, "pp": 3})
    >>> sorted({space.choice(row).layout.dp for row in range(len(space))})
    [1]
    """
    lattice = list_lattice(model, devices, base, fixed=fixed, policies=policies, modules=modules)
    return lattice.keep(np.arange(len(lattice)))


def _list_cells(model: ModelSpec, devices: int, base: StepOptions, fixed: Fixed) -> dict[str, Ints]:
    """Degrees and micro-batches, crossed one by one."""
    rows = Rows(fixed, NAMED)
    degrees = divisors(devices)
    rows.cross("tp", [each for each in degrees if each <= _MOST_TP and _carries(model, each)])
    rows.cross("pp", [each for each in degrees if each <= model.layers])
    rows.keep(devices % (rows["tp"] * rows["pp"]) == 0)
    rows.cross("cp", degrees)
    rows.keep(devices % (rows["tp"] * rows["pp"] * rows["cp"]) == 0)
    rows.keep((rows["cp"] == 1) | (base.context_tokens // rows["cp"] >= _LEAST_TOKENS))
    rows.derive("dp", devices // (rows["tp"] * rows["pp"] * rows["cp"]))
    most = max(_MOST_MICRO_BATCH, _MOST_TOKENS // base.context_tokens)
    rows.cross("micro_batch", [each for each in divisors(base.step_sequences) if each <= most])
    rows.keep(base.step_sequences % (rows["dp"] * rows["micro_batch"]) == 0)
    _fold_experts(rows, model)
    rows.derive("micro_batches", base.step_sequences // (rows["dp"] * rows["micro_batch"]))
    return rows.columns


def _fold_experts(rows: Rows, model: ModelSpec) -> None:
    """Experts over ep ranks in equal runs, their hidden units over etp."""
    sizes = divisors(model.experts) if model.experts else [1]
    rows.cross("ep", sizes)
    rows.cross("etp", [each for each in (1, 2, 4, 8, 16) if model.experts or each == 1])
    rows.keep((rows["etp"] == 1) | (rows["etp"] == rows["tp"]))
    stage = rows["tp"] * rows["cp"] * rows["dp"]
    rows.keep(stage % (rows["ep"] * rows["etp"]) == 0)


def _factor(
    keys: Mapping[str, Ints], fixed: Fixed, names: Sequence[str], cross: Callable[[Rows], None]
) -> ValueLists:
    """A factor whose lists follow from a few numbers of a cell.

    Args:
        keys: Those numbers, int64 [cells] each.
        fixed: Columns that have one value.
        names: Columns that the factor gives.
        cross: Adds them to rows that have the keys.
    """
    table = np.stack(list(keys.values()))
    kinds, kind = np.unique(table, axis=1, return_inverse=True)
    rows = Rows(fixed, NAMED)
    rows.columns["kind"] = np.arange(kinds.shape[1], dtype=np.int64)
    rows.columns |= dict(zip(keys, kinds.astype(np.int64), strict=True))
    cross(rows)
    values = {name: rows[name] for name in (*keys, *names)}
    return ValueLists.of_lists(kind.reshape(-1).astype(np.int64), rows["kind"], values, names)


def _share(cells: dict[str, Ints], devices: int, fixed: Fixed) -> ValueLists:
    """Who shares weights: the ZeRO stage, and of stage 3 without stages the copies."""
    ranks, batches = cells["dp"] * cells["cp"], cells["micro_batches"]
    piped = (cells["pp"] > 1).astype(np.int64)
    is_once = ((cells["pp"] == 1) & (batches == 1)).astype(np.int64)

    def cross(rows: Rows) -> None:
        rows.cross("zero", [1, 0, 2, 3], where=rows["ranks"] > 1)
        rows.keep((rows["zero"] != 2) | (rows["is_once"] == 1))
        degrees = divisors(devices)
        rows.cross("replicas", degrees, where=(rows["zero"] == 3) & (rows["is_piped"] == 0))
        ranks = rows["ranks"]
        rows.keep((ranks % rows["replicas"] == 0) & ((rows["replicas"] < ranks) | (ranks == 1)))

    keys = {"ranks": ranks, "is_piped": piped, "is_once": is_once}
    return _factor(keys, fixed, ("zero", "replicas"), cross)


def _order(cells: dict[str, Ints], fixed: Fixed) -> ValueLists:
    """Which of stages and data-parallel ranks are neighbours, where there are both."""
    both = np.where((cells["pp"] > 1) & (cells["dp"] > 1), 2, 1)

    def cross(rows: Rows) -> None:
        rows.cross("order", range(len(ORDERS)), where=rows["both"] > 1)

    return _factor({"both": both}, fixed, ("order",), cross)


def _pipe(
    cells: dict[str, Ints], model: ModelSpec, fixed: Fixed, policies: Sequence[Policy]
) -> ValueLists:
    """Schedules with their stages of a rank, and the policies that run in them."""

    def cross(rows: Rows) -> None:
        _schedules(rows, model)
        rows.cross("policy", [NAMED["policy"].index(each) for each in policies])
        rows.keep(_divides(rows))

    keys = {"pp": cells["pp"], "micro_batches": cells["micro_batches"]}
    keys["cp"] = np.minimum(cells["cp"], 2)
    return _factor(keys, fixed, ("schedule", "virtual", "policy"), cross)


def _repeat(cells: dict[str, Ints], fixed: Fixed, modules: Sequence[str]) -> ValueLists:
    """What is computed again; a set of modules that is given need not be one of those planned."""
    given = str(fixed.get("recompute", ""))
    names = dict.fromkeys((*WHOLE_LAYERS, *modules, *[given] * (given in RECOMPUTES)))

    def cross(rows: Rows) -> None:
        rows.cross("recompute", [RECOMPUTES.index(name) for name in names])

    return _factor({"alike": np.ones_like(cells["pp"])}, fixed, ("recompute",), cross)


def _exchange(cells: dict[str, Ints], model: ModelSpec, fixed: Fixed) -> ValueLists:
    """What travels between context ranks."""

    def cross(rows: Rows) -> None:
        rows.cross("context_strategy", range(len(CONTEXT_STRATEGIES)), where=rows["cp"] > 1)
        rows.keep((rows["cp"] == 1) | _strategy_carries(rows, model))

    keys = {"cp": cells["cp"], "tp": cells["tp"]}
    return _factor(keys, fixed, ("context_strategy",), cross)


def _schedules(rows: Rows, model: ModelSpec) -> None:
    known = schedules_with(lambda each: each.planned == "always" or rows.is_fixed("schedule"))
    known.sort(key=lambda place: SCHEDULES[place] != _ALONE)
    rows.cross("schedule", known, where=rows["pp"] > 1)
    many = _is(rows, lambda each: each.is_interleaved)
    each = range(1, model.layers // 2 + 1)  # layers of a stage
    stages = sorted(
        {-(-model.layers // (pp * size)) for pp in set(rows["pp"].tolist()) for size in each}
    )
    rows.cross("virtual", [1, *[virtual for virtual in stages if virtual > 1]], where=many)
    layers = -(-model.layers // (rows["pp"] * rows["virtual"]))
    is_fewest = rows["virtual"] == -(-model.layers // (rows["pp"] * layers))
    rows.keep(~_is(rows, lambda each: each.is_interleaved) | ((rows["virtual"] > 1) & is_fewest))
    two = _is(rows, lambda each: each.in_v)
    rows.derive("virtual", np.where(two, 2, rows["virtual"]))
    rows.keep(rows["pp"] * rows["virtual"] <= model.layers)
    needs = np.array([catalog.SCHEDULES[name].batches_per_rank for name in SCHEDULES])
    rows.keep(rows["micro_batches"] >= needs[rows["schedule"]] * rows["pp"])


def _is(rows: Rows, trait: Callable[[ScheduleTraits], bool]) -> Flags:
    return np.isin(rows["schedule"], schedules_with(trait))


def _strategy_carries(rows: Rows, model: ModelSpec) -> Flags:
    """Heads divide over the ranks that exchange them."""
    heads = model.heads // rows["tp"]
    exchanges = rows["context_strategy"] == CONTEXT_STRATEGIES.index("ulysses")
    return np.asarray(~exchanges | (heads % rows["cp"] == 0))


def _divides(rows: Rows) -> Flags:
    """Where ranks can run what a policy divides, as ``balance.packing.turns.require_policy``.

    Not every schedule runs units of micro-batches that share documents.
    """
    divided = [traits.divides_over for traits in catalog.POLICIES.values()]
    together, over_time = (
        np.isin(rows["policy"], [at for at, over in enumerate(divided) if over == kind])
        for kind in ("ranks", "time")
    )
    one = rows["cp"] == 1
    alone = one & (rows["pp"] == 1)
    in_units = one & (rows["pp"] > 1) & _is(rows, lambda each: each.runs_slices)
    return np.asarray((~together | alone) & (~over_time | in_units))


def _carries(model: ModelSpec, tp: int) -> bool:
    """As ``Layout.require_model``: whole heads, and words and units for every rank."""
    parts = (-(-width // tp) * (tp - 1) < width for width in (model.ffn, model.vocab))
    return model.heads % tp == 0 and all(parts)


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
