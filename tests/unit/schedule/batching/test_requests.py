"""Requests come, share, wait, are preempted, given up and refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import FitError, SpecError
from equipoise.schedule.batching.budget import PromptsBudget
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.iteration import ServeOutcome
from equipoise.schedule.batching.limit import DECODE_TIMES
from equipoise.schedule.batching.request import QueueFullError, ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings, paced
from equipoise.spec.serving import decodes_of
from support.serving.loop import LinearPrice, Loop

KEYS = (b"one", b"two", b"three", b"four")


def make_loop(
    outputs: dict[str, int], pages: int = 64, policy: str = "fifo", **limits: object
) -> Loop:
    """A loop over pages of 4 tokens."""
    settings_ = BatchSettings(pages, 4, **limits)  # type: ignore[arg-type]
    return Loop(Scheduler(settings_, LinearPrice(), FAIR_POLICIES[policy]), outputs)


def prefilled(loop: Loop) -> int:
    return sum(chunk.tokens for each in loop.schedules for chunk in each.iteration.prefills)


def test_the_same_tenant_finds_its_pages_and_no_other_does() -> None:
    loop = make_loop(dict.fromkeys("abcde", 1))
    first = ServeRequest("a", "alice", 0.0, 18, 1, KEYS)
    loop.run([first])
    assert prefilled(loop) == 18
    loop.run([ServeRequest("b", "alice", 0.0, 18, 1, KEYS)])
    assert prefilled(loop) == 18 + 2
    loop.run([ServeRequest("c", "bob", 0.0, 18, 1, KEYS)])
    assert prefilled(loop) == 18 + 2 + 18
    loop.run([ServeRequest("d", "alice", 0.0, 18, 1, KEYS, salt="x")])
    assert prefilled(loop) == 18 + 2 + 18 + 18
    loop.run([ServeRequest("e", "alice", 0.0, 18, 1, KEYS, scores_prompt=True)])
    assert prefilled(loop) == 18 + 2 + 18 + 18 + 18
    assert loop.scheduler.cache_tokens == (16, 5 * 18)


def test_the_last_prompt_token_is_always_computed() -> None:
    loop = make_loop(dict.fromkeys("ab", 1))
    loop.run([ServeRequest("a", "alice", 0.0, 16, 1, KEYS)])
    loop.run([ServeRequest("b", "alice", 0.0, 16, 1, KEYS)])
    assert prefilled(loop) == 16 + 4


def test_an_answer_is_found_by_the_next_turn_of_the_conversation() -> None:
    loop = make_loop({"a": 9, "b": 1})
    loop.submit(ServeRequest("a", "alice", 0.0, 8, 9, KEYS[:2]))
    while not loop.scheduler.is_idle:
        schedule = loop.scheduler.plan(loop.now_s)
        assert schedule is not None
        mine = loop.served["a"]
        for chunk in schedule.chunks:
            mine.computed, mine.sampled = chunk.start + chunk.tokens, mine.sampled + chunk.samples
        key = ((b"k%d" % mine.computed),) if mine.computed in (12, 16) else ()
        loop.scheduler.done([ServeOutcome("a", mine.sampled == 9, key)], loop.now_s)
    loop.run([ServeRequest("b", "alice", 0.0, 21, 1, (*KEYS[:2], b"k12", b"k16", b"new"))])
    assert prefilled(loop) == 21 - 16


def test_siblings_compute_their_common_prompt_once() -> None:
    names = [f"s{at}" for at in range(6)]
    loop = make_loop(dict.fromkeys(names, 3), iteration_s=0.0011, prefill_iteration_s=0.0011)
    loop.run([ServeRequest(each, "alice", 0.0, 17, 3, KEYS) for each in names])
    assert prefilled(loop) == 17 + 5 * 1


def test_siblings_wait_only_for_what_they_have_in_common() -> None:
    loop = make_loop(
        {"long": 1, "short": 1}, policy="job-fair", iteration_s=0.0014, prefill_iteration_s=0.0014
    )
    tail = tuple(b"tail%d" % at for at in range(20))
    loop.run(
        [
            ServeRequest("long", "alice", 0.0, 88, 1, (KEYS[0], *tail)),
            ServeRequest("short", "alice", 0.0, 8, 1, KEYS[:2]),
        ]
    )
    assert prefilled(loop) == 88 + 4
    assert loop.served["short"].end_s < loop.served["long"].end_s  # type: ignore[operator]


def test_a_sibling_goes_on_when_its_leader_is_given_up() -> None:
    loop = make_loop({"a": 1, "b": 1}, iteration_s=0.0011, prefill_iteration_s=0.0011)
    for name in "ab":
        loop.submit(ServeRequest(name, "alice", 0.0, 17, 1, KEYS))
    loop.step()
    assert loop.scheduler.abort("a", loop.now_s)
    loop.run()
    assert loop.served["b"].sampled == 1 and loop.scheduler.used_pages == 0


@settings(deadline=None, max_examples=40)
@given(
    policy=st.sampled_from(sorted(FAIR_POLICIES)),
    sizes=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(1, 30),
            st.integers(1, 12),
            st.integers(0, 12),
            st.booleans(),
        ),
        min_size=1,
        max_size=10,
    ),
    swap_pages=st.sampled_from([0, 50]),
)
def test_requests_are_given_up_in_any_state(
    policy: str, sizes: list[tuple[str, int, int, int, bool]], swap_pages: int
) -> None:
    """Request i is aborted after some iterations: while one runs, or between two."""
    limits = BatchSettings(16, 4, 4, iteration_s=0.003, swap_pages=swap_pages)
    scheduler = Scheduler(limits, LinearPrice(swap=1e-7), FAIR_POLICIES[policy])
    loop = Loop(scheduler, {f"r{at}": each[2] for at, each in enumerate(sizes)})
    for at, (tenant, prompt, most, _, _) in enumerate(sizes):
        keys = KEYS[: prompt // 4]
        loop.submit(ServeRequest(f"r{at}", tenant, 0.0, prompt, most, keys))
    aborts = {f"r{at}": each[3:] for at, each in enumerate(sizes)}
    for step in range(500):
        for name, (when, is_flying) in aborts.items():
            if when == step and not is_flying:
                scheduler.abort(name, loop.now_s)
        if scheduler.is_idle:
            break
        schedule = scheduler.plan(loop.now_s)
        assert schedule is not None
        for name, (when, is_flying) in aborts.items():
            if when == step and is_flying:
                scheduler.abort(name, loop.now_s)
        loop.now_s += schedule.predicted_s
        outcomes = []
        for chunk in schedule.chunks:
            mine = loop.served[chunk.request]
            mine.sampled += chunk.samples
            if mine.sampled == loop.outputs[chunk.request]:
                outcomes.append(ServeOutcome(chunk.request, ended=True))
        scheduler.done(outcomes, loop.now_s)
    assert scheduler.is_idle and scheduler.used_pages == 0
    assert scheduler.backlog_s == 0.0
    assert not scheduler.abort("r0", loop.now_s)


def test_the_cheaper_way_back_is_taken() -> None:
    for swap, swaps in ((1e-9, True), (1.0, False)):
        limits = BatchSettings(10, 4, swap_pages=10)
        loop = Loop(
            Scheduler(limits, LinearPrice(swap=swap), FAIR_POLICIES["fifo"]), {"a": 20, "b": 20}
        )
        loop.run([ServeRequest(name, "t", 0.0, 8, 20) for name in "ab"])
        modes = loop.scheduler.preemptions
        assert (modes["swap"] > 0, modes["recompute"] > 0) == (swaps, not swaps)
        assert sum(len(each.swaps_out) for each in loop.schedules) == modes["swap"]
        assert (loop.served["b"].recomputed > 0) != swaps
        assert loop.served["a"].recomputed == 0, "the newest is preempted"


def test_decodes_run_in_every_iteration_and_prompts_fill_the_budget() -> None:
    loop = make_loop({"a": 50, "b": 1}, iteration_s=0.004)
    loop.run([ServeRequest("a", "t", 0.0, 4, 50), ServeRequest("b", "t", 0.01, 200, 1)])
    chunks = [
        chunk.tokens for each in loop.schedules for chunk in each.chunks if chunk.request == "b"
    ]
    assert len(chunks) > 3 and all(tokens % 4 == 0 for tokens in chunks[:-1])
    both = [each for each in loop.schedules if any(c.request == "b" for c in each.chunks)]
    assert all(any(c.request == "a" for c in each.chunks) for each in both)
    assert all(each.predicted_s <= 0.004 for each in both)
    page_s = 4 * 1e-4 + 1e-5
    assert all(each.predicted_s > 0.004 - page_s for each in both[:-1])


def test_prompts_take_larger_chunks_while_nothing_decodes_and_nothing_starves() -> None:
    loop = make_loop({"a": 1, "b": 1}, iteration_s=0.0015, prefill_iteration_s=0.009)
    loop.run([ServeRequest("a", "t", 0.0, 200, 1), ServeRequest("b", "t", 0.0, 200, 1)])
    assert min(sum(c.tokens for c in each.chunks) for each in loop.schedules[:3]) >= 48
    beside = make_loop({"a": 1, "b": 90}, iteration_s=0.0015, prefill_iteration_s=0.009)
    beside.run([ServeRequest("b", "t", 0.0, 4, 90), ServeRequest("a", "t", 0.0015, 200, 1)])
    assert max(c.tokens for each in beside.schedules for c in each.chunks) <= 20
    tiny = make_loop({"a": 1, "b": 30}, iteration_s=1e-9, prefill_iteration_s=1e-9)
    tiny.run([ServeRequest("b", "t", 0.0, 4, 30), ServeRequest("a", "t", 0.0, 12, 1)])
    assert [c.tokens for each in tiny.schedules for c in each.chunks if c.request == "a"] == [4] * 3


def test_prompts_slow_decodes_by_a_bounded_factor_and_those_of_other_tenants_less() -> None:
    longest = {}
    for tenant in ("t", "u"):
        loop = make_loop({"a": 1, "b": 90}, iteration_s=1e-9)
        loop.run([ServeRequest("b", "t", 0.0, 4, 90), ServeRequest("a", tenant, 0.0015, 200, 1)])
        mixed = [each for each in loop.schedules if len(each.chunks) == 2]
        alone = [each for each in loop.schedules[1:] if len(each.chunks) == 1]
        longest[tenant] = max(each.predicted_s for each in mixed) / alone[-1].predicted_s
    assert 2.5 < longest["t"] <= 3
    assert 1.5 < longest["u"] <= 2


def test_a_prompt_keeps_half_of_its_chunk_however_much_it_reads() -> None:
    loop = make_loop({"a": 1}, pages=4000, iteration_s=0.002, prefill_iteration_s=0.009)
    loop.run([ServeRequest("a", "t", 0.0, 12_000, 1)])
    sizes = [each.chunks[0].tokens for each in loop.schedules]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert min(sizes[:-1]) == sizes[0] // 2 // 4 * 4 < sizes[0]


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    loop = make_loop({}, queued_requests=2)
    for name in "ab":
        loop.submit(ServeRequest(name, "t", 0.0, 80, 10))
    with pytest.raises(QueueFullError) as refusal:
        loop.submit(ServeRequest("c", "t", 0.0, 80, 10))
    assert str(refusal.value) == "2 requests wait already, as many as may. Try again in 1 s."
    assert refusal.value.retry_after_s == 1.0
    loop.scheduler.drain()
    loop.scheduler.abort("a", 0.0)
    with pytest.raises(QueueFullError) as refusal:
        loop.submit(ServeRequest("c", "t", 0.0, 80, 10))
    assert str(refusal.value) == "The server is shutting down."


def test_what_could_never_run_is_refused() -> None:
    loop = make_loop({}, pages=10)
    with pytest.raises(FitError) as refusal:
        loop.submit(ServeRequest("a", "t", 0.0, 1030, 12))
    assert str(refusal.value) == (
        "1,030 tokens of prompt and up to 12 generated ones need 261 pages of 4 tokens; there are "
        "10. Send a shorter prompt, or ask for fewer tokens."
    )
    with pytest.raises(SpecError) as fault:
        loop.submit(ServeRequest("a", "t", 0.0, 0, 12))
    assert str(fault.value) == (
        "A request has 0 tokens of prompt and may generate 12. It needs at least 1 and 0."
    )
    with pytest.raises(SpecError) as fault:
        loop.submit(ServeRequest("a", "t", float("nan"), 1, 1))
    assert str(fault.value) == "A request arrives at nan s. Give a finite time."
    loop.submit(ServeRequest("a", "t", 0.0, 1, 1))
    with pytest.raises(SpecError) as fault:
        loop.submit(ServeRequest("a", "t", 0.0, 1, 1))
    assert str(fault.value) == 'A request is called "a" already. Choose another id.'


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pages", 0, "pages is 0. It must be at least 1."),
        (
            "iteration_tokens",
            3,
            "iteration_tokens is 3. It must be at least one page: 16 tokens.",
        ),
        ("swap_pages", -1, "swap_pages is -1. It must be at least 0."),
        ("iteration_s", 0.0, "iteration_s is 0.0. It must be above 0."),
        (
            "weights",
            {"a": 1e-310},
            'The weight of tenant "a" is 1e-310. Give 0.000001 to 1,000,000.',
        ),
        ("grace_s", float("nan"), "grace_s is nan. It must be at least 0."),
    ],
)
def test_limits_out_of_range_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        BatchSettings(**{"pages": 10, name: value})  # type: ignore[arg-type]
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("requests", "tenants", "times"), [(2, 1, 1), (3, 1, 2), (4, 1, 3), (9, 1, 3), (4, 2, 2 / 3)]
)
def test_the_more_requests_wait_the_longer_prompts_make_an_iteration_of_decodes(
    requests: int, tenants: int, times: float
) -> None:
    price, decode = LinearPrice(iteration=0.02), decodes_of(1, 10)
    budget = PromptsBudget(BatchSettings(1, iteration_s=0.01), price, decode, requests, tenants)
    most_s = DECODE_TIMES * times * price.iteration_s(decode)
    assert budget.holds(most_s - 1e-9)
    assert not budget.holds(most_s + 1e-9)


def test_on_a_slow_machine_a_prompt_fills_longer_iterations() -> None:
    limits = BatchSettings(16, prefill_iteration_s=0.1)
    assert paced(limits, LinearPrice()).prefill_iteration_s == 0.1
    slow = paced(limits, LinearPrice(iteration=0.02))
    assert slow.prefill_iteration_s == pytest.approx(32 * (0.02 + 1e-4 + 1e-8))
    assert slow.iteration_s == limits.iteration_s
    # Three ranks compute a third of its rows each: three times as many of them.
    over_ranks = paced(limits, LinearPrice(iteration=0.02), 3)
    assert over_ranks.prefill_iteration_s == pytest.approx(3 * slow.prefill_iteration_s)
