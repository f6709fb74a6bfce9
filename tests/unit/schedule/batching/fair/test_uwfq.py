"""UWFQ: nobody ends later than with equal shares, and cutting work into jobs earns nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.schedule.batching.fair.policy import FairJob
from equipoise.schedule.batching.fair.uwfq import Uwfq
from support.serving.server import Work, fluid_ends, run_server

CHUNK_S = 0.25


@st.composite
def workloads(draw: st.DrawFn) -> list[Work]:
    """Jobs of a few users, at times that often coincide."""
    return [
        Work(
            f"j{at}",
            draw(st.sampled_from("abc")),
            draw(st.integers(0, 12)) / 2,
            draw(st.integers(1, 24)) / 4,
        )
        for at in range(draw(st.integers(1, 12)))
    ]


@settings(deadline=None, max_examples=75)
@given(jobs=workloads())
def test_no_user_ends_its_work_later_than_with_equal_shares_by_more_than_a_chunk(
    jobs: list[Work],
) -> None:
    ends, _ = run_server(Uwfq({}, 0.0), jobs, CHUNK_S)
    fluid = fluid_ends(jobs)
    for user in "abc":
        mine = sorted((e for e in jobs if e.tenant == user), key=lambda e: e.arrival_s)
        for count, _ in enumerate(mine, 1):
            done_s = max(fluid[each.id] for each in mine[:count])
            if count == len(mine) or mine[count].arrival_s >= done_s:
                # With equal shares the user would have nothing left to do here.
                assert max(ends[each.id] for each in mine[:count]) <= done_s + CHUNK_S + 1e-9


@settings(deadline=None, max_examples=75)
@given(jobs=workloads(), arrivals=st.tuples(*(st.integers(0, 12) for _ in range(3))))
def test_no_job_ends_later_than_with_equal_shares_where_a_users_jobs_come_together(
    jobs: list[Work], arrivals: tuple[int, ...]
) -> None:
    at_s = {user: arrival / 2 for user, arrival in zip("abc", arrivals, strict=True)}
    jobs = [Work(each.id, each.tenant, at_s[each.tenant], each.work_s) for each in jobs]
    ends, _ = run_server(Uwfq({}, 0.0), jobs, CHUNK_S)
    fluid = fluid_ends(jobs)
    for each in jobs:
        assert ends[each.id] <= fluid[each.id] + CHUNK_S + 1e-9


@settings(deadline=None, max_examples=30)
@given(parts=st.integers(1, 40), others=st.integers(1, 6))
def test_cutting_work_into_more_jobs_gives_no_larger_share(parts: int, others: int) -> None:
    mine = [Work(f"a{at:02d}", "a", 0.0, 20.0 / parts) for at in range(parts)]
    theirs = [Work(f"b{at}", "b", 0.0, 20.0 / others) for at in range(others)]
    _, served = run_server(Uwfq({}, 0.0), mine + theirs, CHUNK_S, until_s=20.0)
    # Whoever's deadline is earlier goes first: shares differ by a job of either at most.
    assert abs(served["a"] - served["b"]) <= 20.0 / min(parts, others) + CHUNK_S
    ends, _ = run_server(Uwfq({}, 0.0), mine + theirs, CHUNK_S)
    assert max(ends[each.id] for each in theirs) <= 40.0 + 1e-9
    last_a = max(ends[each.id] for each in mine)
    assert last_a >= 40.0 - 20.0 / others - CHUNK_S - 1e-9


def test_many_jobs_do_not_delay_another_users_job() -> None:
    for count in (1, 10, 100):
        flood = [Work(f"a{at:03d}", "a", 0.0, 1.0) for at in range(count)]
        ends, _ = run_server(Uwfq({}, 0.0), [*flood, Work("b", "b", 0.0, 2.0)], CHUNK_S)
        assert ends["b"] <= 2 * 2.0 + CHUNK_S


def test_a_weight_is_a_share() -> None:
    jobs = [Work(f"{name}{at:02d}", name, 0.0, 1.0) for name in "ab" for at in range(30)]
    _, served = run_server(Uwfq({"a": 3.0}, 0.0), jobs, CHUNK_S, until_s=20.0)
    assert served["a"] / served["b"] == pytest.approx(3.0, abs=0.5)


def test_what_is_charged_moves_the_fluid_device_by_as_much() -> None:
    policy = Uwfq({"b": 2.0}, 0.0)
    for name, work_s in (("a", 4.0), ("b", 4.0)):
        policy.arrive(FairJob(name, name, 0.0, work_s), 0.0)
    assert policy.key("a")[0] == 4.0 and policy.key("b")[0] == 2.0
    policy.take("a", 4.0)
    policy.charge("a", 3.0)
    assert policy._now == pytest.approx(1.0)  # 3 over the weights of both
    policy.charge("a", 1.0)
    policy.finish("a", 4.0)
    policy.take("b", 4.0)
    # The fluid device has served a 4/3 and b 8/3, which had 4 each.
    assert policy._now == pytest.approx(4 / 3)
    policy.charge("b", 2.0)  # b ends virtually at 2
    assert policy._now == pytest.approx(2.0)
    policy.charge("b", 2.0)
    assert policy._now == pytest.approx(4.0)


def test_the_least_weight_counts_after_the_largest_have_gone() -> None:
    large = [f"a{at}" for at in range(60)]
    policy = Uwfq({"b": 1e-6} | {name: 1e6 / (3 + at) for at, name in enumerate(large)}, 0.0)
    policy.arrive(FairJob("b", "b", 0.0, 4.0), 0.0)
    for name in large:
        policy.arrive(FairJob(name, name, 0.0, 1.0), 0.0)
    for name in large:
        policy.take(name, 1.0)
        policy.finish(name, 0.0)  # nothing was done
    begin = policy._now
    policy.take("b", 4.0)
    policy.charge("b", 1.0)
    assert policy._now - begin == pytest.approx(1e6)  # 1 over the weight of b


def test_an_aborted_job_is_given_back() -> None:
    policy = Uwfq({}, 0.0)
    for name in ("a1", "a2"):
        policy.arrive(FairJob(name, "a", 0.0, 10.0), 0.0)
    assert policy.key("a2")[0] == 20.0
    policy.take("a1", 10.0)
    policy.charge("a1", 1.0)
    policy.finish("a1", 1.0)
    assert policy.key("a2")[0] == pytest.approx(11.0)


def test_a_job_that_takes_more_than_estimated_goes_behind() -> None:
    honest = [Work(f"b{at}", "b", 0.0, 1.0) for at in range(8)]
    liar = Work("a", "a", 0.0, 8.0, estimate_s=0.01)
    ends, _ = run_server(Uwfq({}, 0.0), [*honest, liar], CHUNK_S)
    assert ends["a"] > 15.0
    assert ends["b0"] < 3.5


def test_a_further_stage_of_a_job_continues_where_it_left() -> None:
    def deadline(stage_of: str, now_s: float) -> float:
        policy = Uwfq({}, 2.5)
        for name, tenant, stage, work_s in (("a1", "a", "chat", 1.0), ("b", "b", "", 50.0)):
            policy.arrive(FairJob(name, tenant, 0.0, work_s, stage), 0.0)
        policy.take("a1", 1.0)
        policy.charge("a1", 1.0)
        policy.finish("a1", 1.0)
        policy.take("b", 50.0)
        policy.charge("b", 8.0)
        policy.arrive(FairJob("a2", "a", now_s, 1.0, stage_of), now_s)
        return policy.key("a2")[0]

    assert deadline("chat", 2.0) == pytest.approx(2.0)
    assert deadline("chat", 9.0) == deadline("", 2.0) == pytest.approx(9.0)


@settings(deadline=None, max_examples=30)
@given(jobs=workloads(), order=st.randoms(use_true_random=False))
def test_the_order_of_equal_arrivals_changes_nothing(jobs: list[Work], order: object) -> None:
    shuffled = list(jobs)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert run_server(Uwfq({}, 0.0), jobs, CHUNK_S) == run_server(Uwfq({}, 0.0), shuffled, CHUNK_S)
