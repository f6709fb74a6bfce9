"""What published recipes would try first: the choices that a search never answers worse than.

Why
    Where a price takes a second, a search is stopped before its bounds have led it anywhere. Who
    lays a model out by hand has a good answer at once.

What it decides
    Recipes. Tensor ranks stay within a node; windows are not grouped; data-parallel ranks share
    the optimizer (ZeRO 1), or without stages the weights, too (ZeRO 3); documents stay whole as
    long as they fit; pipelines are interleaved, with as many stages as there can be. Of each number
    of tensor ranks, and with none, some or all computed again, the layout is taken that shares
    the model among the fewest ranks that hold it, by the bound of memory; where that does not fit
    when it is priced, the next. Experts lie on as few ranks as hold them, or on as many as can.

    Of a lattice of millions, listing it takes longer than an answer may. ``RECIPES`` is what then
    is listed instead: the same rules, with every degree and every micro-batch.

Kept true (tests/unit/plan/search/test_seeds.py)
    Every row is of the space, and within each recipe ranks that share the model only grow in
    number; a search that is stopped is no slower than any seed that was priced.

Sources
    Tensor ranks in a node, then stages, then data-parallel ranks, interleaved: Megatron-LM,
    arXiv:2104.04473, takeaways 1 to 3. Context ranks where windows ask for them: Llama 3,
    arXiv:2407.21783, section 3.3. Sharded weights without stages: FSDP, arXiv:2304.11277.
"""

import itertools

import numpy as np

from equipoise.base.arrays import Flags
from equipoise.plan.bounds.choices import least_seconds, needed_bytes
from equipoise.plan.search.climb import guess_s
from equipoise.plan.space.columns import NAMED, RECOMPUTES, Space, schedules_with
from equipoise.sim.machine import Machine
from equipoise.spec.model.presets import ModelSpec

_AGAIN = tuple(RECOMPUTES.index(name) for name in ("none", "selective", "full"))
_WHOLE = schedules_with(lambda each: each.is_common and not each.splits_backward)
_TRIES = 3
"""Choices of one recipe, each with more ranks to hold the model than the one before."""
_TP = (1, 2, 4, 8)
"""Tensor ranks, as far as a node has them."""

RECIPES = {
    "tp": _TP,
    "zero": (1, 3),
    "replicas": (1,),
    "etp": (1,),
    "order": (0,),
    "schedule": schedules_with(lambda each: each.is_common),
    "recompute": _AGAIN,
    "context_strategy": (NAMED["context_strategy"].index("needed-kv"),),
}
"""Columns of recipes, as ``plan.space.columns.list_space`` takes them."""


def find_seeds(
    model: ModelSpec, machine: Machine, space: Space, *, has_documents: bool
) -> list[list[int]]:
    """Rows of each recipe, what shares the model least first; the likeliest recipe first.

    Args:
        model: Sizes.
        machine: Devices of a node, and their memory.
        space: The choices.
        has_documents: Whether documents are packed.

    Cost: some ns a row, and 1 us each of those that follow recipes.
    """
    rows = np.flatnonzero(_follows(space, machine))
    kept = space.keep(rows)
    bounds = model, machine, kept
    needs = needed_bytes(*bounds, has_documents=has_documents)
    fits = needs <= machine.capacity_bytes
    rows, kept = rows[fits], kept.keep(fits)
    guess = guess_s(kept, least_seconds(model, machine, kept, has_documents=has_documents))
    sharing = kept["pp"] * kept["cp"]
    is_plain = np.isin(kept["schedule"], schedules_with(lambda each: each.is_plain))
    recipes: dict[tuple[int, ...], dict[int, int]] = {}
    for widely in (-1, 1) if model.experts else (1,):
        order = np.lexsort((-kept["virtual"], is_plain, widely * kept["ep"], kept["cp"], sharing))
        for at in order.tolist():
            key = tuple(int(kept[name][at]) for name in ("tp", "zero", "recompute"))
            places = recipes.setdefault((widely, *key), {})
            if len(places) < _TRIES:
                places.setdefault(int(sharing[at]), at)
    tries = [list(places.values()) for places in recipes.values()]
    tries.sort(key=lambda places: float(guess[places[0]]))
    # Guesses know little of what travels: the likeliest of those that shard weights and of those
    # that do not take turns.
    sharded = kept["zero"] == 3
    kinds = [[each for each in tries if sharded[each[0]] == kind] for kind in (False, True)]
    turns = itertools.chain(*itertools.zip_longest(*kinds))
    return [rows[places].tolist() for places in turns if places]


def _follows(space: Space, machine: Machine) -> Flags:
    """Whether each row follows a recipe, as far as what is fixed lets it."""
    node = min(each.devices_per_node for each in machine.cluster.classes)
    sharded = (space["zero"] == 3) & (space["pp"] == 1) & (space["replicas"] == 1)
    rules = [
        space["micro_batch"] == space["micro_batch"].min(),
        space["tp"] <= node,
        (space["zero"] == 1) | sharded,
        np.isin(space["schedule"], _WHOLE),
        np.isin(space["recompute"], _AGAIN),
        *(space[name] == space[name].min() for name in ("etp", "order", "context_strategy")),
        space["policy"] == space["policy"][:1],
    ]
    follows: Flags = np.ones(len(space), dtype=bool)
    for rule in rules:
        both = follows & rule
        follows = both if both.any() else follows
    return follows
