"""A plan whose layers each pick their own strategy, within the memory of every stage.

Why
    Memory is filled in steps of whole settings: all layers recompute, or none does. The first
    stage of a pipeline holds the activations of all stages behind it, and recomputes for all of
    them. Layer by layer the memory of every stage is filled to its brim.

What it decides
    *Bases* are the fastest uniform choices that differ in what layers cannot choose: stages,
    schedule, experts, the micro-batch of a stage. A layer's strategies are the rows of the same
    space that share these: tensor, context and data degrees, ZeRO, recomputation, context
    strategy. Of each degree only strategies that none dominates in seconds and in bytes are kept.

    Each pipeline rank is then assigned exactly: time of all micro-batches, of the optimizer, and of
    what moves once a step and nothing hides; memory in units of what is left when each layer takes
    its least. Strategies of one *kind* hand over alike, so the state of the dynamic program is
    memory and kind, not memory and strategy::

        best[v, k] = least, over strategies s of kind k that take u <= v, of
                     time[s] + least over kinds j of (best'[v - u, j] + enter[j, k])

    Of equally fast ones, the last layers take the strategy that is listed first. What counts only
    once, the working space of whichever layer runs, is tried at each of its sizes, in the order of
    a Lagrangian lower bound. At last the whole step is replayed, and the uniform choice stays where
    it is as fast.

Kept true (tests/unit/plan/layers/test_search.py; tests/unit/plan/layers/test_assign.py)
    Never slower than the best uniform choice, and fits; on small spaces as fast as the fastest of
    all assignments that fit, replayed one by one.

Sources
    Galvatron, arXiv:2211.13878, section 4.2: strategies by layer within a stage's memory. There
    tables are updated in place, which is wrong for a layer that takes no unit; here each layer has
    its own.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import LayoutError, SpecError
from equipoise.plan.layers.table import (
    BASE_COLUMNS,
    LayerTable,
    list_strategies,
    price_strategies,
)
from equipoise.plan.search.deadline import NEVER, Deadline
from equipoise.plan.search.incumbent import Outcome
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.schedule.pipeline.replay import count_in_flight
from equipoise.sim.mixed.layers import LayerStrategy
from equipoise.sim.mixed.memory import ends_memory
from equipoise.sim.mixed.replay import run_layered, run_sites
from equipoise.sim.parts import layers_of_ranks
from equipoise.sim.step import StepRun

_BASES = 4
_UNITS = 256
"""Units of the memory that is left when every layer takes its least."""
_PRICES = 8
"""Doublings and halvings of a byte's price that a bound is looked for at."""
_TRIES = 3
"""Tries of one base, each with as much less memory as the last one was over."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A strategy of every layer."""

    strategies: Ints
    """int64 [layers]."""
    seconds: float
    """Seconds of all layers, entering and leaving counted."""


