"""One data-parallel rank's pipeline, when each instruction is to run, and when the step ends.

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


def end_of_step_s(ranks_s: float, *, host_s: float, residual_share: float = 0.0) -> float:
    """How long a step takes, in a forecast and in a run's journal alike [s].

    Args:
        ranks_s: Until the last rank has computed and exchanged what it has to.
        host_s: What the host takes beside that.
        residual_share: The share of the step that its parts are measured to miss.

    >>> end_of_step_s(0.9, host_s=0.5, residual_share=0.1)
    1.5
    """
    return ranks_s / (1.0 - residual_share) + host_s
