"""Capabilities of another training program: names that it knows, and sizes that it cannot run.

Why
    A given program seldom supports the best of all choices. If it were refused only after the
    search, its reader would search again, once for every missing setting.

What it decides
    Which choices a program can run as they are priced. One rule judges a column of choices and a
    single one.

Kept true (tests/unit/plan/export/test_settings.py)
    A choice is kept if and only if it is not refused when it is exported alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.base.arrays import Flags
from equipoise.base.errors import SpecError
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import NAMED, Space, schedules_with
from equipoise.plan.space.lattice import Lattice
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.layout import ORDERS
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import OFFLOADS, Offload, offloads_activations, offloads_optimizer
from equipoise.spec.recompute import modules_of

Lack = tuple[Callable[[Mapping[str, Any]], Any], str]
"""Sizes that a program cannot run, of one choice or as columns of many, and the sentence that
refuses them. Sizes are the degrees of a layout, ``experts``, ``batches`` of a rank, and
whether a pipeline's micro-batches go round its stages ``in_rounds``, anything ``repeats`` or is in
host memory."""

_AT_ONCE = 1 << 18
"""Choices that are columns at the same time."""

_DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp", "zero", "replicas")


@dataclass(frozen=True, slots=True)
class Program:
    """Another training program."""

    title: str
    known: Mapping[str, Mapping[str, str]]
    """Its own names for the settings that it has, by what they set."""
    lacks: tuple[Lack, ...]
    modules: tuple[str, ...] = ()
    """Modules of a layer that it can compute again."""
    offloads_master: bool = True
    """As ``cost.step.request.Stack`` has it."""

    def require(self, model: ModelSpec, choice: Choice) -> dict[str, str]:
        """Its names for a choice's settings; stages and context ranks only where there are any.

        Raises:
            SpecError: it lacks a setting, or cannot run the sizes.
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
            if not self._knows(what, name):
                raise SpecError(
                    f'{self.title} has no {what} "{name}". Plan with one of '
                    f"{', '.join(self.known[what])}: --{what.replace(' ', '-')} NAME."
                )
        sizes = {axis: getattr(layout, axis) for axis in _DEGREES} | {
            "experts": model.experts,
            "batches": options.count_micro_batches(layout),
            "in_rounds": layout.pp > 1 and SCHEDULES[options.schedule].is_interleaved,
            "recompute": options.recompute,
            "repeats": options.recompute != "none",
            "hosts_optimizer": offloads_optimizer(options.offload),
            "hosts_activations": offloads_activations(options.offload),
        }
        for is_lacking, sentence in self.lacks:
            if is_lacking(sizes):
                raise SpecError(sentence.format_map(sizes))
        return {what: self.known[what].get(name, "") for what, name in said.items()}

    def _knows(self, what: str, name: str) -> bool:
        """Whether it has a setting; sets of modules are not named one by one."""
        if what == "recompute" and (modules := modules_of(name)):
            return modules <= set(self.modules)
        return name in self.known[what]

    def can(self, model: ModelSpec, space: Space) -> Flags:
        """Which choices it can do."""
        many = schedules_with(lambda each: each.is_interleaved)
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
        doable = np.full(len(space), space.base.precision in self.known["precision"])
        for column, where in asked.items():
            what, names = column.replace("_", " "), NAMED[column]
            has = [at for at, name in enumerate(names) if self._knows(what, name)]
            doable &= ~where | np.isin(space[column], has)
        for is_lacking, _ in self.lacks:
            doable &= ~is_lacking(sizes)
        return doable

    def keep(self, model: ModelSpec, lattice: Lattice) -> Space:
        """The choices that it can do, as columns.

        Raises:
            SpecError: it can do nothing of it; says what it has.
        """
        kept = []
        for first in range(0, len(lattice), _AT_ONCE):
            rows = np.arange(first, min(first + _AT_ONCE, len(lattice)))
            kept.append(rows[self.can(model, lattice.keep(rows))])
        doable = np.concatenate(kept)
        if len(doable):
            return lattice.keep(doable)
        known = "; ".join(f"{what} {', '.join(names)}" for what, names in self.known.items())
        raise SpecError(
            f"{self.title} can do none of {len(lattice):,} choices. It has {known}. Fix less of "
            f"the layout, or one of these."
        )


def _coded(what: Callable[[Offload], bool]) -> list[int]:
    return [at for at, setting in enumerate(OFFLOADS) if what(setting)]
