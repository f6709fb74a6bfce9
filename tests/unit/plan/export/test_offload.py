"""What of offloading other programs have, and its flags."""

import dataclasses
from typing import Literal

import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.export.settings import EXPORTS, to_megatron
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.listing import list_space
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.offload import OFFLOADS, Offload


def test_megatron_offloads_its_distributed_optimizer_and_layers_but_two() -> None:
    model, options = PLANNED["llama3-8b"], StepOptions(8192, 16)

    def last(offload: Offload, zero: Literal[1, 3] = 1) -> list[str]:
        choice = Choice(Layout(dp=8, zero=zero), dataclasses.replace(options, offload=offload))
        return to_megatron(model, choice, [32]).splitlines()

    plain = last("none")
    optimizer = ["--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0"]
    optimizer.append("--use-precision-aware-optimizer")
    assert last("optimizer") == [*plain, *optimizer]
    assert last("activations") == [*plain, "--cpu-offloading-num-layers 30"]
    assert last("both") == [*plain, *optimizer, "--cpu-offloading-num-layers 30"]
    with pytest.raises(SpecError) as caught:
        last("optimizer", zero=3)
    assert str(caught.value) == (
        "Megatron-LM offloads its distributed optimizer alone, which zero=3 does not use. Plan "
        "with --layout zero=1."
    )


def test_offloaded_choices_are_kept_to_what_is_not_refused() -> None:
    model, listed = PLANNED["llama3-8b"], StepOptions(8192, 16)
    fixed = {"cp": 1, "micro_batch": 2, "schedule": "1f1b"}
    for offload in OFFLOADS:
        space = list_space(model, 8, listed, fixed=fixed | {"offload": offload})
        for program, _ in EXPORTS.values():
            for row, can in enumerate(program.can(model, space).tolist()):
                choice = space.choice(row)
                try:
                    program.require(model, choice)
                except SpecError:
                    assert not can
                else:
                    assert can
