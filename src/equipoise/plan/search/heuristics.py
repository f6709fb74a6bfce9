"""Primal heuristics: a good incumbent before any bound is tight.

Why
    A bound prunes nothing until there is an incumbent to beat. Where a price takes a second, a
    search is stopped before its bounds have led it anywhere, while anyone who lays a model out by
    hand has a good answer at once.

What it decides
    *Local search* (``climb``): guesses are the roofline's time, longer by what a pipeline of such
    stages waits, and by traffic inside and between layers; choices whose memory bound is close to
    the device's come last. From a beam of the best few that differ in their degrees, each *move*
    exchanges some columns; whatever enters the beam is moved from in turn, until nothing new does.
    Guesses decide the order of the search alone, never its answer.

    *Warm start* (``find_seeds``): published recipes. Tensor ranks stay within a node; windows are
    not grouped; data-parallel ranks share the optimizer (ZeRO 1), or without stages the weights,
    too (ZeRO 3); documents stay whole as long as they fit; pipelines are interleaved, with as many
    stages as there can be. For each number of tensor ranks, and with none, some or all recomputed,
    or modules, a recipe takes the layout that shares the model among the fewest ranks that hold it,
    by the bound of memory; where that does not fit when it is priced, the next. Experts lie on as
    few ranks as hold them, or on as many as can.

    Of a lattice of millions (``plan.search.vast``) both look at ``recipe_rows`` alone: the same
    rules, with every degree and every micro-batch, and without stages also with shared gradients
    (ZeRO 2), for devices that hold whole weights and not whole gradients beside them.

Kept true (tests/unit/plan/search/test_search.py, tests/unit/plan/search/test_heuristics.py)
    Every row is of the space; the local search ends; within each recipe the ranks that share the
    model only grow in number; a stopped search is no slower than any seed that was priced.

Sources
    Tensor ranks in a node, then stages, then data-parallel ranks, interleaved: Megatron-LM,
    arXiv:2104.04473, takeaways 1 to 3. Context ranks where windows ask for them: Llama 3,
    arXiv:2407.21783, section 3.3. Sharded weights without stages: FSDP, arXiv:2304.11277.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from equipoise.base.arrays import Flags, Floats, Ints
from equipoise.plan.bounds.roofline import needed_bytes, peak_bound_s
from equipoise.plan.space.columns import COLUMNS, NAMED, RECOMPUTES, Space, schedules_with
from equipoise.plan.space.lattice import Lattice
from equipoise.sim.machine import Machine
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import MODULE_SETS

MOVES = (
    ("recompute",),
    ("offload",),
    ("recompute", "offload"),
    ("order",),
    ("schedule", "virtual"),
    ("micro_batch",),
    ("tp", "dp"),
    ("pp", "dp", "schedule", "virtual"),
    ("tp", "pp", "schedule", "virtual"),
    ("cp", "dp", "context_strategy"),
    ("cp", "tp", "context_strategy"),
    ("zero", "replicas"),
    ("zero", "replicas", "recompute"),
    ("ep", "etp"),
    ("pp", "dp", "recompute", "schedule", "virtual"),
    ("tp", "dp", "recompute"),
    ("cp", "pp", "context_strategy", "schedule", "virtual"),
    ("tp", "pp", "dp", "schedule", "virtual"),
    ("tp", "cp", "pp", "context_strategy", "schedule", "virtual"),
    ("cp", "pp", "dp", "recompute", "context_strategy", "schedule", "virtual"),
)
"""Columns that a move exchanges together."""
_STARTS = 6
"""Best guesses of other degrees, among all and among those that leave room."""
_LIKELY = 20_000
"""Rows that they are looked for among."""
_TRIES = 4
"""Choices of one move."""
_ROUNDS = 4
_BEAM = 3
"""Choices of other degrees that are moved from at once."""
_AT_ONCE = 12
"""Choices that are priced before the clock is looked at."""
_ROOMY = 0.7
"""Share of the memory below which a bound leaves room."""
_CLOSE = 0.9
"""Share of the memory above which a bound leaves little room for what it does not count."""


def climb(
    space: Space,
    rows: Ints,
    memory: Floats,
    peak: Floats,
    price: Callable[[list[int]], Sequence[float]],
    is_over: Callable[[], bool],
    *,
    guess: Floats | None = None,
) -> None:
    """Price likely rows.

    Args:
        space: The choices.
        rows: Those that may fit, int64 [n].
        memory: Their memory bound over what a device has, float64 [n].
        peak: Their time bound, float64 [n] [s].
        price: Seconds of some rows; infinite of one that does not fit.
        is_over: Whether to stop.
        guess: A better guess of their time than ``guess_s``, float64 [n] [s].
    """
    if not len(rows):
        return
    kept = space.keep(rows)
    guess = guess_s(kept, peak) if guess is None else guess
    guess = guess * np.where(memory > _CLOSE, 1.5, 1.0)
    order = np.argsort(guess, kind="stable")
    tried, starts = dict[int, float](), list[int]()

    def attempt(places: list[int]) -> None:
        new = [at for at in dict.fromkeys(places) if at not in tried]
        for these in (new[at : at + _AT_ONCE] for at in range(0, len(new), _AT_ONCE)):
            seconds = [np.inf] * len(these) if is_over() else price(rows[these].tolist())
            tried.update(zip(these, seconds, strict=True))

    for likely in (order, order[memory[order] < _ROOMY]):
        starts += _apart(space, rows, likely[:_LIKELY].tolist(), _STARTS)
    attempt(starts)
    moved: set[int] = set()
    for _ in range(_ROUNDS):
        if not np.isfinite(min(tried.values())):  # nothing fits yet: what needs least
            attempt([int(np.argmin(memory))])
        ranked = sorted(tried, key=lambda at: (tried[at], at))
        beam = _apart(space, rows, ranked, _BEAM)
        for best in beam:
            if best in moved:
                continue
            moved.add(best)
            differs, places = _differing(kept, best), list[int]()
            for move in MOVES:
                fixed = sum(1 << at for at, name in enumerate(COLUMNS) if name not in move)
                near = np.flatnonzero(differs & fixed == 0)
                places += near[np.argsort(guess[near], kind="stable")][:_TRIES].tolist()
            attempt(places)
        ranked = sorted(tried, key=lambda at: (tried[at], at))
        if is_over() or set(_apart(space, rows, ranked, _BEAM)) <= moved:
            return


def _differing(space: Space, row: int) -> Ints:
    """Columns in which each row is not this one, a bit for each, int64 [rows]."""
    bits = np.zeros(len(space), dtype=np.int64)
    for at, name in enumerate(COLUMNS):
        bits |= (space[name] != space[name][row]).astype(np.int64) << at
    return bits


def _apart(space: Space, rows: Ints, ranked: Sequence[int], count: int) -> list[int]:
    """The first few that differ in a degree."""
    seen: dict[tuple[int, ...], int] = {}
    for at in ranked:
        degrees = tuple(int(space[name][rows[at]]) for name in ("tp", "cp", "pp", "dp", "ep"))
        seen.setdefault(degrees, at)
        if len(seen) == count:
            break
    return list(seen.values())


def guess_s(space: Space, peak: Floats) -> Floats:
    """A guess of each choice's step, by its roofline bound, float64 [rows] [s]."""
    traffic = 1.0 + 0.04 * np.log2(space["tp"]) + 0.5 * (space["tp"] > 8)
    traffic = traffic + 0.06 * np.log2(space["cp"])
    traffic = traffic + np.where((space["zero"] == 3) & (space["pp"] > 1), 1.0, 0.0)
    traffic = traffic + np.where((space["zero"] == 0) | sums_each(space), 0.05, 0.0)
    small = np.maximum(0.0, np.log2(4096 / (space["micro_batch"] * space.base.context_tokens)))
    return np.asarray(peak * waiting(space) * traffic * (1.0 + 0.05 * small))


