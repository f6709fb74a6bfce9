"""The request to a pipeline strategy: prices, ranks, units and a memory bound."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.schedule.pipeline.prices import PipelinePrices, make_prices
from equipoise.schedule.pipeline.schedule import (
    Order,
    PipelineSchedule,
    finish_orders,
    place_in_loop,
    place_in_v,
    single_units,
    whole_paths,
)
from equipoise.spec.catalog import SCHEDULES

_REMEMBERED = 256
"""Schedules to cache; large ones have some ten thousand instructions."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRequest:
    """A step to schedule."""

    strategy: str
    prices: PipelinePrices
    ranks: int
    units: Ints
    """Runs of micro-batches that share documents, int64 [units, 2]."""
    most_held: Ints | None
    """The most that each rank may hold, int64 [ranks], in the unit of the activations."""
    skip: float = 0.0
    """Share of the stages that each micro-batch may leave out, in strategies that skip."""

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return self.prices.stages

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of the step."""
        return self.prices.micro_batches

    @property
    def chunks(self) -> int:
        """Number of stages of one rank."""
        return self.stages // self.ranks

    @property
    def is_divided(self) -> bool:
        """Whether some micro-batches share a document over time."""
        return len(self.units) < self.micro_batches

    def need_chunks(self, *allowed: int) -> None:
        """Refuse a number of stages per rank that the strategy does not support."""
        if self.chunks not in allowed:
            wanted = " or ".join(str(each * self.ranks) for each in allowed)
            raise LayoutError(
                f"{self.strategy} needs {wanted} stages on {self.ranks} ranks; there are "
                f"{self.stages}. Split the layers that way, or take interleaved, which runs any "
                f"whole number of stages per rank."
            )

    def need_whole_documents(self) -> None:
        """Refuse documents divided over time."""
        if self.is_divided:
            size = int((self.units[:, 1] - self.units[:, 0]).max())
            *names, last = (name for name, traits in SCHEDULES.items() if traits.runs_slices)
            raise LayoutError(
                f"{self.strategy} runs backwards in the order of forwards, but {size} "
                f"micro-batches share a document over time, which needs the reverse. Take "
                f"{', '.join(names)} or {last}, or pack with a policy that divides nothing over "
                f"time."
            )

    def finish(
        self,
        orders: Sequence[Order] | Sequence[Ints],
        *,
        in_v: bool = False,
        paths: Ints | None = None,
    ) -> PipelineSchedule:
        """The schedule that was written."""
        placed = place_in_v(self.ranks) if in_v else place_in_loop(self.ranks, self.stages)
        if paths is None:
            paths = whole_paths(self.stages, self.micro_batches)
        return PipelineSchedule(self.strategy, placed, finish_orders(orders), paths, self.units)


PipelineStrategy = Callable[[PipelineRequest], PipelineSchedule]

_More = ParamSpec("_More")


def remembered(
    write: Callable[Concatenate[PipelineRequest, _More], PipelineSchedule],
) -> Callable[Concatenate[PipelineRequest, _More], PipelineSchedule]:
    """Cache a strategy that ignores prices: write each size of a step once.

    Equal requests share one schedule, which callers must not change. Steps whose micro-batches
    share documents are written each time.
    """

    def write_size(
        strategy: str, ranks: int, stages: int, micro_batches: int, *more: Any, **named: Any
    ) -> PipelineSchedule:
        prices = make_prices(0, 0, 0, stages=stages, micro_batches=micro_batches)
        units = single_units(micro_batches)
        return write(PipelineRequest(strategy, prices, ranks, units, None), *more, **named)

    of_size: Callable[..., PipelineSchedule] = functools.lru_cache(_REMEMBERED)(write_size)

    @functools.wraps(write)
    def ask(
        request: PipelineRequest, /, *more: _More.args, **named: _More.kwargs
    ) -> PipelineSchedule:
        if request.is_divided:
            return write(request, *more, **named)
        size = request.ranks, request.stages, request.micro_batches
        return of_size(request.strategy, *size, *more, **named)

    return ask
