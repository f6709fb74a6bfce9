"""Which layers each rank of a pipeline holds, and each step's schedule over them.

Why
    A step's micro-batches are never the same size, so no step's best schedule is another's. Where
    weights live, though, is decided once: the split into stages is for the lengths of the corpus,
    the schedule for the micro-batches of the step.

What it decides
    *Stages* are split so that the slowest is as fast as can be for the documents of the stream's
    first step, the head priced in. A checkpoint knows weights by name, so a run that goes on may
    split otherwise.

    *Schedules* are written by every rank from the pack alone. Data-parallel ranks have schedules
    of their own, unless they meet in a stage: in shared experts, or under ZeRO 2 and 3, which split
    gradients in every backward. Then they must run the same instructions in the same order, and
    one schedule is written for the longest of each micro-batch.

Kept true (tests/unit/sim/test_stages.py)
    Loads of all ranks add up to those of one rank; data-parallel ranks that meet within a step
    have one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from equipoise.balance.packing.divided import macro_units
from equipoise.balance.stage import (
    LayerPrices,
    StageSplit,
    price_layers,
    price_stages,
    split_model,
)
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.cost.memory.forecast import StageShare
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import PipelineTimeline, count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule, place_in_loop, place_in_v
from equipoise.schedule.pipeline.strategies import IN_V, write_pipeline
from equipoise.sim.rank_loads import ContextPlanner, RankLoads
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run.spec import Recompute

# `cached_property` needs a __dict__, which slots leave out.


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """One data-parallel rank's step."""

    schedule: PipelineSchedule
    prices: PipelinePrices

    @cached_property
    def predicted(self) -> PipelineTimeline:
        """When each instruction is to begin and end."""
        return replay_pipeline(self.schedule, self.prices)

    @cached_property
    def kept_layer_tokens(self) -> Ints:
        """Tokens times layers that each pipeline rank keeps at a time, int64 [ranks]."""
        return count_in_flight(self.schedule, self.prices.activation).peak


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
        cls, planner: ContextPlanner, curve: LoadCurve, recompute: Recompute, pieces: Pieces
    ) -> "StagePlanner":
        """Split a model for documents like these.

        Args:
            planner: Of the run's model and layout.
            curve: Price of a document.
            recompute: What a backward runs again.
            pieces: Of the stream's first step.

        Raises:
            LayoutError: fewer layers than stages.
        """
        layout, stages = planner.layout, planner.layout.stages
        typical = price_layers(curve, planner.model, [MicroBatch(pieces)])
        split = split_model(typical, planner.model, stages)
        in_v = layout.schedule in IN_V
        placed = place_in_v(layout.pp) if in_v else place_in_loop(layout.pp, stages)
        if len(placed) != stages:
            raise LayoutError(
                f'layout.schedule = "{layout.schedule}" goes down the ranks and back up, so it has '
                f"2 stages a rank, and layout.virtual = {layout.virtual}. Leave layout.virtual out."
            )
        return cls(planner, curve, recompute, split, placed)

    def share_of(self, rank: int) -> StageShare:
        """Layers and tables of a pipeline rank."""
        held = np.flatnonzero(self.rank_of == rank).tolist()
        edges = self.split.edges.tolist()
        layers = [layer for stage in held for layer in range(edges[stage], edges[stage + 1])]
        last = self.split.stages - 1
        return StageShare(tuple(layers), embeds=0 in held, has_head=last in held)

    def plan(self, packed: PackedStep) -> list[PlannedPipeline]:
        """The schedule of each data-parallel rank.

        Raises:
            LayoutError: the strategy cannot run these micro-batches; says what can.
        """
        layers = [self.planner.layer_prices(turns, self.curve) for turns in packed.ranks]
        units = [_units(turns) for turns in packed.ranks]
        if not self._is_shared:
            return [self._plan(*each) for each in zip(layers, units, strict=True)]
        common = self._plan(_longest(layers), _joined(units)).schedule
        return [PlannedPipeline(common, self._price(each)) for each in layers]

    def plan_rank(self, packed: PackedStep, data_rank: int) -> PlannedPipeline:
        """The schedule of one data-parallel rank, as ``plan`` has it."""
        if self._is_shared:
            return self.plan(packed)[data_rank]
        turns = packed.ranks[data_rank]
        return self._plan(self.planner.layer_prices(turns, self.curve), _units(turns))

    def loads(self, packed: PackedStep) -> RankLoads:
        """Load of each rank of the world: each stage's part of what its context ranks compute."""
        whole = self.planner.context_loads(packed, self.curve)
        planned = self.plan(packed)
        context, ranks = self.planner.context, self.planner.layout.pp
        busy = np.array([each.predicted.busy_ns for each in planned], dtype=np.float64)
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
                for kept in each.kept_layer_tokens.tolist()
                for _ in range(context)
            ),
            whole.turns_s / ranks,
            whole.meets_each_turn,
        ).divided(self.planner.layout.tp)

    def _longest_ns(self, packed: PackedStep, planned: Sequence[PlannedPipeline]) -> int:
        """When the last pipeline ends; those that meet go at the pace of each turn's slowest."""
        if not self._is_shared:
            return max(each.predicted.makespan_ns for each in planned)
        layers = [self.planner.layer_prices(turns, self.curve) for turns in packed.ranks]
        together = PlannedPipeline(planned[0].schedule, self._price(_longest(layers)))
        return together.predicted.makespan_ns

    @property
    def _is_shared(self) -> bool:
        """Whether data-parallel ranks meet in the middle of a stage: experts, or ZeRO 2 and 3."""
        layout = self.planner.layout
        return layout.ep * layout.etp > 1 or layout.zero >= 2

    def _price(self, layers: LayerPrices) -> PipelinePrices:
        return price_stages(self.split, layers, recompute=self.recompute)

    def _plan(self, layers: LayerPrices, units: list[tuple[int, int]]) -> PlannedPipeline:
        layout, prices = self.planner.layout, self._price(layers)
        written = write_pipeline(
            layout.schedule, prices, ranks=layout.pp, units=units, skip=layout.skip
        )
        return PlannedPipeline(written, prices)


def _longest(layers: Sequence[LayerPrices]) -> LayerPrices:
    """Each micro-batch as long as on the data-parallel rank where it is longest."""
    names = ("linear_ns", "attention_ns", "head_ns", "tokens")
    most = {name: np.max([getattr(each, name) for each in layers], axis=0) for name in names}
    return replace(layers[0], **most)


def _units(turns: Sequence[MicroBatch]) -> list[tuple[int, int]]:
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
