"""Which layers each rank of a pipeline holds, and each step's schedule over them.

Why
    A step's micro-batches are never the same size, so no step's best schedule is another's. Where
    weights live, though, is decided once: the split into stages is for the lengths of the corpus,
    the schedule for the micro-batches of the step.

What it decides
    *Stages* are those of the plan that the run obeys. Without a plan they are split so that the
    slowest is as fast as can be for the documents of the stream's first step, the head priced in. A
    checkpoint knows weights by name, so a run that goes on may split otherwise.

    *Schedules* are written by every rank from the pack alone. Data-parallel ranks have schedules
    of their own, unless they meet in a stage: in shared experts, or under ZeRO 2 and 3, which split
    gradients in every backward. Then they must run the same instructions in the same order, and one
    schedule is written for the heaviest micro-batch of each turn (``sim.turns``).

Kept true (tests/unit/sim/test_stages.py)
    Loads of all ranks add up to those of one rank; data-parallel ranks that meet within a step
    have one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from equipoise.balance.packing.divided import macro_units
from equipoise.balance.stage import (
    StageSplit,
    price_layers,
    price_stages,
    split_at,
    split_model,
)
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.curve import LoadCurve
from equipoise.cost.memory.share import StageShare
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import place_stages, write_pipeline
from equipoise.sim.memory import stage_shares
from equipoise.sim.planned import PlannedPipeline
from equipoise.sim.rank_loads import ContextPlanner, RankLoads, batch_flop
from equipoise.sim.turns import heaviest_turns
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.plan import Stages
from equipoise.spec.run.resolved import read_resolved
from equipoise.spec.run.spec import LayoutSpec, Recompute, RunSpec


def settle_edges(
    spec: RunSpec, model: ModelSpec, folder: Path, planned: Stages | None
) -> tuple[int, ...]:
    """The stage edges that a run is to obey; empty where its ranks split layers when they start.

    Args:
        spec: The run.
        model: Its sizes.
        folder: The run's; where it has begun with a plan's edges, it keeps them.
        planned: The stages of the plan that it obeys now.
    """
    if planned is not None:
        return planned.edges
    try:
        begun = read_resolved(folder)
    except SpecError:
        return ()
    ours, theirs = spec.layout, begun.spec.layout
    is_alike = (ours.pp, ours.stages, ours.schedule) == (theirs.pp, theirs.stages, theirs.schedule)
    return begun.stage_edges if is_alike and begun.model == model else ()


@dataclass(frozen=True, slots=True, eq=False)
class StagePlanner:
    """Stages of one run and schedules of its steps, the same on every rank."""

    planner: ContextPlanner
    curve: LoadCurve
    recompute: Recompute
    split: StageSplit
    rank_of: Ints
    """Pipeline rank of each stage, int64 [stages]."""

    @classmethod
    def make(
        cls,
        planner: ContextPlanner,
        curve: LoadCurve,
        recompute: Recompute,
        pieces: Pieces,
        edges: Sequence[int] = (),
    ) -> "StagePlanner":
        """Split a model for documents like these, or as a plan has split it.

        Args:
            planner: The run's model and layout.
            curve: Price of a document.
            recompute: What a backward runs again.
            pieces: The stream's first step.
            edges: Stage s has layers ``edges[s]`` to ``edges[s + 1]``; split here where empty.

        Raises:
            LayoutError: fewer layers than stages.
        """
        layout, stages = planner.layout, planner.layout.stages
        typical = price_layers(curve, planner.model, [MicroBatch(pieces)])
        split = split_at(typical, edges) if edges else split_model(typical, planner.model, stages)
        return cls(planner, curve, recompute, split, ranks_of_stages(layout))

    @property
    def placed(self) -> Stages:
        """Layers and rank of each stage."""
        return Stages(tuple(self.split.edges.tolist()), tuple(self.rank_of.tolist()))

    def share_of(self, rank: int, kept_layer_tokens: int, most_tokens: int) -> StageShare:
        """Layers and tables of a pipeline rank, and micro-batches in flight.

        Args:
            rank: Which rank of the pipeline.
            kept_layer_tokens: The most tokens times layers that it keeps at a time.
            most_tokens: Tokens of the largest micro-batch.
        """
        held = self.split.layers_of(self.rank_of)
        batches = [len(mine) * most_tokens for mine in held]
        return stage_shares(held, batches, np.full(len(held), kept_layer_tokens))[rank]

    def plan(self, packed: PackedStep) -> list[PlannedPipeline]:
        """The schedule of each data-parallel rank.

        Raises:
            LayoutError: the strategy cannot run these micro-batches; says what can.
        """
        if self._has_one_order:
            common = self._write_common(packed)
            return [PlannedPipeline(common, self._price(turns)) for turns in packed.ranks]
        return [self._plan(turns, units_of(turns)) for turns in packed.ranks]

    def plan_rank(self, packed: PackedStep, data_rank: int) -> PlannedPipeline:
        """The schedule of one data-parallel rank, as ``plan`` has it."""
        turns = packed.ranks[data_rank]
        if self._has_one_order:
            return PlannedPipeline(self._write_common(packed), self._price(turns))
        return self._plan(turns, units_of(turns))

    def loads(self, packed: PackedStep) -> RankLoads:
        """Load of each rank of the world: each stage's part of what its context ranks compute."""
        whole = self.planner.context_loads(packed, self.curve)
        planned = self.plan(packed)
        context, ranks = self.planner.context, self.planner.layout.pp
        busy = np.array([each.timeline.busy_ns for each in planned], dtype=np.float64)
        busy[busy.sum(axis=1) == 0] = 1.0  # no tokens: nothing, in equal parts
        shares = busy / busy.sum(axis=1, keepdims=True)
        # Ranks are numbered dp, then pp, then cp.
        parts = np.repeat(shares[:, :, None], context, axis=2)

        def over(numbers: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            rows = np.array(numbers, dtype=np.float64).reshape(len(planned), 1, context)
            spread: np.ndarray[tuple[int], np.dtype[np.float64]] = (rows * parts).reshape(-1)
            return spread

        pieces = np.repeat(
            np.array(whole.pieces).reshape(len(planned), 1, context), ranks, axis=1
        ).reshape(-1)
        return RankLoads(
            over(whole.predicted_s).tolist(),
            _whole_parts(whole.tokens, parts),
            pieces.tolist(),
            _whole_parts(whole.flop, parts),
            self._longest_ns(packed, planned) * 1e-9,
            tuple(
                kept
                for each in planned
                for kept in each.in_flight(each.prices.activation).tolist()
                for _ in range(context)
            ),
            whole.turns_s / ranks,
            whole.meets_each_turn,
        ).divided(self.planner.layout.tp)

    def _longest_ns(self, packed: PackedStep, planned: Sequence[PlannedPipeline]) -> int:
        """When the last pipeline ends; those that meet go at the pace of each turn's slowest."""
        if not self._has_one_order:
            return max(each.timeline.makespan_ns for each in planned)
        heaviest = self._price(self._heaviest(packed))
        return PlannedPipeline(planned[0].schedule, heaviest).timeline.makespan_ns

    @property
    def _has_one_order(self) -> bool:
        """Whether all data-parallel ranks run one schedule, as ``parallel.pipeline`` asks of them.

        Ranks that share experts run it even where no other data-parallel rank has any of these
        experts, and so never waits for them (``Layout.meets_each_turn``).
        """
        layout = self.planner.layout
        return layout.ep * layout.etp > 1 or layout.zero >= 2

    def _heaviest(self, packed: PackedStep) -> list[MicroBatch]:
        return heaviest_turns(packed.ranks, lambda batch: batch_flop(batch, self.planner.model))

    def _write_common(self, packed: PackedStep) -> PipelineSchedule:
        """The schedule of data-parallel ranks that meet in each turn."""
        units = _joined([units_of(turns) for turns in packed.ranks])
        return self._plan(self._heaviest(packed), units).schedule

    def _price(self, turns: Sequence[MicroBatch]) -> PipelinePrices:
        layers = self.planner.layer_prices(turns, self.curve)
        return price_stages(self.split, layers, recompute=self.recompute)

    def _plan(self, turns: Sequence[MicroBatch], units: list[tuple[int, int]]) -> PlannedPipeline:
        layout, prices = self.planner.layout, self._price(turns)
        written = write_pipeline(
            layout.schedule, prices, ranks=layout.pp, units=units, skip=layout.skip
        )
        return PlannedPipeline(written, prices)


def ranks_of_stages(layout: LayoutSpec) -> Ints:
    """The pipeline rank of each stage of a run, int64 [stages].

    Raises:
        LayoutError: the schedule has another number of stages.
    """
    rank_of = place_stages(layout.schedule, layout.pp, layout.stages)
    if len(rank_of) != layout.stages:
        raise LayoutError(
            f'layout.schedule = "{layout.schedule}" goes down the ranks and back up, so it has 2 '
            f"stages a rank, and layout.virtual = {layout.virtual}. Leave layout.virtual out."
        )
    return rank_of


def units_of(turns: Sequence[MicroBatch]) -> list[tuple[int, int]]:
    """Runs of micro-batches that share documents; a document that comes twice is not shared."""
    if all(turn.attends_from is None for turn in turns):
        return [(at, at + 1) for at in range(len(turns))]
    return macro_units(tuple(turns))


def _joined(units: Sequence[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The finest runs that no data-parallel rank's documents cross.

    >>> _joined([[(0, 1), (1, 3)], [(0, 2), (2, 3)]])
    [(0, 3)]
    """
    ends = set.intersection(*({stop for _, stop in each} for each in units))
    edges = [0, *sorted(ends)]
    return list(pairwise(edges))


def _whole_parts(
    numbers: Sequence[int], parts: np.ndarray[tuple[int, int, int], np.dtype[np.float64]]
) -> list[int]:
    """Integers in these parts over the middle axis, which add up to them."""
    data_ranks, _, context = parts.shape
    whole = np.array(numbers, dtype=np.int64).reshape(data_ranks, 1, context)
    ends = np.rint(whole * np.cumsum(parts, axis=1)).astype(np.int64)
    ends[:, -1:] = whole
    counts: list[int] = np.diff(ends, axis=1, prepend=0).reshape(-1).tolist()
    return counts
