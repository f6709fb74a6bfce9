"""One data-parallel rank's pipeline: its schedule, and when each instruction is to run.

What it decides
    Nothing: a run and its simulation write schedules by ``schedule.pipeline.strategies`` and replay
    them here, whichever curve priced them.
"""

from dataclasses import dataclass
from functools import cached_property

from equipoise.base.arrays import Ints
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import PipelineTimeline, count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule

# `cached_property` needs a __dict__, which slots leave out.


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """A schedule and the prices that it was written for."""

    schedule: PipelineSchedule
    prices: PipelinePrices

    @cached_property
    def timeline(self) -> PipelineTimeline:
        """When each instruction is predicted to begin and end."""
        return replay_pipeline(self.schedule, self.prices)

    def in_flight(self, activation: Ints) -> Ints:
        """The most that each pipeline rank keeps at a time, int64 [ranks].

        Args:
            activation: What a forward leaves behind, int64 [stages, micro-batches].
        """
        return count_in_flight(self.schedule, activation).peak
