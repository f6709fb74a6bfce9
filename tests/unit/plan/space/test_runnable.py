"""Choices that a program can run: by columns as one by one."""

import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.listing import list_lattice
from equipoise.plan.space.runnable import keep_runnable
from equipoise.spec.model.presets import preset
from equipoise.spec.program.file import program_names, read_program


@pytest.mark.long
@pytest.mark.parametrize("name", program_names())
def test_a_choice_is_kept_if_and_only_if_it_is_not_refused(name: str) -> None:
    program = read_program(name)
    space = list_lattice(preset("7m"), 8, StepOptions(4096, 16))
    every = keep_runnable(program, space)
    kept = {space_words(every, row) for row in range(len(every))}
    for row in range(0, len(space), 23):
        choice = space.choice(row)
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
            assert space_words(space, row) not in kept
        else:
            assert space_words(space, row) in kept


def space_words(space, row: int) -> str:
    choice = space.choice(row)
    return f"{choice.words()} {choice.layout.order}"


def test_a_space_without_a_runnable_choice_is_refused() -> None:
    space = list_lattice(preset("7m"), 4, StepOptions(4096, 16), fixed={"pp": 4})
    with pytest.raises(SpecError) as refused:
        keep_runnable(read_program("fsdp"), space)
    assert str(refused.value) == (
        f"program fsdp can run none of {len(space):,} choices. It has schedules none; recompute "
        "none, full; context strategies none; precision bf16, fp8, fp32; zero 0, 1, 3. Fix less of "
        "the layout, or give another --program."
    )
