"""Published recipes: layouts that a model's authors, or its trainers' vendors, ran.

Why
    Somebody has trained most large models before. A plan that is slower than the layout in their
    report is wrong, and its reader knows the report.

What it decides
    Which choices of a lattice mean a recipe: those that agree in all that the recipe says. It may
    be for other devices, of another number: data-parallel ranks are what is left. Modules that the
    lattice does not have count as not given.

Kept true (tests/unit/plan/space/test_published.py)
    Every recipe stands in the lattice of its own model, cluster and step, and has a source.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.arrays import Ints
from equipoise.plan.space.columns import CONTEXT_STRATEGIES, NAMED, RECOMPUTES, WHOLE_LAYERS
from equipoise.plan.space.lattice import Lattice

_SAID = ("tp", "cp", "pp", "ep", "zero", "micro_batch", "schedule", "virtual", "recompute")
"""Columns that a recipe may give."""

_WHERE_OPEN = {
    "etp": [1],
    "replicas": [1],
    "recompute": [RECOMPUTES.index(each) for each in ("none", "selective", "full")],
    "context_strategy": [CONTEXT_STRATEGIES.index("needed-kv")],
}
"""What those have that a recipe does not give."""


@dataclass(frozen=True, slots=True)
class PublishedRecipe:
    """One published layout."""

    models: tuple[str, ...]
    device: str
    devices: int
    precision: str
    context_tokens: int
    step_sequences: int
    said: tuple[tuple[str, int | str], ...]
    """What it says of ``plan.space.columns.COLUMNS``."""
    source: str
    tokens_per_s: float | None
    """What a device was measured to do; None where that was not published."""

    def rows(self, lattice: Lattice) -> Ints:
        """Numbers of the choices that mean this recipe, int64 [n]."""
        said = {
            name: [NAMED[name].index(str(value)) if name in NAMED else int(value)]
            for name, value in self.said
        }
        some = lattice.find(said, strictly=True)
        if not len(some) and said.get("recompute", [0])[0] >= len(WHOLE_LAYERS):
            del said["recompute"]
            some = lattice.find(said, strictly=True)
        if not len(some):
            return some
        space = lattice.keep(some)
        kept = space["tp"] > 0
        for name, places in _WHERE_OPEN.items():
            here = sum((space[name] == place for place in places), start=space[name] < 0)
            both = kept & (here > 0)
            kept = both if name not in said and both.any() else kept
        return some[kept]


@functools.cache
def recipes() -> tuple[PublishedRecipe, ...]:
    """Every published recipe, as ``recipes.toml`` has them."""
    table = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text())
    return tuple(
        PublishedRecipe(
            models=tuple(row["models"]),
            device=row["device"],
            devices=row["devices"],
            precision=row["precision"],
            context_tokens=row["context_tokens"],
            step_sequences=row["step_sequences"],
            said=tuple((name, row[name]) for name in _SAID if name in row),
            source=row["source"],
            tokens_per_s=row.get("tokens_per_s"),
        )
        for row in table["recipe"]
    )


def recipes_of(model: str) -> tuple[PublishedRecipe, ...]:
    """Those of one model, by the name of its preset.

    >>> [recipe.devices for recipe in recipes_of("gpt-oss-120b")]
    [64]
    """
    return tuple(recipe for recipe in recipes() if model in recipe.models)
