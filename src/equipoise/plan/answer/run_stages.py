"""The stages of a run's pipeline: written into a plan, and read back from a lock that is obeyed.

What it decides
    Whether a lock's stages are those of a pipeline that trains: each layer in one stage, in order,
    and each stage on the rank where the schedule has it.

Kept true (tests/unit/plan/answer/test_run_stages.py)
    Written stages are accepted; edges that do not cover the layers are refused.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

from equipoise.base.errors import PlanError
from equipoise.plan.space.choice import Choice
from equipoise.schedule.pipeline.strategies import place_stages
from equipoise.sim.stages import ranks_of_stages
from equipoise.sim.step import StepRun
from equipoise.spec.plan import Stages
from equipoise.spec.run.spec import LayoutSpec


def run_stages(choice: Choice, run: StepRun) -> Stages | None:
    """The stages of a priced step; None where there is no pipeline."""
    if choice.layout.pp == 1:
        return None
    edges = np.concatenate(([0], np.cumsum(run.layers)))
    ranks = place_stages(choice.options.schedule, choice.layout.pp, len(run.layers))
    return Stages(tuple(edges.tolist()), tuple(ranks.tolist()))


def require_stages(stages: Stages, layout: LayoutSpec, layers: int, file: Path) -> None:
    """Refuse stages that this run cannot have.

    Args:
        stages: The lock's.
        layout: Of the run that obeys it.
        layers: Of its model.
        file: The lock.

    Raises:
        PlanError: the stages are not those of the layout, or do not cover the layers.
    """
    again = "Correct the file, or plan again: equipoise plan run.toml."
    edges, ranks = stages.edges, ranks_of_stages(layout).tolist()
    if layout.pp == 1 or len(edges) != layout.stages + 1 or list(stages.ranks) != ranks:
        raise PlanError(
            f"{file} has {len(edges) - 1} stages on ranks {_row(stages.ranks)}, and this run's "
            f"layout has {layout.stages} on ranks {_row(ranks)}. {again}"
        )
    if (
        edges[0] != 0
        or edges[-1] != layers
        or any(stop <= first for first, stop in pairwise(edges))
    ):
        raise PlanError(
            f"{file} splits layers at {_row(edges)}, and the model has {layers}. Edges ascend from "
            f"0 to {layers}. {again}"
        )


def _row(numbers: tuple[int, ...] | list[int]) -> str:
    return " ".join(map(str, numbers)) or "none"
