"""Every policy: shares, bounds, no double charge, and no influence of the order of calls."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.schedule.batching.fair.policy import FairJob
from equipoise.schedule.batching.fair.queue import WaitingQueue
from equipoise.schedule.batching.fair.table import FAIR_POLICIES, find_policy
from equipoise.schedule.batching.fair.vtc import Vtc
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from support.serving.loop import LinearPrice, Loop
from support.serving.server import Work, run_server

TENANT_FAIR = ["user-fair", "vtc", "uwfq"]


def served_at_20_s(policy: str, mine: int, theirs: int, weights: dict[str, float]) -> float:
    """Share of tenant a, whose 30 s of work are cut into ``mine`` jobs, of the first 20 s."""
    jobs = [Work(f"a{at:03d}", "a", 0.0, 30.0 / mine) for at in range(mine)]
    jobs += [Work(f"b{at:03d}", "b", 0.0, 30.0 / theirs) for at in range(theirs)]
    _, served = run_server(FAIR_POLICIES[policy](weights, 0.0), jobs, 0.1, until_s=20.0)
    return served["a"] / 20.0


@pytest.mark.parametrize("policy", TENANT_FAIR)
def test_a_tenant_gains_nothing_by_more_jobs(policy: str) -> None:
    shares = [served_at_20_s(policy, mine, 30, {}) for mine in (30, 60, 300)]
    assert shares == pytest.approx([0.5] * 3, abs=0.06)


def test_job_fair_gives_more_to_who_sends_more() -> None:
    assert served_at_20_s("job-fair", 90, 10, {}) > 0.8


@pytest.mark.parametrize("policy", TENANT_FAIR)
def test_weights_are_shares(policy: str) -> None:
    assert served_at_20_s(policy, 60, 60, {"a": 2.0, "b": 1.0}) == pytest.approx(2 / 3, abs=0.06)


@pytest.mark.parametrize("policy", TENANT_FAIR)
def test_idling_earns_nothing(policy: str) -> None:
    jobs = [Work(f"a{at:03d}", "a", 0.0, 0.5) for at in range(100)]
    jobs += [Work(f"b{at:03d}", "b", 10.0, 0.5) for at in range(100)]
    maker = FAIR_POLICIES[policy]
    _, before = run_server(maker({}, 0.0), jobs, 0.1, until_s=10.0)
    _, after = run_server(maker({}, 0.0), jobs, 0.1, until_s=30.0)
    assert after["a"] - before["a"] == pytest.approx(10.0, abs=0.7)


@st.composite
def backlogs(draw: st.DrawFn) -> tuple[list[ServeRequest], dict[str, int]]:
    """Two tenants that always have requests waiting, one with ten times as many."""
    requests, outputs = [], {}
    for tenant, count in (("a", 200), ("b", 20)):
        for at in range(count):
            name = f"{tenant}{at:03d}"
            prompt, most = draw(st.sampled_from([(64, 4), (8, 16), (200, 1), (16, 60)]))
            requests.append(ServeRequest(name, tenant, 0.0, prompt, most))
            outputs[name] = most
    return requests, outputs


@settings(deadline=None, max_examples=7)
@given(load=backlogs())
def test_service_of_backlogged_tenants_stays_within_vtcs_bound(
    load: tuple[list[ServeRequest], dict[str, int]],
) -> None:
    requests, outputs = load
    price = LinearPrice()
    pages, page_tokens = 64, 16
    limits = BatchSettings(pages, page_tokens, 8, 1000, iteration_s=0.01)
    scheduler = Scheduler(limits, price, Vtc)
    loop = Loop(scheduler, outputs)
    for each in requests:
        loop.submit(each)
    prompts = {each.id: each.prompt_tokens for each in requests}
    # All tokens that fit the pool, generated one by one, or the longest prompt.
    longest = max(price.prompt_s(0, each) for each in prompts.values())
    most = max(longest, pages * page_tokens * price.output_s(200, 1))
    served = {"a": 0.0, "b": 0.0}
    started: set[str] = set()
    while len([name for name in prompts if name[0] == "b" and name not in started]) and loop.step():
        for chunk in loop.schedules[-1].chunks:
            started.add(chunk.request)
            served[chunk.request[0]] += price.prompt_s(chunk.start, chunk.tokens)
        assert abs(served["a"] - served["b"]) <= 2 * most


@settings(deadline=None, max_examples=20)
@given(
    policy=st.sampled_from(sorted(FAIR_POLICIES)),
    sizes=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([0.0, 0.01]),
            st.integers(1, 60),
            st.integers(1, 9),
        ),
        min_size=2,
        max_size=10,
    ),
    seed=st.integers(0, 5),
)
def test_requests_of_the_same_time_may_come_in_any_order(
    policy: str, sizes: list[tuple[str, float, int, int]], seed: int
) -> None:
    requests = [ServeRequest(f"r{at}", *each) for at, each in enumerate(sizes)]
    shuffled = list(requests)
    random.Random(seed).shuffle(shuffled)
    schedules = []
    for order in (requests, shuffled):
        limits = BatchSettings(24, 4, 3, iteration_s=0.004)
        loop = Loop(
            Scheduler(limits, LinearPrice(), FAIR_POLICIES[policy]),
            {each.id: each.most_tokens for each in requests},
        )
        loop.run(order)
        schedules.append([each.chunks for each in loop.schedules])
    assert schedules[0] == schedules[1]


def test_vtc_gives_back_what_was_not_computed() -> None:
    policy = Vtc({}, 0.0)
    for name in ("a1", "b1"):
        policy.arrive(FairJob(name, name[0], 0.0, 5.0), 0.0)
    policy.take("a1", 4.0)
    assert policy.counters == {"a": 4.0, "b": 0.0}
    policy.charge("a1", 1.0)
    assert policy.counters["a"] == 4.0
    policy.wait("a1")  # preempted
    assert policy.counters["a"] == 1.0
    policy.take("a1", 3.0)
    policy.charge("a1", 3.5)  # half a second of it was generated
    assert policy.counters["a"] == 4.5
    policy.finish("a1", 1.0)
    assert policy.counters["a"] == 4.5


def test_vtc_lifts_a_tenant_that_comes_back() -> None:
    policy = Vtc({}, 0.0)
    policy.arrive(FairJob("a1", "a", 0.0, 5.0), 0.0)
    policy.take("a1", 5.0)
    policy.arrive(FairJob("b1", "b", 1.0, 5.0), 1.0)
    assert policy.counters["b"] == 5.0, "nobody waits: as the tenant that waited last"
    policy.take("b1", 2.0)
    policy.arrive(FairJob("a2", "a", 2.0, 5.0), 2.0)
    policy.arrive(FairJob("c1", "c", 2.0, 5.0), 2.0)
    assert policy.counters["c"] == policy.counters["a"] == 7.0


@settings(deadline=None, max_examples=30)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9)), max_size=60)
)
def test_the_first_of_the_queue_is_that_of_a_full_search(
    steps: list[tuple[int, int, int]],
) -> None:
    keys = {f"g{at}": 0.0 for at in range(4)}
    queue = WaitingQueue(lambda group, _: keys[group])
    jobs: dict[str, tuple[str, float]] = {}
    for at, (group_at, kind, value) in enumerate(steps):
        group = f"g{group_at}"
        if kind == 0 and jobs:
            queue.remove(sorted(jobs)[value % len(jobs)])
            del jobs[sorted(jobs)[value % len(jobs)]]
        elif kind == 1:
            keys[group] += value
        elif kind == 2:
            keys[group] -= value
            queue.recheck(group)
        else:
            jobs[f"j{at}"] = group, float(value)
            queue.push(group, float(value), f"j{at}")
        first = queue.first()
        best = min(((keys[g], g, order, name) for name, (g, order) in jobs.items()), default=None)
        assert first == (best[3] if best else None)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SpecError) as refusal:
        find_policy("vtf")
    assert str(refusal.value) == (
        'No policy of fairness is called "vtf". Nearest: vtc. All: fifo, job-fair, user-fair, vtc, '
        "uwfq."
    )
