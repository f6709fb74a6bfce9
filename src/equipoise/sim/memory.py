"""Peak memory of every pipeline stage under the schedule that would run.

What it decides
    What each rank holds (``StageShare``): its layers, its tables, and how much is in flight,
    counted from the schedule's own order of instructions in tokens times layers, never taken to be
    the number of stages. What that takes is counted by ``cost.memory.device`` for a described
    program and by ``cost.memory.forecast`` for this package's own.

Kept true (tests/unit/sim/test_memory.py)
    Schedules that hold more need more; stages of a pipeline differ.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.base.arrays import Floats, Ints
from equipoise.cost.memory.device import host_memory, rank_memory
from equipoise.cost.memory.share import StageShare
from equipoise.cost.step.request import StepOptions
from equipoise.sim.parts import PipelineRun, layers_of_ranks
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class StageMemory:
    """Peaks of the data-parallel rank that holds most."""

    stage_bytes: Floats
    """Peak of each pipeline rank, float64 [pp] [bytes]."""
    terms: dict[str, float]
    """The fullest rank's peak by term [bytes]."""
    host_bytes: Floats
    """Host memory of each pipeline rank, float64 [pp] [bytes]."""
    flight_bytes: Floats
    """The part of ``stage_bytes`` that comes and goes with micro-batches, float64 [pp] [bytes]."""
    in_flight: Floats
    """What is in flight at that moment, in units of ``left`` times tokens, float64 [pp]."""
    left: Floats
    """What a forward of each stage leaves behind of a token, in any unit, float64 [stages]."""
    shares: tuple[StageShare, ...]
    """What each pipeline rank holds."""


def stage_memory(
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    split: StageSplit,
    runs: Sequence[PipelineRun],
) -> StageMemory:
    """Forecast every stage."""
    held = layers_of_ranks(split, layout, options)
    most = max(max(run.tokens) for run in runs)
    peaks = [run.in_flight(split.layers[:, None] * np.array(run.tokens)) for run in runs]
    in_flight = np.max(peaks, axis=0)
    shares = stage_shares(held, [most * max(1, len(mine)) for mine in held], in_flight)
    each = [rank_memory(model, layout, options, share, most / layout.cp) for share in shares]
    total = np.array([sum(terms.values()) for terms in each])
    host = host_of_ranks(model, layout, options, shares, most)
    flight = np.array([terms["activations"] for terms in each]) * (1 + options.stack.slack_share)
    left, fullest = split.layers.astype(np.float64), each[int(total.argmax())]
    return StageMemory(total, fullest, host, flight, in_flight.astype(np.float64), left, shares)


def with_keys(memory: StageMemory, keys_bytes: Floats) -> StageMemory:
    """With the keys of other pieces of divided documents.

    Args:
        memory: The step without them.
        keys_bytes: The keys of each pipeline rank, float64 [pp] [bytes].
    """
    peaks = memory.stage_bytes + keys_bytes
    # One rank's terms are known: that of the fullest without keys, which pipelines even out.
    more = float(peaks.max() - memory.stage_bytes.max())
    terms = memory.terms | {"activations": memory.terms["activations"] + more}
    flight = memory.flight_bytes + keys_bytes
    return dataclasses.replace(memory, stage_bytes=peaks, terms=terms, flight_bytes=flight)


def stage_shares(
    held: Sequence[Sequence[int]], batch: Sequence[float], in_flight: Ints
) -> tuple[StageShare, ...]:
    """What each pipeline rank holds.

    Args:
        held: Numbers of the layers of each rank.
        batch: What the largest micro-batch leaves behind on each rank, in any unit.
        in_flight: What each rank keeps at its fullest moment, in the same unit, [ranks].
    """
    last = max(max(mine, default=0) for mine in held)
    return tuple(
        StageShare(tuple(mine), rank == 0, last in mine, float(kept) / whole)
        for rank, (mine, whole, kept) in enumerate(zip(held, batch, in_flight, strict=True))
    )


def host_of_ranks(
    model: ModelSpec, layout: Layout, options: StepOptions, shares: Sequence[StageShare], most: int
) -> Floats:
    """Host memory of each pipeline rank, float64 [pp] [bytes].

    Args:
        model: Sizes.
        layout: Degrees.
        options: What is offloaded.
        shares: What each rank holds.
        most: Tokens of the largest micro-batch.
    """
    tokens = most / layout.cp
    terms = [host_memory(model, layout, options, share, tokens) for share in shares]
    return np.array([sum(each.values(), 0.0) for each in terms])
