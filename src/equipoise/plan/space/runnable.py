"""Choices that a training program can run.

Kept true (tests/unit/plan/space/test_runnable.py)
    A choice is kept if and only if ``ProgramSpec.require`` accepts it.
"""

from collections.abc import Sequence

from equipoise.base.errors import SpecError
from equipoise.plan.space.columns import NAMED, RECOMPUTES
from equipoise.plan.space.lattice import Lattice
from equipoise.spec.program.spec import ProgramSpec

_WHERE = {"schedule": "pp", "context_strategy": "cp", "order": "both", "zero": "ranks"}
"""Ranks without which a column is not read."""


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
