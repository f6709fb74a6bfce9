"""The cases of ``equipoise check --layout all-legal``.

Why
    Each axis is proven alone and beside some others by ``train.check.case``'s. Nobody
    thinks of what goes wrong between three of them, at one ZeRO stage, with odd replicas.
    There are some two thousand legal layouts of up to 8 ranks: few enough to run them all.

What it decides
    Every legal layout of a dense model and of one with experts, in fp64; and in fp32 all degrees
    of parallelism once, each at some ZeRO stage. Each runs a step of uneven documents twice, some
    micro-batches without tokens. Models are as deep as a layout has stages. Pipelines take turns
    among the schedules, so each comes with every other axis.

Kept true (tests/unit/train/check/test_legal.py)
    Each legal layout is a case; every schedule and every ZeRO stage has its share of them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.layout import Layout
from equipoise.spec.layout_space import legal_layouts
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import LayoutSpec, PackSpec, TrainSpec
from equipoise.train.check.case import FP64_TOLERANCE, TOLERANCE, Case, Precision, deepen

_DOCUMENT_TOKENS = (17, 3, 1, 9, 12, 2, 6, 4)

_WINDOW_TOKENS = 27
"""Tokens of a micro-batch: no document is cut, so all layouts have one reference."""

_TURNS = tuple(
    name for name, traits in SCHEDULES.items() if not (traits.is_lossy or traits.batches_per_rank)
)
"""Schedules that run any number of micro-batches and train the same model."""

_DEGREES = ("dp", "cp", "tp", "pp", "ep", "etp", "zero", "replicas")


def legal_case(layout: Layout, model: ModelSpec, precision: Precision, schedule: str) -> Case:
    """One layout, model and precision.

    Args:
        layout: In the usual order of axes.
        model: Deepened where the layout has more stages than it has layers.
        precision: Of weights and activations.
        schedule: Of a pipeline; without one it says nothing.
    """
    fields: dict[str, Any] = {name: getattr(layout, name) for name in _DEGREES}
    spec = LayoutSpec(**fields | ({"schedule": schedule} if layout.pp > 1 else {}))
    return Case(
        layout.world,
        deepen(model, spec.stages),
        spec,
        PackSpec(context_tokens=_WINDOW_TOKENS, step_tokens=sum(_DOCUMENT_TOKENS)),
        TrainSpec(),
        precision,
        FP64_TOLERANCE if precision == "fp64" else TOLERANCE,
        _DOCUMENT_TOKENS,
        repeats=True,
    )


def layout_cases(ranks: int, models: Sequence[ModelSpec]) -> list[Case]:
    """Every legal layout of these models in fp64, and every degree at some ZeRO stage in fp32.

    Args:
        ranks: In all.
        models: Dense, or with experts; without any, layouts share no experts.
    """
    cases: list[Case] = []
    for model in models:
        names, stages = itertools.cycle(_TURNS), itertools.cycle(range(4))
        narrow = -1
        for layout in legal_layouts(ranks, deepen(model, ranks)):
            if layout.zero == 0:  # the first of its degrees
                narrow = next(stages)
            schedule = next(names)
            cases.append(legal_case(layout, model, "fp64", schedule))
            if (layout.zero, layout.replicas) == (narrow, 1):
                cases.append(legal_case(layout, model, "fp32", schedule))
    return cases
