"""Seconds and bytes of one layer under every strategy that it may pick.

What it decides
    Which strategies there are: rows of the search's own space that share a base's stages and
    the sequences of a stage's micro-batch. Of one degree, strategies that another dominates in
    seconds, bytes that stay, bytes in flight and bytes while it runs are dropped. ZeRO 2
    pays for every micro-batch, as in ``sim.step``.

Kept true (tests/unit/plan/layers/test_search.py)
    The base is among the strategies, unless another of its degrees beats it; ZeRO 2 never beats 1
    in seconds where there are more micro-batches than one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import element_bytes
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import RECOMPUTES, Space
from equipoise.sim.mixed.layers import LayerStrategy, redistribute_s
from equipoise.sim.mixed.memory import layer_memory
from equipoise.sim.parameters import (
    between_s,
    gather_s,
    held_by_layer,
    moved_by_layer,
    optimizer_s,
    reduce_s,
)
from equipoise.sim.step import typical
from equipoise.spec.layout import Layout
from equipoise.spec.recompute import LayerRecompute

BASE_COLUMNS = ("pp", "ep", "etp", "virtual", "schedule", "order")
"""What layers share."""

_BY_LAYER = ("none", "attention", "selective", "full")
"""Settings of recomputation that are a layer's own."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """Every layer under every strategy."""

    strategies: tuple[LayerStrategy, ...]
    kinds: Ints
    """Strategies of one kind hand over alike; the base is of kind 0, int64 [strategies]."""
    between: Floats
    """All micro-batches' activations, moved there and gradients back, float64 [kinds, kinds]
    [s]."""
    seconds: Floats
    """Seconds of all micro-batches, float64 [layers, strategies]."""
    stays: Floats
    """Weights, gradients, moments, float64 [layers, strategies] [bytes]."""
    kept: Floats
    """Activations of one micro-batch in flight, likewise."""
    passing: Floats
    """While the layer runs, likewise."""


def list_strategies(space: Space, base: int, *, has_documents: bool) -> list[LayerStrategy]:
    """What a layer may pick beside a base, by the rows of the space.

    Args:
        space: The choices.
        base: Row of the base.
        has_documents: Whether documents are packed for the base's data degree.
    """
    layout = space.choice(base).layout
    alike = space["dp"] * space["micro_batch"] == space["dp"][base] * space["micro_batch"][base]
    for name in BASE_COLUMNS:
        alike &= space[name] == space[name][base]
    # Where dp is outermost, another dp is another stage's ranks.
    if has_documents or (layout.pp > 1 and layout.order[0] == "dp"):
        alike &= space["dp"] == layout.dp
    alike &= np.isin(space["recompute"], [RECOMPUTES.index(each) for each in _BY_LAYER])
    strategies: dict[LayerStrategy, None] = {}
    for row in np.flatnonzero(alike).tolist():
        each = space.choice(row)
        how = cast(LayerRecompute, each.options.recompute)
        strategies[LayerStrategy(each.layout, how, each.options.context_strategy)] = None
    return list(strategies)


def price_strategies(
    search: Search, choice: Choice, strategies: Sequence[LayerStrategy]
) -> LayerTable:
    """Every layer under each strategy that is of use.

    Args:
        search: Prices kernels, each once.
        choice: The base.
        strategies: From ``list_strategies``.

    Cost: about 1 ms a strategy on one context rank, 10 ms on several.
    """
    layout, model = choice.layout, search.model
    batches = search.whole_documents(choice)[0]
    most, count = max(sum(batch) for batch in batches), len(batches)
    share = most / (layout.tp * layout.cp)
    rows = [
        row
        for each in strategies
        if (row := _price(search, choice, each, batches, most)) is not None
    ]
    kept = _undominated(rows)
    kinds: dict[tuple[int, int], Layout] = {(layout.tp, layout.cp): layout}
    for row in kept:
        kinds.setdefault((row.own.layout.tp, row.own.layout.cp), row.own.layout)
    slow = 2.0 * count * choice.options.residuals.traffic
    between = [
        [
            slow * redistribute_s(search.machine, before, after, share, model.hidden)
            for after in kinds.values()
        ]
        for before in kinds.values()
    ]
    places = {kind: at for at, kind in enumerate(kinds)}
    return LayerTable(
        tuple(row.own for row in kept),
        np.array([places[row.own.layout.tp, row.own.layout.cp] for row in kept]),
        np.array(between),
        *(np.array([row.table[:, column] for row in kept]).T for column in range(4)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One strategy."""

    own: LayerStrategy
    table: Floats
    """Seconds, bytes that stay, are kept, pass; float64 [layers, 4]."""


def _price(
    search: Search,
    choice: Choice,
    own: LayerStrategy,
    batches: Sequence[Sequence[int]],
    most: float,
) -> _Row | None:
    model, machine, layout = search.model, search.machine, choice.layout
    asked = own.options(layout, choice.options)
    slow = asked.residuals.traffic
    batch = typical([batches])
    if own.layout.dp != layout.dp:  # full windows
        batch = np.full(asked.micro_batch, float(asked.context_tokens))
    try:
        layers = search.parts(Choice(own.layout, asked)).price(batch).layers
    except (LayoutError, SpecError):  # heads, or ranks of a node, that do not divide
        return None
    tokens = most * layout.dp / (own.layout.dp * own.layout.cp)
    known: dict[bool, tuple[float, float, float, float]] = {}
    for layer, parts in enumerate(layers):
        sparse = model.is_sparse(layer)
        if sparse in known:
            continue
        held = held_by_layer(model, own.layout, sparse=sparse)
        travels = moved_by_layer(model, own.layout, asked, sparse=sparse).once
        moved = reduce_s(machine, own.layout, travels, asked.stack.grad_bytes)
        if own.layout.zero:
            moved += gather_s(machine, own.layout, travels, element_bytes(asked.precision))
        once = float(parts.sum())
        exposed = max(0.0, slow * moved - once)
        seconds = len(batches) * once + exposed + optimizer_s(machine, own.layout, held, asked)
        if own.layout.zero == 2:
            scattered = slow * reduce_s(machine, own.layout, held, asked.stack.grad_bytes)
            backward, overlaps = float(parts[1:].sum()), asked.stack.data_overlap
            seconds += (len(batches) - 1) * between_s(scattered, backward, overlaps=overlaps)
        memory = layer_memory(model, asked, own, layer, tokens)
        stays, passing = sum(memory.stays.values()), sum(memory.passing.values())
        known[sparse] = seconds, stays, memory.kept, passing
    return _Row(own, np.array([known[model.is_sparse(layer)] for layer in range(model.layers)]))


def _undominated(rows: Sequence[_Row]) -> list[_Row]:
    """Dominance: of each degree, those that no other matches or beats in everything."""
    kept = []
    for at, row in enumerate(rows):
        kind = row.own.layout.tp, row.own.layout.cp
        others = [
            (place, other)
            for place, other in enumerate(rows)
            if place != at and (other.own.layout.tp, other.own.layout.cp) == kind
        ]
        if not any(
            (other.table <= row.table).all() and (place < at or (other.table < row.table).any())
            for place, other in others
        ):
            kept.append(row)
    return kept
