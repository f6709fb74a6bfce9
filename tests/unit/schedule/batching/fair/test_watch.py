"""What a watch counts, and that it changes nothing."""

import pytest

from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.fair.watch import WatchedPolicy, watch
from support.serving.server import Work, run_server

JOBS = [Work(f"a{at:03d}", "a", 0.1 * at, 0.5) for at in range(200)]
JOBS += [Work(f"b{at:03d}", "b", 5.0 + at, 0.5) for at in range(60)]


@pytest.mark.parametrize("name", FAIR_POLICIES)
def test_a_watched_policy_decides_as_it_does_by_itself(name: str) -> None:
    maker = FAIR_POLICIES[name]
    policy = watch(maker)({}, 0.0)
    ends, served = run_server(policy, JOBS, 0.1)
    assert (ends, served) == run_server(maker({}, 0.0), JOBS, 0.1)
    assert isinstance(policy, WatchedPolicy)
    assert policy.served_s == pytest.approx(served)
    assert policy.gap_s == 0.0  # nobody waits


def gap_s(name: str, until_s: float) -> float:
    policy = watch(FAIR_POLICIES[name])({"a": 2.0, "b": 1.0}, 0.0)
    jobs = [Work(f"a{at:03d}", "a", 0.0, 0.5) for at in range(400)]
    jobs += [Work(f"b{at:03d}", "b", 3.0, 0.5) for at in range(400)]
    run_server(policy, jobs, 0.1, until_s=until_s)
    assert isinstance(policy, WatchedPolicy)
    return policy.gap_s


def test_the_gap_is_bounded_where_service_is_fair_and_grows_where_it_is_not() -> None:
    assert max(gap_s("vtc", until_s) for until_s in (10.0, 20.0, 40.0, 80.0)) <= 1.0
    # Behind 400 jobs that came before, b is not served at all: a alone for 77 s, half of which
    # count, for its weight is 2.
    assert gap_s("fifo", 80.0) == pytest.approx(77.0 / 2, abs=0.3)
    assert gap_s("fifo", 40.0) == pytest.approx(37.0 / 2, abs=0.3)
