"""A pipeline with several batches in flight: stages never overlap, nothing is lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.serving import CurvePrice, Hop, StagedPrice
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.serve.run import ServedTrace, run_trace
from equipoise.spec.device.serving import ServingCurve
from equipoise.spec.request_trace import TracedRequest
from equipoise.spec.serving import IterationWork


def stage(share: float) -> CurvePrice:
    return CurvePrice(
        ServingCurve(
            tokens=((1, share * 4e-3), (64, share * 5e-3), (4096, share * 0.2)),
            logits=((1, share * 1e-4), (64, share * 4e-4)),
            pair_s=share * 1e-8,
            kv_token_s=share * 1e-7,
            sequence_s=share * 1e-5,
            swap_token_s=share * 1e-7,
        )
    )


def staged(*shares: float, latency_s: float = 0.0) -> StagedPrice:
    return StagedPrice([stage(each) for each in shares], Hop(latency_s, 1e-9))


def draw_trace(seed: int, requests: int = 30) -> list[TracedRequest]:
    draw = random.Random(seed)
    return [
        TracedRequest(
            draw.randrange(40) / 256,
            draw.choice("abc"),
            1 + draw.randrange(150),
            draw.choice((0, 1, 2, 30)),
            40,
        )
        for _ in range(requests)
    ]


def times(run: ServedTrace) -> list[tuple[float, float]]:
    return [(each.first_s, each.end_s) for each in run.requests]


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1000),
    policy=st.sampled_from(sorted(FAIR_POLICIES)),
    shares=st.sampled_from([(0.5, 0.5), (0.2, 0.5, 0.3), (1.0,)]),
    limits=st.builds(
        BatchSettings,
        pages=st.sampled_from([14, 200]),
        swap_pages=st.sampled_from([0, 100]),
        iteration_s=st.sampled_from([0.006, 0.05]),
    ),
)
def test_deciding_at_once_changes_no_time_and_all_tokens_come_out(
    seed: int, policy: str, shares: tuple[float, ...], limits: BatchSettings
) -> None:
    trace, price = draw_trace(seed), staged(*shares)
    one, other = (
        run_trace(trace, limits, price, FAIR_POLICIES[policy], replicas=2, at_once=at_once)
        for at_once in (True, False)
    )
    assert times(one) == times(other)
    assert sorted([each.traced for each in one.requests] + list(one.refused)) == sorted(trace)
    output = sum(each.traced.output_tokens for each in one.requests)
    later = sum(max(0, each.traced.output_tokens - 1) for each in one.requests)
    for run in (one, other):
        assert sum(each.output_tokens for each in run.replicas) == output
        assert sum(n for each in run.replicas for _, n in each.gaps) == later
    facts = [
        [(each.iterations, each.pairs, each.kv_tokens, each.preemptions) for each in run.replicas]
        for run in (one, other)
    ]
    assert facts[0] == facts[1]
    for each in one.replicas:
        assert each.busy_s <= one.makespan_s * (1 + 1e-9)


def test_a_pipeline_of_one_stage_is_a_replica_without() -> None:
    trace = draw_trace(7)
    limits = BatchSettings(60)
    whole = run_trace(trace, limits, stage(1.0), FAIR_POLICIES["fifo"])
    piped = run_trace(trace, limits, staged(1.0), FAIR_POLICIES["fifo"])
    assert times(piped) == times(whole)
    gaps = [sorted(run.replicas[0].gaps) for run in (piped, whole)]
    assert [n for _, n in gaps[0]] == [n for _, n in gaps[1]]
    assert [s for s, _ in gaps[0]] == pytest.approx([s for s, _ in gaps[1]])


def test_a_lone_request_passes_through_every_stage_with_its_whole_context() -> None:
    trace = [TracedRequest(0.0, "", 100, 5, 5)]
    price = staged(0.25, 0.75, latency_s=1e-3)
    run = run_trace(trace, BatchSettings(100), price, FAIR_POLICIES["fifo"])
    works = [IterationWork(100, 5050, 100, 1, 1)]
    works += [IterationWork(1, context, context, 1, 1) for context in (101, 102, 103, 104)]
    assert run.makespan_s == pytest.approx(sum(map(price.iteration_s, works)))
    assert price.iteration_s(works[0]) > 1e-3 + sum(
        each.iteration_s(works[0]) for each in price.stages
    )


def test_two_batches_in_flight_keep_both_stages_busy_and_one_cannot() -> None:
    def makespan(requests: int) -> float:
        trace = [TracedRequest(0.0, "", 16, 200, 200) for _ in range(requests)]
        price = staged(0.5, 0.5)
        return run_trace(trace, BatchSettings(100), price, FAIR_POLICIES["fifo"]).makespan_s

    one, two = makespan(1), makespan(2)
    assert two < 1.02 * one, "the second batch runs where the first is not"
    trace = [TracedRequest(0.0, "", 16, 200, 200) for _ in range(2)]
    run = run_trace(trace, BatchSettings(100), staged(0.5, 0.5), FAIR_POLICIES["fifo"])
    assert run.replicas[0].busy_s > 0.98 * run.makespan_s
    alone = run_trace(trace[:1], BatchSettings(100), staged(0.5, 0.5), FAIR_POLICIES["fifo"])
    assert alone.replicas[0].busy_s == pytest.approx(0.5 * alone.makespan_s, rel=1e-3)


def test_the_slowest_stage_sets_the_pace() -> None:
    trace = [TracedRequest(0.0, "", 16, 200, 200) for _ in range(4)]
    limits = BatchSettings(100)
    even = run_trace(trace, limits, staged(0.5, 0.5), FAIR_POLICIES["fifo"])
    uneven = run_trace(trace, limits, staged(0.2, 0.8), FAIR_POLICIES["fifo"])
    assert uneven.makespan_s == pytest.approx(even.makespan_s * 0.8 / 0.5, rel=0.05)
