"""Choices that a training program can run.

Kept true (tests/unit/plan/space/test_runnable.py)
    A choice is kept if and only if ``ProgramSpec.require`` accepts it.
"""

from collections.abc import Sequence

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.columns import NAMED, RECOMPUTES
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.listing import Fixed, list_lattice
from equipoise.spec.catalog import Policy
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.program.spec import DEFAULT, ProgramSpec
from equipoise.spec.recompute import planned_modules

_WHERE = {"schedule": "pp", "context_strategy": "cp", "order": "both", "zero": "ranks"}
"""Ranks without which a column is not read."""


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


def keep_runnable(program: ProgramSpec, lattice: Lattice) -> Lattice:
    """The part of a lattice that a program can run.

    Raises:
        SpecError: it can run nothing of it; says what it has.
    """
    named: dict[str, Sequence[str] | None] = {
        "schedule": program.schedules,
        "recompute": [each for each in RECOMPUTES if program.can_recompute(each)],
        "context_strategy": program.context,
        "order": program.orders,
    }
    allowed: dict[str, Sequence[int]] = {
        column: [at for at, name in enumerate(NAMED[column]) if name in known]
        for column, known in named.items()
        if known is not None
    }
    if program.zero is not None:
        allowed["zero"] = program.zero
    if program.precision is None or lattice.base.precision in program.precision:
        runnable = lattice.restrict(allowed, _WHERE)
        if len(runnable):
            return runnable
    facts = {
        "schedules": program.schedules,
        "recompute": program.recompute,
        "context strategies": program.context,
        "precision": program.precision,
        "zero": program.zero,
    }
    said = "; ".join(
        f"{what} {', '.join(map(str, known)) or 'none'}"
        for what, known in facts.items()
        if known is not None
    )
    raise SpecError(
        f"program {program.name} can run none of {len(lattice):,} choices. It has {said}. Fix less "
        f"of the layout, or give another --program."
    )
