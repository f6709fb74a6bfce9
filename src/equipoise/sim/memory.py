"""Peak memory of every pipeline stage under the schedule that would run.

What it decides
    How much is in flight on each rank is counted from the schedule's own order of instructions,
    in tokens times layers, never taken to be the number of stages. What a layer keeps of a
    token, and what stays, is ``cost.memory.device``'s.

Kept true (tests/unit/sim/test_memory.py)
    Schedules that hold more need more; stages of a pipeline differ.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.stage import StageSplit
from equipoise.base.arrays import Floats, Ints
from equipoise.cost.memory.device import RankShare, host_memory, rank_memory
from equipoise.cost.step.request import StepOptions
from equipoise.schedule.pipeline.replay import count_in_flight
from equipoise.sim.parts import PipelineRun, layers_of_ranks
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class StageMemory:
    """Peaks of the data-parallel rank that holds most."""

    stage_bytes: Floats
    """Of each pipeline rank, float64 [pp] [bytes]."""
    terms: dict[str, float]
    """Of the fullest one [bytes]."""
    host_bytes: Floats
    """Of host memory, by each pipeline rank, float64 [pp] [bytes]."""
    flight_bytes: Floats
    """Of ``stage_bytes`` what comes and goes with micro-batches in flight, float64 [pp] [bytes]."""
    in_flight: Floats
    """At that moment, in units of ``left`` times tokens, float64 [pp]."""
    left: Floats
    """What a forward of each stage leaves behind of a token, in any unit, float64 [stages]."""


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
    in_flight = np.max([_in_flight(run, split) for run in runs], axis=0)
    kept = [float(in_flight[rank]) / max(1, len(mine) * most) for rank, mine in enumerate(held)]
    shares = share_of_ranks(model, layout, options, held, most, kept)
    terms = [rank_memory(model, layout, options, share) for share in shares]
    peaks = np.array([sum(found.values()) for found in terms])
    host = host_of_ranks(model, layout, options, shares)
    flight = np.array([found["activations"] for found in terms]) * (1 + options.stack.slack_share)
    left = split.layers.astype(np.float64)
    fullest = terms[int(peaks.argmax())]
    return StageMemory(peaks, fullest, host, flight, in_flight.astype(np.float64), left)


def with_keys(memory: StageMemory, keys_bytes: Floats) -> StageMemory:
    """With the keys of other pieces of divided documents.

    Args:
        memory: Of a step without them.
        keys_bytes: Of each pipeline rank, float64 [pp] [bytes].
    """
    peaks = memory.stage_bytes + keys_bytes
    # One rank's terms are known: that of the fullest without keys, which pipelines even out.
    more = float(peaks.max() - memory.stage_bytes.max())
    terms = memory.terms | {"activations": memory.terms["activations"] + more}
    flight = memory.flight_bytes + keys_bytes
    return dataclasses.replace(memory, stage_bytes=peaks, terms=terms, flight_bytes=flight)


def share_of_ranks(
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    held: Sequence[Sequence[int]],
    most: int,
    kept: Sequence[float],
) -> list[RankShare]:
    """What each pipeline rank of the fullest data-parallel rank holds.

    Args:
        model: Sizes.
        layout: Degrees.
        options: Of the step.
        held: Numbers of the layers of each rank.
        most: Tokens of the largest micro-batch.
        kept: Micro-batches in flight of each rank, of that size.
    """
    return [
        RankShare(
            tuple(mine),
            embeds=rank == 0,
            has_head=model.layers - 1 in mine,
            kept_micro_batches=kept[rank],
            tokens=most / layout.cp,
            doc_tokens=float(options.context_tokens),
            received_rows=options.expert_skew,
        )
        for rank, mine in enumerate(held)
    ]


def host_of_ranks(
    model: ModelSpec, layout: Layout, options: StepOptions, shares: Sequence[RankShare]
) -> Floats:
    """What each pipeline rank has in host memory, float64 [pp] [bytes]."""
    if options.offload == "none":
        return np.zeros(layout.pp)
    return np.array([sum(host_memory(model, layout, options, one).values(), 0.0) for one in shares])


def _in_flight(run: PipelineRun, split: StageSplit) -> Ints:
    """The most that each rank has in flight, in layers times tokens."""
    activation = split.layers[:, None] * np.array(run.tokens)[None, :]
    return count_in_flight(run.schedule, activation).peak
