"""Choices that a program can run: by columns as one by one."""

import functools

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import COLUMNS
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.listing import list_lattice
from equipoise.plan.space.runnable import keep_runnable
from equipoise.spec.model.presets import preset
from equipoise.spec.program.file import program_names, read_program

Row = tuple[int, ...]
"""What stands in each column."""


def rows_of(lattice: Lattice, every: int = 1) -> list[Row]:
    some = lattice.keep(np.arange(0, len(lattice), every))
    return [*zip(*(some[name].tolist() for name in COLUMNS), strict=True)]


@functools.cache
def listed() -> tuple[Lattice, list[tuple[Row, Choice]]]:
    """Everything, and every 23rd choice of it, for all programs."""
    lattice = list_lattice(preset("7m"), 8, StepOptions(4096, 16))
    places = range(0, len(lattice), 23)
    return lattice, [*zip(rows_of(lattice, 23), map(lattice.choice, places), strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("name", program_names())
def test_a_choice_is_kept_if_and_only_if_it_is_not_refused(name: str) -> None:
    program = read_program(name)
    lattice, some = listed()
    kept = {*rows_of(keep_runnable(program, lattice))}
    for row, choice in some:
        options = choice.options
        try:
            program.require(
                choice.layout,
                schedule=options.schedule,
                recompute=options.recompute,
                context_strategy=options.context_strategy,
                precision=options.precision,
            )
        except SpecError:
            assert row not in kept
        else:
            assert row in kept


def test_a_space_without_a_runnable_choice_is_refused() -> None:
    space = list_lattice(preset("7m"), 4, StepOptions(4096, 16), fixed={"pp": 4})
    with pytest.raises(SpecError) as refused:
        keep_runnable(read_program("fsdp"), space)
    assert str(refused.value) == (
        f"program fsdp can run none of {len(space):,} choices. It has schedules none; recompute "
        "none, full; context strategies none; precision bf16, fp8, fp32; zero 0, 1, 3. Fix less of "
        "the layout, or give another --program."
    )
