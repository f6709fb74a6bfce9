"""Peak memory of every pipeline stage whose layers are not all laid out alike.

What it decides
    A layer keeps, holds and passes through what it would in a step in which every layer is like
    it (``cost.memory.device``); of what passes, only the most of a rank's layers counts. How much
    is in flight follows from the schedule, in bytes that each stage's own layers keep.

Kept true (tests/unit/sim/mixed/test_layers.py)
    Layers that are all alike hold what ``sim.memory`` counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.base.arrays import Floats
from equipoise.cost.memory.device import kept_bytes, rank_memory, resident_bytes
from equipoise.cost.memory.share import StageShare
from equipoise.cost.step.request import StepOptions
from equipoise.sim.memory import StageMemory, host_of_ranks, stage_shares
from equipoise.sim.mixed.layers import LayerStrategy
from equipoise.sim.parts import PipelineRun, layers_of_ranks
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What one layer adds to its rank, by term [bytes]."""

    stays: dict[str, float]
    """Weights, gradients and moments."""
    kept: float
    """What it keeps of one micro-batch in flight."""
    passing: dict[str, float]
    """While it runs; of all layers only the most of them counts."""


def layer_memory(
    model: ModelSpec, options: StepOptions, strategy: LayerStrategy, layer: int, tokens: float
) -> LayerMemory:
    """Memory of one layer on one rank.

    Args:
        model: Sizes.
        options: Of a step in which every layer is like this one.
        strategy: The layer's.
        layer: Its number.
        tokens: Of the largest micro-batch, on this rank [tokens].
    """
    layout, sparse = strategy.layout, model.is_sparse(layer)
    share = StageShare((layer,), embeds=False, has_head=False, kept_micro_batches=0.0)
    terms = rank_memory(model, layout, options, share, tokens)
    passing = {name: terms[name] for name in ("working space", "communication", "allocator")}
    stays = {name: terms[name] for name in ("gradients", "optimizer")}
    # What ZeRO 3 gathers is let go of when the next layer runs.
    (passing if layout.zero == 3 else stays)["parameters"] = terms["parameters"]
    kept = kept_bytes(
        model,
        layout,
        options,
        sparse=sparse,
        recompute=strategy.recompute,
        doc_tokens=float(options.context_tokens),
        received_rows=options.skew_of(layout),
    )
    return LayerMemory(stays, kept * tokens, passing)


def ends_memory(
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    *,
    embeds: bool,
    has_head: bool,
    tokens: float,
) -> dict[str, float]:
    """A rank without its layers: tables, logits, and a place for every term [bytes]."""
    return rank_memory(model, layout, options, StageShare((), embeds, has_head, 0.0), tokens)


def layered_memory(
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    layers: Sequence[LayerStrategy],
    split: StageSplit,
    runs: Sequence[PipelineRun],
    capacities: Floats,
) -> StageMemory:
    """Peaks of every pipeline rank.

    Args:
        model: Sizes.
        layout: The base's degrees.
        options: The base's.
        layers: Of every layer of the model.
        split: Layers to stages.
        runs: Replayed pipelines, one a data-parallel rank.
        capacities: What each pipeline rank's device may fill, float64 [pp] [bytes].
    """
    most = max(max(run.tokens) for run in runs)
    own = {strategy: strategy.options(layout, options) for strategy in dict.fromkeys(layers)}
    each = []
    for layer, strategy in enumerate(layers):
        tokens = most * layout.dp / (strategy.layout.dp * strategy.layout.cp)
        each.append(layer_memory(model, own[strategy], strategy, layer, tokens))
    kept = np.add.reduceat([*(one.kept for one in each), 0.0], split.edges[:-1])
    kept[split.layers == 0] = 0.0
    peaks = [
        run.in_flight(np.round(kept[:, None] * np.array(run.tokens) / most).astype(np.int64))
        for run in runs
    ]
    in_flight = np.max(peaks, axis=0)
    held = layers_of_ranks(split, layout, options)
    by_rank, batches, flight = list[dict[str, float]](), list[float](), list[float]()
    for rank, mine in enumerate(held):
        has_head, tokens = model.layers - 1 in mine, most / layout.cp
        terms = ends_memory(
            model, layout, options, embeds=rank == 0, has_head=has_head, tokens=tokens
        )
        sizes = [each[layer].kept for layer in mine]
        here = resident_bytes(layout, options, float(in_flight[rank]), max(sizes, default=0.0))
        batches.append(max(1.0, sum(sizes)))
        terms["activations"] += here
        terms["allocator"] += options.stack.slack_share * here
        flight.append((1 + options.stack.slack_share) * here)
        every = (each[layer].passing for layer in mine)
        passing = max(every, key=lambda one: sum(one.values()), default={})
        for more in (passing, *(each[layer].stays for layer in mine)):
            for name, value in more.items():
                terms[name] += value
        by_rank.append(terms)
    totals = np.array([sum(terms.values()) for terms in by_rank])
    shares = stage_shares(held, batches, in_flight)
    host = host_of_ranks(model, layout, options, shares, most)
    units, fullest = in_flight.astype(np.float64), by_rank[int((totals / capacities).argmax())]
    return StageMemory(totals, fullest, host, np.array(flight), units, kept / most, shares)
