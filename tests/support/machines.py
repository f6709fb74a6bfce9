"""Small settings that the tests of the simulator share."""

import dataclasses
from typing import Any

from equipoise.cost.step.request import Stack, StepOptions
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.model.presets import ModelSpec, preset

MODEL = dataclasses.replace(preset("llama3-8b"), layers=8)
SPARSE = dataclasses.replace(preset("mixtral-8x7b"), layers=4)


def h100(devices: int) -> Machine:
    return Machine(find_cluster(f"h100-sxm:{devices}"))


def options(**changes: Any) -> StepOptions:
    sizes = {"context_tokens": 4096, "step_sequences": 16} | changes
    return StepOptions(**sizes)


def stack(**changes: Any) -> Stack:
    return dataclasses.replace(Stack(), **changes)


__all__ = ["MODEL", "SPARSE", "ModelSpec", "h100", "options", "stack"]