def sums_each(space: Space) -> Flags:
    """Whether gradients are summed over ranks in each of several micro-batches."""
    return np.asarray((space["zero"] == 2) & (space.micro_batches > 1))


def waiting(space: Space) -> Floats:
    """A guess of what each choice's pipeline waits, beyond what bounds of 1F1B know [ratio]."""
    waits = (space["pp"] - 1) / (space["virtual"] * space.micro_batches)
    is_split = np.isin(space["schedule"], schedules_with(lambda each: each.splits_backward))
    is_plain = np.isin(space["schedule"], schedules_with(lambda each: each.is_plain))
    # The bound of 1F1B has its bubble in it.
    return np.where(is_plain, 1.0, 1.0 + waits * np.where(is_split, 0.6, 1.0))


def scattered(space: Space, node: int) -> Floats:
    """A guess of how much slower experts are on more nodes than they need, float64 [rows] [ratio].

    Ranks of one stage that follow each other are ``pp`` nodes apart in some orders.

    Args:
        space: The choices.
        node: Devices of a node.
    """
    own, group = space["tp"] * space["cp"], space["ep"] * space["etp"]
    stages = np.where(space["order"] == NAMED["order"].index("dp-pp"), space["pp"], 1)
    copies = -(-group // own)  # of a run of ranks that differ in tp and cp
    spread = np.minimum(own, group) + (copies - 1) * own * stages  # from first to last rank
    nodes = np.minimum(-(-spread // node), copies * -(-own // node))
    return np.asarray(1.0 + 0.25 * np.log2(nodes / np.minimum(nodes, -(-group // node))))


_AGAIN = tuple(RECOMPUTES.index(name) for name in ("none", "selective", "full", *MODULE_SETS))
_WHOLE = schedules_with(lambda each: each.is_common and not each.splits_backward)
_LAYOUTS = 3
"""Layouts of one recipe, each with more ranks to hold the model than the one before."""
_TP = (1, 2, 4, 8)
"""Tensor ranks, as far as a node has them."""

RECIPES = {
    "tp": _TP,
    "zero": (1, 3),
    "replicas": (1,),
    "etp": (1,),
    "order": (0, 1),
    "schedule": schedules_with(lambda each: each.is_common),
    "recompute": _AGAIN,
    "context_strategy": (NAMED["context_strategy"].index("needed-kv"),),
}
"""Columns of recipes, as ``plan.space.lattice.Lattice.find`` takes them."""


def recipe_rows(lattice: Lattice) -> Ints:
    """Numbers of the choices that recipes differ in, ascending, int64 [n].

    Cost: about 0.1 us a number.
    """
    some, alike = lattice.find(RECIPES), lattice.find(RECIPES | {"zero": (2,), "pp": (1,)})
    space = lattice.keep(alike)
    shares = (space["zero"] == 2) & (space["pp"] == 1)
    return np.union1d(some, alike[shares])


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
    guess = guess_s(kept, peak_bound_s(model, machine, kept, has_documents=has_documents))
    sharing = kept["pp"] * kept["cp"]
    is_plain = np.isin(kept["schedule"], schedules_with(lambda each: each.is_plain))
    recipes: dict[tuple[int, ...], dict[int, int]] = {}
    for widely in (-1, 1) if model.experts else (1,):
        order = np.lexsort((-kept["virtual"], is_plain, widely * kept["ep"], kept["cp"], sharing))
        for at in order.tolist():
            key = tuple(int(kept[name][at]) for name in ("tp", "zero", "recompute"))
            places = recipes.setdefault((widely, *key), {})
            if len(places) < _LAYOUTS:
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
