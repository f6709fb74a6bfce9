"""A step whose kernels vary in time, and so ends with the slowest of many ranks.

What it decides
    Every pass of every micro-batch through a stage takes its price times a factor drawn anew, of
    mean 1; the same schedule is replayed. A pipeline's time sums many of them, so those of a number
    of replays give it a normal distribution, and the step of many data-parallel ranks is the
    slowest of as many draws from that: replays alone would know no rank slower than their slowest.

Kept true (tests/unit/sim/test_faults.py)
    No jitter changes nothing; more jitter, and more ranks, are slower, also where ranks are many
    more than replays; the same seed is the same step.
"""

from dataclasses import dataclass, replace

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.sim.parts import PipelineRun

_REPLAYS = 48
_STEPS = 256


@dataclass(frozen=True, slots=True)
class JitterRun:
    """Steps under jitter over the same step without [ratio]."""

    mean: float
    p95: float


def run_with_jitter(run: PipelineRun, ranks: int, share: float, *, seed: int = 0) -> JitterRun:
    """How much longer a step takes.

    Args:
        run: The pipeline of the data-parallel rank that ends last.
        ranks: Data-parallel ranks, which meet at the end of the step.
        share: Standard deviation of a pass's time over its mean, 0 to 1.
        seed: Of the draws.

    Raises:
        SpecError: the share is not between 0 and 1.

    Cost: about 50 replays.
    """
    if not 0 <= share <= 1:
        raise SpecError(f"jitter is {share:g}; it must be between 0 and 1.")
    if share == 0:
        return JitterRun(1.0, 1.0)
    draws = np.random.Generator(np.random.PCG64(seed))
    sigma = float(np.sqrt(np.log1p(share**2)))
    plain = run.timeline.makespan_ns
    spans = np.array(
        [
            replay_pipeline(run.schedule, _shaken(run.prices, sigma, draws)).makespan_ns
            for _ in range(_REPLAYS)
        ]
    )
    mean, deviation = spans.mean(), spans.std(ddof=1)
    drawn = mean + deviation * draws.standard_normal((_STEPS, ranks)).max(axis=1)
    slowest = drawn / plain
    return JitterRun(float(slowest.mean()), float(np.quantile(slowest, 0.95)))


def _shaken(prices: PipelinePrices, sigma: float, draws: np.random.Generator) -> PipelinePrices:
    """Every price times a log-normal factor of mean 1."""
    changed = {}
    for name in ("forward_ns", "input_ns", "weight_ns"):
        table = getattr(prices, name)
        factors = np.exp(sigma * draws.standard_normal(table.shape) - sigma**2 / 2)
        changed[name] = np.rint(table * factors).astype(np.int64)
    return replace(prices, **changed)
