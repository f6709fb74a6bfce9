"""The cases of ``equipoise check --layout all-legal``, and what is found of each.

What it decides
    Every legal layout of a dense model and of one with experts, in fp64; and in fp32 all degrees
    of parallelism once, each at some ZeRO stage. Models are as deep as a layout has stages.
    Pipelines take turns among the strategies, so each comes with every other axis.

Kept true (tests/unit/train/check/test_all_legal_case.py)
    Each legal layout is a case; every strategy and every ZeRO stage has its share of them.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.layout import Layout
from equipoise.spec.layout_space import legal_layouts
from equipoise.spec.model.presets import ModelSpec

Precision = Literal["fp32", "fp64"]

TOLERANCES: dict[Precision, float] = {"fp32": 1e-5, "fp64": 1e-10}
"""Largest error of a loss or gradient, relative to its scale."""

_TURNS = [
    name for name, traits in SCHEDULES.items() if not (traits.is_lossy or traits.batches_per_rank)
]
"""Schedules that run any number of micro-batches and train the same model."""


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One layout, model and precision."""

    layout: Layout
    model: ModelSpec
    precision: Precision
    schedule: str
    """Of a pipeline; of others it says nothing."""

    def __str__(self) -> str:
        layout = self.layout
        axes = ("dp", "cp", "tp", "pp", "ep", "etp", "replicas")
        parts = [f"{axis} = {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1]
        parts += [f"zero = {layout.zero}", self.precision]
        parts += [self.schedule] if layout.pp > 1 else []
        kind = "experts" if self.model.experts else "dense"
        return f"{layout.world} ranks ({kind}, {', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class LayoutVerdict:
    """How far a layout is from one rank, and from itself."""

    case: LayoutCase
    loss_error: float
    gradient_error: float
    worst_parameter: str
    is_repeated: bool
    """Whether a second run had the same bits."""

    @property
    def error(self) -> float:
        """The larger of both."""
        return max(self.loss_error, self.gradient_error)

    @property
    def strain(self) -> float:
        """The error over what is allowed in its precision."""
        return self.error / TOLERANCES[self.case.precision]

    @property
    def is_exact(self) -> bool:
        """Within the tolerance of its precision, and the same again."""
        return self.strain <= 1.0 and self.is_repeated


def layout_cases(ranks: int, models: Sequence[ModelSpec]) -> list[LayoutCase]:
    """Every legal layout of these models in fp64, and every degree at some ZeRO stage in fp32.

    Args:
        ranks: In all.
        models: Dense, or with experts; of one that has none, layouts share no experts.
    """
    cases: list[LayoutCase] = []
    for model in models:
        depths = {pp: deepen(model, pp) for pp in range(1, ranks + 1)}
        names = itertools.cycle(_TURNS)
        stages = itertools.cycle(range(4))
        narrow = -1
        for layout in legal_layouts(ranks, depths[ranks]):
            if layout.zero == 0:  # the first of its degrees
                narrow = next(stages)
            own, schedule = depths[layout.pp], next(names)
            cases.append(LayoutCase(layout, own, "fp64", schedule))
            if (layout.zero, layout.replicas) == (narrow, 1):
                cases.append(LayoutCase(layout, own, "fp32", schedule))
    return cases


def deepen(model: ModelSpec, stages: int) -> ModelSpec:
    """With a layer for each stage at least."""
    return dataclasses.replace(model, layers=max(model.layers, stages))
