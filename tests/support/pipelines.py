"""Random steps of pipelines, for Hypothesis."""

from itertools import pairwise

from hypothesis import strategies as st

from equipoise.base.errors import FitError, LayoutError
from equipoise.schedule.pipeline.prices import PipelinePrices, make_prices
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.catalog import LOSSY, SCHEDULES

WHOLE = [name for name in SCHEDULES if name not in LOSSY]


def table(draw: st.DrawFn, stages: int, micro_batches: int, least: int = 0) -> list[list[int]]:
    row = st.lists(st.integers(least, 20), min_size=micro_batches, max_size=micro_batches)
    return draw(st.lists(row, min_size=stages, max_size=stages))


@st.composite
def steps(draw: st.DrawFn, most_chunks: int = 3) -> tuple[int, PipelinePrices]:
    """Ranks, and prices of stages, a multiple of the ranks; all prices may be 0."""
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, most_chunks))
    micro_batches = draw(st.integers(1, 10))
    shape = ranks * chunks, micro_batches
    tables = [table(draw, *shape) for _ in range(3)]
    hops = draw(st.lists(st.integers(0, 5), min_size=micro_batches, max_size=micro_batches))
    return ranks, make_prices(*tables, hop_ns=hops, activation=table(draw, *shape, least=1))


@st.composite
def units_of(draw: st.DrawFn, micro_batches: int) -> list[tuple[int, int]]:
    edges = draw(st.sets(st.integers(1, micro_batches)))
    ordered = sorted({0, *edges, micro_batches})
    return list(pairwise(ordered))


def write_if_legal(strategy: str, prices: PipelinePrices, **more) -> PipelineSchedule | None:
    """A schedule, or None where the strategy refuses the step with a sentence."""
    try:
        return write_pipeline(strategy, prices, **more)
    except (LayoutError, FitError) as refused:
        assert str(refused).endswith(".")
        return None
