"""Prompts on some replicas, generation on others: what is sent, when it comes, what it costs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.serving import CurvePrice
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.serve.run import Pool, ServedTrace, run_apart, run_trace
from equipoise.spec.device.serving import ServingCurve
from equipoise.spec.request_trace import TracedRequest

PRICE = CurvePrice(
    ServingCurve(
        tokens=((1, 4e-3), (64, 5e-3), (4096, 0.2)),
        logits=((1, 1e-4), (64, 4e-4)),
        pair_s=1e-8,
        kv_token_s=1e-7,
        sequence_s=1e-5,
        swap_token_s=1e-7,
    )
)


def apart(
    trace: list[TracedRequest],
    *,
    pages: int = 200,
    swap_pages: int = 0,
    token_s: float = 1e-6,
    replicas: tuple[int, int] = (1, 1),
    policy: str = "fifo",
    at_once: bool = True,
) -> ServedTrace:
    prompts = Pool(BatchSettings(200), PRICE, replicas[0])
    outputs = Pool(BatchSettings(pages, swap_pages=swap_pages), PRICE, replicas[1])
    make = FAIR_POLICIES[policy]
    return run_apart(trace, prompts, outputs, lambda n: token_s * n, make, at_once=at_once)


def draw_trace(seed: int) -> list[TracedRequest]:
    draw = random.Random(seed)
    return [
        TracedRequest(
            draw.randrange(40) / 256,
            draw.choice("ab"),
            1 + draw.randrange(100),
            draw.choice((0, 1, 2, 3, 40)),
            45,
            *draw.choice((("", 0), ("g", 1))),
        )
        for _ in range(25)
    ]


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1000),
    policy=st.sampled_from(sorted(FAIR_POLICIES)),
    pages=st.sampled_from([12, 200]),
    swap_pages=st.sampled_from([0, 100]),
)
def test_all_tokens_come_out_once_and_in_order(
    seed: int, policy: str, pages: int, swap_pages: int
) -> None:
    trace = draw_trace(seed)
    run, again = (
        apart(
            trace,
            pages=pages,
            swap_pages=swap_pages,
            policy=policy,
            replicas=(2, 2),
            at_once=at_once,
        )
        for at_once in (True, False)
    )
    assert [(a.first_s, a.end_s) for a in run.requests] == [
        (b.first_s, b.end_s) for b in again.requests
    ]
    assert sorted([each.traced for each in run.requests] + list(run.refused)) == sorted(trace)
    output = sum(each.traced.output_tokens for each in run.requests)
    assert sum(each.output_tokens for each in (*run.replicas, *run.decoders)) == output
    firsts = sum(each.traced.output_tokens > 0 for each in run.requests)
    assert sum(each.output_tokens for each in run.replicas) == firsts
    later = sum(max(0, each.traced.output_tokens - 1) for each in run.requests)
    assert sum(n for each in run.decoders for _, n in each.gaps) == later
    prompt = sum(each.traced.prompt_tokens for each in run.requests)
    assert sum(each.prompt_tokens + each.hit_tokens for each in run.replicas) == prompt
    again_s = sum(each.prompt_tokens for each in run.decoders)
    assert (again_s > 0) <= any(each.preemptions for each in run.decoders)
    sent = [each.traced for each in run.requests if each.traced.output_tokens > 1]
    assert sorted(tokens for tokens, _ in run.sent) == sorted(each.prompt_tokens for each in sent)
    assert all(each.end_s >= each.first_s >= each.traced.arrival_s for each in run.requests)


def test_a_lone_request_waits_for_its_keys_and_values() -> None:
    trace = [TracedRequest(0.0, "", 100, 6, 6)]
    whole = run_trace(trace, BatchSettings(200), PRICE, FAIR_POLICIES["fifo"]).requests[0]
    near, far = (apart(trace, token_s=each).requests[0] for each in (0.0, 1e-3))
    assert near.first_s == far.first_s == whole.first_s
    assert near.end_s == pytest.approx(whole.end_s)
    assert far.end_s == pytest.approx(whole.end_s + 0.1)
    assert apart(trace, token_s=1e-3).sent == ((100, pytest.approx(0.1)),)


def test_a_replica_sends_one_after_the_other() -> None:
    trace = [TracedRequest(0.0, "", 16, 2, 2) for _ in range(3)]
    run = apart(trace, token_s=0.1)
    first_s = run.requests[0].first_s
    assert {each.first_s for each in run.requests} == {first_s}
    assert [seconds for _, seconds in run.sent] == pytest.approx([1.6, 3.2, 4.8])
    two = apart(trace, token_s=0.1, replicas=(3, 1))
    assert [seconds for _, seconds in two.sent] == pytest.approx([1.6, 1.6, 1.6])


def test_a_long_prompt_holds_no_generation_up() -> None:
    trace = [TracedRequest(0.0, "", 16, 100, 100), TracedRequest(0.1, "", 3000, 2, 2)]
    gaps = []
    for run in (
        run_trace(trace, BatchSettings(200), PRICE, FAIR_POLICIES["fifo"]),
        apart(trace),
    ):
        records = run.decoders or run.replicas
        gaps.append(max(seconds for seconds, _ in records[0].gaps))
    assert gaps[1] < 0.01 < gaps[0]


def test_what_a_preemption_takes_is_computed_where_it_was_sent() -> None:
    trace = [TracedRequest(0.0, "", 64, 100, 100) for _ in range(4)]
    run = apart(trace, pages=24)
    assert run.decoders[0].preemptions and run.decoders[0].prompt_tokens > 64
    assert not any(each.preemptions for each in run.replicas)
    moved = apart(trace, pages=24, swap_pages=100)
    assert moved.decoders[0].preemptions and moved.decoders[0].prompt_tokens == 0


def test_who_could_never_generate_is_refused_before_its_prompt_is_computed() -> None:
    trace = [TracedRequest(0.0, "", 300, 100, 100), TracedRequest(0.0, "", 50, 10, 10)]
    run = apart(trace, pages=20)
    assert run.refused == (trace[0],) and len(run.requests) == 1
    assert run.replicas[0].prompt_tokens == 50
