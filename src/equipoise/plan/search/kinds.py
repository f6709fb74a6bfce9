"""Which search suits a space: listed or not, on one kind of node or on several.

Kept true (tests/unit/cli/plan/test_verb.py, tests/unit/plan/test_request.py)
    A vast space has a bound that covers all of it; what was not searched is said.
"""

import numpy as np

from equipoise.plan.bounds.across import least_across_s
from equipoise.plan.export.program import Program
from equipoise.plan.search.heuristics import recipe_rows
from equipoise.plan.search.mixed import ClassSearch
from equipoise.plan.search.search import Search
from equipoise.plan.search.vast import VAST, VastSearch, least_peak_s
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.packs import Packer
from equipoise.plan.space.published import recipes_of
from equipoise.sim.machine import Machine
from equipoise.spec.model.presets import ModelSpec

_TRIES = 8
"""Choices of one published recipe that are priced."""


def make_search(
    model: ModelSpec,
    machine: Machine,
    lattice: Lattice,
    name: str,
    *,
    packer: Packer | None = None,
    program: Program | None = None,
    by_layer: bool = False,
) -> tuple[Search, float]:
    """The search of a lattice, which is listed unless it is vast; and ``unlisted_s``.

    Published recipes of the model's name are looked at first. Of a vast one that has to be listed,
    because sites or layers differ, only what recipes differ in is searched.
    """
    is_uniform = len(machine.cluster.classes) == 1
    if program is not None:
        space, unlisted_s = program.keep(model, lattice), np.inf
    elif len(lattice) <= VAST:
        space, unlisted_s = lattice.keep(np.arange(len(lattice))), np.inf
    elif is_uniform and not by_layer:
        rows = [recipe.rows(lattice) for recipe in recipes_of(name)]
        published = tuple(row for each in rows for row in each.tolist()[:_TRIES])
        search = VastSearch(model, machine, lattice, packer=packer, published=published)
        return search, float(np.inf)
    else:
        space = lattice.keep(recipe_rows(lattice))
        unlisted_s = least_peak_s(model, machine, lattice, packs=packer is not None)
        if packer is None:
            unlisted_s = max(unlisted_s, least_across_s(model, machine, lattice))
    kind = Search if is_uniform else ClassSearch
    return kind(model, machine, space, packer=packer), float(unlisted_s)
