"""Bounds of serving: nothing simulated is ever below them."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.serving import ContextExchange, CurvePrice, Hop, StagedPrice
from equipoise.plan.serving.bounds import Sizes, floor_of, least_mean_s
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.serve.run import run_trace
from equipoise.spec.device.serving import ServingCurve
from equipoise.spec.request_trace import TracedRequest

# Seconds that jump and flatten: neither concave nor convex.
CURVE = ServingCurve(
    tokens=((1, 4e-3), (16, 4e-3), (17, 9e-3), (64, 9e-3), (65, 2e-2), (512, 2.1e-2)),
    logits=((1, 1e-4), (64, 4e-4)),
    pair_s=1e-7,
    kv_token_s=1e-6,
    sequence_s=1e-5,
    swap_token_s=1e-7,
)
EXCHANGE = ContextExchange(2e-3, 1e-5, 3e-5, 1e-3, 1e-5, 1e-5, 4)
PRICES = {
    "whole": CurvePrice(CURVE),
    "context": CurvePrice(CURVE, EXCHANGE),
    "near": CurvePrice(CURVE, dataclasses.replace(EXCHANGE, home_s=1e-5)),
    "pipeline": StagedPrice([CurvePrice(CURVE), CurvePrice(CURVE, EXCHANGE)], Hop(1e-3, 1e-6)),
}


def draw_trace(seed: int) -> list[TracedRequest]:
    draw = random.Random(seed)
    rows = []
    for _ in range(25):
        prompt, group = 1 + draw.randrange(300), draw.choice(("", "g"))
        output = draw.choice((0, 1, 2, 40))
        rows.append(
            TracedRequest(
                draw.randrange(20) / 128,
                draw.choice("ab"),
                prompt,
                output,
                output + 5,
                group,
                prompt // 2 if group else 0,
            )
        )
    return sorted(rows)


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    price=st.sampled_from(sorted(PRICES)),
    policy=st.sampled_from(sorted(FAIR_POLICIES)),
    replicas=st.integers(1, 3),
    limits=st.builds(
        BatchSettings,
        pages=st.sampled_from([24, 400]),
        page_tokens=st.sampled_from([16, 18]),
        iteration_s=st.sampled_from([0.006, 0.05]),
        is_chunked=st.booleans(),
    ),
)
def test_no_request_is_faster_than_alone_and_no_mean_below_the_crowded_bound(
    seed: int, price: str, policy: str, replicas: int, limits: BatchSettings
) -> None:
    trace = draw_trace(seed)
    floor = floor_of(PRICES[price], limits, Sizes.of(trace))
    run = run_trace(trace, limits, PRICES[price], FAIR_POLICIES[policy], replicas=replicas)
    for each in run.requests:
        at = int(each.id)
        assert each.ttft_s >= floor.prompt_s[at]
        assert each.end_s - each.first_s >= floor.later_s[at]
    if not run.refused:
        works = floor.prompt_work_s + floor.later_work_s
        arrivals = np.array([each.arrival_s for each in trace])
        mean_s = sum(each.latency_s for each in run.requests) / len(trace)
        assert mean_s >= least_mean_s(arrivals, works, replicas)


def test_a_lone_request_meets_its_floor() -> None:
    trace = [TracedRequest(0.0, "", 64, 30, 30)]
    limits = BatchSettings(100)
    pipeline = StagedPrice([CurvePrice(CURVE), CurvePrice(CURVE)], Hop(1e-3, 1e-6))
    for price in (PRICES["whole"], pipeline):
        floor = floor_of(price, limits, Sizes.of(trace))
        [served] = run_trace(trace, limits, price, FAIR_POLICIES["fifo"]).requests
        assert served.ttft_s == pytest.approx(floor.prompt_s[0])
        assert served.end_s - served.first_s == pytest.approx(floor.later_s[0])


@given(
    works=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=6),
)
def test_the_least_mean_is_that_of_serving_the_shortest_first(works: list[tuple[int, int]]) -> None:
    """Beside the same machine, unit of work by unit of work."""
    left = {at: work for at, (_, work) in enumerate(works)}
    total, now = 0, 0
    while left:
        here = [(left[at], at) for at in left if works[at][0] <= now]
        done = [at for work, at in here if not work]
        for at in done:
            total += now - works[at][0]
            del left[at]
        if done:
            continue
        if here:
            left[min(here)[1]] -= 1
        now += 1
    arrivals, sizes = (np.array(each, dtype=float) for each in zip(*works, strict=True))
    assert least_mean_s(arrivals, sizes, 1.0) == pytest.approx(total / len(works))
