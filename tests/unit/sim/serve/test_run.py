"""A simulated trace: nothing lost, nothing counted twice, and the same times in any order."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.serving import CurvePrice
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.serve.run import ServedTrace, run_trace
from equipoise.spec.device.serving import ServingCurve
from equipoise.spec.request_trace import TracedRequest
from equipoise.spec.serving import IterationWork

CURVE = ServingCurve(
    tokens=((1, 4e-3), (64, 5e-3), (4096, 0.2)),
    logits=((1, 1e-4), (64, 4e-4)),
    pair_s=1e-8,
    kv_token_s=1e-7,
    sequence_s=1e-5,
    swap_token_s=1e-7,
)
PRICE = CurvePrice(CURVE)


@st.composite
def traces(draw: st.DrawFn) -> list[TracedRequest]:
    """Requests of some tenants, some of them alike and at the same time."""
    rows = []
    for _ in range(draw(st.integers(1, 25))):
        prompt, output = draw(st.integers(1, 120)), draw(st.integers(0, 40))
        group = draw(st.sampled_from(["", "", "g"]))
        rows.append(
            TracedRequest(
                draw(st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.5])),
                draw(st.sampled_from("abc")),
                prompt,
                output,
                output + draw(st.sampled_from([0, 10])),
                group,
                prompt // 2 if group else 0,
            )
        )
    return rows


limits = st.builds(
    BatchSettings,
    pages=st.sampled_from([14, 30, 200]),
    most_sequences=st.sampled_from([3, 64]),
    iteration_s=st.sampled_from([0.006, 0.05]),
    swap_pages=st.sampled_from([0, 100]),
)


def times(run: ServedTrace) -> list[tuple[TracedRequest, int, float, float]]:
    return [(each.traced, each.replica, each.first_s, each.end_s) for each in run.requests]


@settings(deadline=None, max_examples=40)
@given(
    trace=traces(),
    policy=st.sampled_from(sorted(FAIR_POLICIES)),
    limit=limits,
    replicas=st.integers(1, 3),
)
def test_deciding_many_iterations_at_once_changes_no_time(
    trace: list[TracedRequest], policy: str, limit: BatchSettings, replicas: int
) -> None:
    both = [
        run_trace(trace, limit, PRICE, FAIR_POLICIES[policy], replicas=replicas, at_once=at_once)
        for at_once in (True, False)
    ]
    assert times(both[0]) == times(both[1])
    for one, other in zip(both[0].replicas, both[1].replicas, strict=True):
        assert (one.iterations, one.preemptions, one.prompt_tokens, one.output_tokens) == (
            other.iterations,
            other.preemptions,
            other.prompt_tokens,
            other.output_tokens,
        )
        assert sum(n for _, n in one.gaps) == sum(n for _, n in other.gaps)


@settings(deadline=None, max_examples=40)
@given(
    trace=traces(),
    policy=st.sampled_from(sorted(FAIR_POLICIES)),
    limit=limits,
    replicas=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_all_tokens_come_out_and_the_order_of_lines_changes_nothing(
    trace: list[TracedRequest], policy: str, limit: BatchSettings, replicas: int, seed: int
) -> None:
    run = run_trace(trace, limit, PRICE, FAIR_POLICIES[policy], replicas=replicas)
    assert sorted([each.traced for each in run.requests] + list(run.refused)) == sorted(trace)
    assert all(each.first_s >= each.traced.arrival_s for each in run.requests)
    assert all(each.end_s >= each.first_s for each in run.requests)
    output = sum(each.traced.output_tokens for each in run.requests)
    assert sum(each.output_tokens for each in run.replicas) == output
    later = sum(max(0, each.traced.output_tokens - 1) for each in run.requests)
    assert sum(n for each in run.replicas for _, n in each.gaps) == later
    prompt = sum(each.traced.prompt_tokens for each in run.requests)
    computed = sum(each.prompt_tokens + each.hit_tokens for each in run.replicas)
    assert computed >= prompt
    if not any(each.preemptions for each in run.replicas):
        assert computed == prompt
    shuffled = list(trace)
    random.Random(seed).shuffle(shuffled)
    assert times(run_trace(shuffled, limit, PRICE, FAIR_POLICIES[policy], replicas=replicas)) == (
        times(run)
    )


def test_littles_law() -> None:
    """Requests in the system, sampled in time, are the arrival rate times the mean latency."""
    draw = random.Random(1)
    at_s, trace = 0.0, []
    for _ in range(2000):
        at_s += draw.expovariate(8.0)
        output = 1 + int(draw.expovariate(1 / 30))
        trace.append(TracedRequest(at_s, "", draw.randrange(1, 400), output, output))
    run = run_trace(trace, BatchSettings(4000), PRICE, FAIR_POLICIES["fifo"], replicas=2)
    begin_s, end_s = 10.0, trace[-1].arrival_s - 10.0
    inside = [
        sum(each.traced.arrival_s <= moment < each.end_s for each in run.requests)
        for moment in (begin_s + step * (end_s - begin_s) / 4000 for step in range(4000))
    ]
    mean_s = sum(each.latency_s for each in run.requests) / len(run.requests)
    assert sum(inside) / len(inside) == pytest.approx(8.0 * mean_s, rel=0.06)


class Recorder:
    """A price that keeps what it was asked."""

    def __init__(self) -> None:
        self.works: list[IterationWork] = []

    def iteration_s(self, work: IterationWork) -> float:
        self.works.append(work)
        return PRICE.iteration_s(work)

    def decodes_s(self, work: IterationWork, iterations: int) -> list[float]:
        return PRICE.decodes_s(work, iterations)

    prompt_s, output_s, swap_s = PRICE.prompt_s, PRICE.output_s, PRICE.swap_s


def test_a_decode_reads_the_prompt_as_well() -> None:
    price = Recorder()
    run_trace(
        [TracedRequest(0.0, "", 100, 5, 5)],
        BatchSettings(100),
        price,
        FAIR_POLICIES["fifo"],
        at_once=False,
    )
    decodes = [each.kv_tokens for each in price.works if each.tokens == 1]
    assert sorted(set(decodes)) == [101, 102, 103, 104]


def pressed(swap_pages: int) -> ServedTrace:
    trace = [TracedRequest(0.0, "", 64, 100, 100) for _ in range(4)]
    return run_trace(trace, BatchSettings(24, swap_pages=swap_pages), PRICE, FAIR_POLICIES["fifo"])


def test_what_preemption_takes_is_computed_again_or_moved_and_costs_time() -> None:
    recomputed, moved = pressed(0), pressed(100)
    relaxed = run_trace(
        [each.traced for each in recomputed.requests],
        BatchSettings(100),
        PRICE,
        FAIR_POLICIES["fifo"],
    )
    assert recomputed.replicas[0].preemptions and moved.replicas[0].preemptions
    assert recomputed.replicas[0].prompt_tokens > 4 * 64
    assert moved.replicas[0].prompt_tokens == 4 * 64
    assert relaxed.makespan_s < moved.makespan_s
    assert relaxed.makespan_s < recomputed.makespan_s
    assert recomputed.replicas[0].most_pages <= 24


def test_replicas_share_the_work() -> None:
    trace = [TracedRequest(0.0, "", 100, 50, 50) for _ in range(8)]
    run = run_trace(trace, BatchSettings(1000), PRICE, FAIR_POLICIES["fifo"], replicas=4)
    assert sorted(each.replica for each in run.requests) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_request_that_could_never_run_is_refused_alone() -> None:
    trace = [TracedRequest(0.0, "", 5000, 1, 1), TracedRequest(0.0, "", 50, 1, 1)]
    run = run_trace(trace, BatchSettings(10), PRICE, FAIR_POLICIES["fifo"])
    assert run.refused == (trace[0],) and len(run.requests) == 1


def test_a_shared_prefix_is_computed_once_a_tenant() -> None:
    def cached(tenants: Sequence[str]) -> int:
        trace = [TracedRequest(at, each, 200, 2, 2, "g", 160) for at, each in enumerate(tenants)]
        run = run_trace(trace, BatchSettings(1000), PRICE, FAIR_POLICIES["fifo"])
        return run.replicas[0].hit_tokens

    assert cached("aaa") == 2 * 160 and cached("abc") == 0


def test_a_long_prompt_runs_in_chunks_and_holds_nobody_up() -> None:
    trace = [TracedRequest(0.0, "", 32, 60, 60), TracedRequest(0.05, "", 4000, 2, 2)]
    gaps = []
    for is_chunked in (True, False):
        limit = BatchSettings(1000, iteration_s=0.02, is_chunked=is_chunked)
        run = run_trace(trace, limit, PRICE, FAIR_POLICIES["fifo"])
        gaps.append(max(seconds for seconds, _ in run.replicas[0].gaps))
    assert gaps[0] < 0.021 < 0.2 < gaps[1]