def assign_strategies(
    seconds: Floats, units: Ints, kinds: Ints, enter: Floats, leave: Floats, *, budget: int
) -> Assignment | None:
    """Choose a strategy for each of some layers that follow each other.

    Args:
        seconds: Each layer under each strategy, float64 [layers, strategies] [s].
        units: Memory of each, whole units of 0 or more, int64 [layers, strategies].
        kinds: Kind of each strategy, int64 [strategies].
        enter: From each kind to each, on the way into each layer, float64 [layers, kinds, kinds]
            [s]; what comes before the first layer is of kind 0.
        leave: From each kind to what comes after the last layer, float64 [kinds] [s].
        budget: Units that all layers may take.

    Returns:
        None where nothing fits.

    Cost: O(layers x budget x (strategies + kinds^2)), in NumPy.

    >>> time, memory = np.array([[1.0, 3.0]] * 3), np.array([[2, 1]] * 3)
    >>> assigned = assign_strategies(
    ...     time, memory, np.array([0, 0]), np.zeros((3, 1, 1)), np.zeros(1), budget=5
    ... )
    >>> assigned.strategies.tolist(), assigned.seconds
    ([1, 0, 0], 5.0)
    """
    layers, strategies = seconds.shape
    if budget < 0:
        return None
    best = np.full((budget + 1, len(leave)), np.inf)
    best[:, 0] = 0.0
    chosen = np.zeros((layers, budget + 1, len(leave)), dtype=np.int32)
    origin = np.zeros_like(chosen)
    for layer in range(layers):
        joined = best[:, :, None] + enter[layer]
        origin[layer] = joined.argmin(axis=1)
        entered = joined.min(axis=1)
        best = np.full_like(best, np.inf)
        for each in range(strategies):
            need, kind = int(units[layer, each]), int(kinds[each])
            if need > budget:
                continue
            time = entered[: budget + 1 - need, kind] + seconds[layer, each]
            is_less = time < best[need:, kind]
            best[need:, kind][is_less] = time[is_less]
            chosen[layer, need:, kind][is_less] = each
    last = best[budget] + leave
    kind, left = int(last.argmin()), budget
    if not np.isfinite(last[kind]):
        return None
    picked = np.zeros(layers, dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        picked[layer] = chosen[layer, left, kind]
        left -= int(units[layer, picked[layer]])
        kind = int(origin[layer, left, kind])
    return Assignment(picked, float(last.min()))


@dataclass(frozen=True, slots=True, eq=False)
class LayeredPlan:
    """Strategies of all layers."""

    choice: Choice
    """The base."""
    layers: tuple[LayerStrategy, ...]
    run: StepRun


def plan_layers(search: Search, outcome: Outcome, due: Deadline = NEVER) -> LayeredPlan | None:
    """The fastest plan by layers.

    Args:
        search: What was searched.
        outcome: What it plan.
        due: When bases are no longer tried.

    Returns:
        None where none is faster than the best uniform choice.

    Cost: some seconds for a hundred layers on a thousand ranks.
    """
    best: LayeredPlan | None = None
    least = outcome.fitting[0].step_s
    for row in _bases(search, outcome):
        plan = due.attempt(partial(plan_base, search, row))
        if plan is not None and plan.run.price.step_s < least:
            best, least = plan, plan.run.price.step_s
    return best


def _bases(search: Search, outcome: Outcome) -> list[int]:
    """Rows of the fastest choices that differ in what layers share."""
    space, rows = search.space, dict[tuple[int, ...], int]()
    for each in outcome.fitting:
        shared = [int(space[name][each.row]) for name in BASE_COLUMNS]
        group = int(space["dp"][each.row] * space["micro_batch"][each.row])
        rows.setdefault((*shared, group), each.row)
        if len(rows) == _BASES:
            break
    return list(rows.values())


def plan_base(search: Search, base: int) -> LayeredPlan | None:
    """The fastest plan by layers that shares a choice's stages; None where none fits.

    Args:
        search: Space, model, machine and documents.
        base: Row of its space.
    """
    choice = search.space.choice(base)
    documents = search.whole_documents(choice) if search.packer is not None else None
    try:
        whole = run_sites(
            search.model, search.machine, choice.layout, choice.options, documents=documents
        )
        strategies = list_strategies(search.listed, base, has_documents=documents is not None)
        table = price_strategies(search, choice, strategies)
    except (LayoutError, SpecError):  # a schedule that this many micro-batches do not fill
        return None
    stages = _Stages(search, choice, whole)
    short = 0.0
    for _ in range(_TRIES):
        layers = stages.assign(table, short)
        if layers is None:
            return None
        run = run_layered(
            search.model,
            search.machine,
            choice.layout,
            choice.options,
            layers,
            documents=documents,
        )
        if run.price.fits:
            return LayeredPlan(choice, layers, run)
        short += run.price.needs_bytes - run.price.capacity_bytes
    return None


class _Stages:
    """Pipeline ranks of a base: their layers, and what is in flight there."""

    def __init__(self, search: Search, choice: Choice, whole: StepRun) -> None:
        self._search, self._choice = search, choice
        layout, run = choice.layout, whole.slowest
        counts = np.array(whole.layers)
        edges = np.concatenate(([0], np.cumsum(counts)))
        split = StageSplit(edges, np.zeros(len(counts)))
        self._held = layers_of_ranks(split, layout, choice.options)
        self._begins = set(edges[:-1].tolist())
        self._most = max(run.tokens)
        activation = counts[:, None] * np.array(run.tokens)[None, :]
        peak = count_in_flight(run.schedule, activation).peak
        self._in_flight = [
            float(peak[rank]) / max(1, len(mine) * self._most)
            for rank, mine in enumerate(self._held)
        ]

    def assign(self, table: LayerTable, short: float) -> tuple[LayerStrategy, ...] | None:
        """Strategies of all layers, with ``short`` bytes less than there are."""
        of_layer: dict[int, LayerStrategy] = {}
        for rank, mine in enumerate(self._held):
            if not mine:
                continue
            chosen = self._assign_rank(table, rank, mine, short)
            if chosen is None:
                return None
            of_layer |= {
                layer: table.strategies[each]
                for layer, each in zip(mine, chosen.strategies.tolist(), strict=True)
            }
        return tuple(of_layer[layer] for layer in range(len(of_layer)))

    def _assign_rank(
        self, table: LayerTable, rank: int, mine: list[int], short: float
    ) -> Assignment | None:
        choice, model = self._choice, self._search.model
        layout, options = choice.layout, choice.options
        ends = ends_memory(
            model,
            layout,
            options,
            embeds=rank == 0,
            has_head=model.layers - 1 in mine,
            tokens=self._most / layout.cp,
        )
        room = self._search.machine.capacity_bytes - short - sum(ends.values())
        slack = 1.0 + options.stack.slack_share
        needs = table.stays[mine] + slack * self._in_flight[rank] * table.kept[mine]
        passing = table.passing[mine].max(axis=0)
        enter, leave = self._between(table, mine)
        best: Assignment | None = None
        # What only the layer that runs needs, at each size that would do for some strategies; the
        # most promising first, so that the rest need not be assigned.
        sizes = []
        for most in np.unique(passing).tolist():
            legal = np.flatnonzero(passing <= most)
            seconds, left = table.seconds[mine][:, legal], room - most
            sizes.append((lagrangian_bound_s(seconds, needs[:, legal], left), most, seconds, legal))
        for least, most, seconds, legal in sorted(sizes, key=lambda each: each[:2]):
            if best is not None and least >= best.seconds:
                break
            filled = _fill(seconds, needs[:, legal], table.kinds[legal], enter, leave, room - most)
            if filled is not None and (best is None or filled.seconds < best.seconds):
                best = Assignment(legal[filled.strategies], filled.seconds)
        return best

    def _between(self, table: LayerTable, mine: list[int]) -> tuple[Floats, Floats]:
        """On the way into each layer of a rank, and out of its last: stages begin as the base."""
        own = table.between
        through = own[:, :1] + own[:1, :]
        enter = np.array([through if layer in self._begins else own for layer in mine])
        enter[0] = own
        return enter, own[:, 0]


def lagrangian_bound_s(seconds: Floats, needs: Floats, room: float) -> float:
    """Lagrangian lower bound of all layers' seconds within some bytes; infinite where none fit.

    At any price of a byte, each layer's cheapest strategy takes its seconds and its bytes' price;
    all of them, less the price of the room, are never more than the layers take.

    Args:
        seconds: Each layer under each strategy, float64 [layers, strategies] [s].
        needs: Bytes likewise.
        room: Bytes for all layers.

    >>> float(lagrangian_bound_s(np.array([[1.0, 3.0]] * 3), np.array([[2.0, 1.0]] * 3), 4.5))
    6.0
    """
    if needs.min(axis=1).sum() > room:
        return np.inf
    span = float(np.ptp(needs))
    each = float(np.ptp(seconds)) / span if span else 0.0
    prices = each * np.array([0.0, *2.0 ** np.arange(-_PRICES, _PRICES, 0.5)])
    cheapest = (seconds + prices[:, None, None] * needs).min(axis=2).sum(axis=1)
    return float((cheapest - prices * room).max())


def _fill(
    seconds: Floats, needs: Floats, kinds: Ints, enter: Floats, leave: Floats, room: float
) -> Assignment | None:
    """Assign layers within some bytes, in units of what is left over each layer's least."""
    least = needs.min(axis=1, keepdims=True)
    left = room - float(least.sum())
    if left < 0:
        return None
    unit = max(left / _UNITS, 1.0)
    units = np.minimum(np.ceil((needs - least) / unit), _UNITS + 1).astype(np.int64)
    return assign_strategies(seconds, units, kinds, enter, leave, budget=int(left // unit))
