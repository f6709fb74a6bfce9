"""What another training program can do: names that it knows, and sizes that it does not carry.

Why
    The best of all choices is seldom one that a given program has. Told after the search, its
    reader would search again, once for every setting that is missing.

What it decides
    Which choices a program can run as they are priced. One rule judges a column of choices and a
    single one.

Kept true (tests/unit/plan/export/test_settings.py)
    What is kept of a space is what is not refused, choice by choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.base.arrays import Flags
from equipoise.base.errors import SpecError
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import MANY_STAGES, NAMED, Space
from equipoise.spec.layout import ORDERS
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import OFFLOADS, Offload, offloads_activations, offloads_optimizer

Lack = tuple[Callable[[Mapping[str, Any]], Any], str]
"""Sizes that a program does not carry, and the sentence that refuses them: of one choice, or a
column of each of many. Sizes are the degrees of a layout, ``experts``, ``batches`` of a rank, and
whether a pipeline's micro-batches go round its stages ``in_rounds``, anything ``repeats`` or is in
host memory."""

_DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp", "zero", "replicas")


@dataclass(frozen=True, slots=True)
class Program:
    """Another training program."""

    title: str
    known: Mapping[str, Mapping[str, str]]
    """Its own names of the settings that it has, by what they are of."""
    lacks: tuple[Lack, ...]
    offloads_master: bool = True
    """As ``cost.step.request.Stack`` has it."""

    def require(self, model: ModelSpec, choice: Choice) -> dict[str, str]:
        """Its names of what a choice says; without stages or context ranks, not of those.

        Raises:
            SpecError: it has no such setting, or does not carry the sizes.
        """
        layout, options = choice.layout, choice.options
        said: dict[str, str] = {
            "recompute": options.recompute,
            "offload": options.offload,
            "precision": options.precision,
        }
        if layout.pp > 1:
            said["schedule"] = options.schedule
            if layout.dp > 1:
                said["order"] = next(name for name, axes in ORDERS.items() if axes == layout.order)
        if layout.cp > 1:
            said["context strategy"] = options.context_strategy
        for what, name in said.items():
            if name not in self.known[what]:
                raise SpecError(
                    f'{self.title} has no {what} "{name}". Plan with one of '
                    f"{', '.join(self.known[what])}: --{what.replace(' ', '-')} NAME."
                )
        sizes = {axis: getattr(layout, axis) for axis in _DEGREES} | {
            "experts": model.experts,
            "batches": options.count_micro_batches(layout),
            "in_rounds": layout.pp > 1 and options.schedule in MANY_STAGES,
            "recompute": options.recompute,
            "repeats": options.recompute != "none",
            "hosts_optimizer": offloads_optimizer(options.offload),
            "hosts_activations": offloads_activations(options.offload),
        }
        for is_lacking, sentence in self.lacks:
            if is_lacking(sizes):
                raise SpecError(sentence.format_map(sizes))
        return {what: self.known[what][name] for what, name in said.items()}

    def can(self, model: ModelSpec, space: Space) -> Flags:
        """Which choices it can do."""
        many = [NAMED["schedule"].index(name) for name in MANY_STAGES]
        sizes = {axis: space[axis] for axis in _DEGREES} | {
            "experts": np.int64(model.experts),
            "batches": space.micro_batches,
            "in_rounds": (space["pp"] > 1) & np.isin(space["schedule"], many),
            "repeats": space["recompute"] != NAMED["recompute"].index("none"),
            "hosts_optimizer": np.isin(space["offload"], _coded(offloads_optimizer)),
            "hosts_activations": np.isin(space["offload"], _coded(offloads_activations)),
        }
        asked = {
            "order": (space["pp"] > 1) & (space["dp"] > 1),
            "schedule": space["pp"] > 1,
            "recompute": space["pp"] > 0,
            "offload": space["pp"] > 0,
            "context_strategy": space["cp"] > 1,
        }
        found = np.full(len(space), space.base.precision in self.known["precision"])
        for column, where in asked.items():
            names = self.known[column.replace("_", " ")]
            found &= ~where | np.isin(space[column], [NAMED[column].index(each) for each in names])
        for is_lacking, _ in self.lacks:
            found &= ~is_lacking(sizes)
        return found

    def keep(self, model: ModelSpec, space: Space) -> Space:
        """What of a space it can do.

        Raises:
            SpecError: nothing; says what it has.
        """
        found = self.can(model, space)
        if found.any():
            return space.keep(found)
        known = "; ".join(f"{what} {', '.join(names)}" for what, names in self.known.items())
        raise SpecError(
            f"{self.title} can do none of {len(space):,} choices. It has {known}. Fix less of the "
            f"layout, or one of these."
        )


def _coded(what: Callable[[Offload], bool]) -> list[int]:
    return [at for at, setting in enumerate(OFFLOADS) if what(setting)]
