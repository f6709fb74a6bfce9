"""Requests of tenants at one event loop: shares of its time, a burst, and nobody held up alone."""

from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.serve.loop_share import MOST_WAIT_S, LoopShare


class Thread:
    """A thread that reads requests, and its two clocks."""

    def __init__(self) -> None:
        self.now_s = self.spent_s = 0.0
        self.share = LoopShare(lambda: self.now_s, lambda: self.spent_s)
        self.began = dict.fromkeys("abs", 0)
        self._due: list[tuple[float, str, float, int]] = []

    def ask(self, tenant: str, cost_s: float, size: int = 0) -> float:
        """A request arrives; it is read at its turn, if that comes soon."""
        wait_s = self.share.arrive(tenant)
        if wait_s > MOST_WAIT_S:
            self.share.refuse(tenant)
            self.share.leave(tenant)
        else:
            heappush(self._due, (self.now_s + wait_s, tenant, cost_s, size))
        self.pass_s(0.0)
        return wait_s

    def pass_s(self, seconds: float) -> None:
        """Read all requests whose turn comes."""
        self.now_s += seconds
        while self._due and self._due[0][0] <= self.now_s:
            _, tenant, cost_s, size = heappop(self._due)
            self.share.begin(tenant)
            self.began[tenant] += 1
            self.spent_s += cost_s
            self.share.read(tenant, size)
            self.share.leave(tenant)


def test_who_is_alone_never_waits() -> None:
    thread = Thread()
    for _ in range(2_000):
        assert thread.ask("a", 0.01) == 0.0
        thread.pass_s(0.001)


@settings(deadline=None, max_examples=40)
@given(
    cost_s=st.sampled_from([0.0005, 0.002, 0.02]),
    every_s=st.sampled_from([0.0005, 0.002, 0.01]),
    size=st.sampled_from([0, 4 << 20]),
)
def test_beside_others_a_flood_has_its_share_and_its_burst(
    cost_s: float, every_s: float, size: int
) -> None:
    thread = Thread()
    thread.share.arrive("a")  # a stream that goes on
    while thread.now_s < 1.0:  # what a request takes is measured first
        thread.ask("s", cost_s, size)
        thread.pass_s(every_s)
    begun, begin_s = thread.began["s"], thread.now_s
    while thread.now_s < 6.0:
        thread.ask("s", cost_s, size)
        thread.pass_s(every_s)
    taken_s = (thread.began["s"] - begun) * cost_s
    # Half of a quarter: two tenants are here. A request in flight, and half a second's burst.
    assert taken_s <= 0.125 * (thread.now_s - begin_s + 0.5) + 2 * cost_s
    assert taken_s >= min(0.1 * 5, 0.8 * 5 * cost_s / every_s), "its share it has"


def test_who_asks_seldom_does_not_wait_beside_a_flood() -> None:
    thread = Thread()
    for step in range(2_000):
        thread.ask("s", 0.01)
        if step % 100 == 0:
            assert thread.ask("a", 0.01) == 0.0
        thread.pass_s(0.005)


def test_what_streams_take_is_not_charged_to_requests() -> None:
    thread = Thread()
    thread.share.arrive("a")
    waits = []
    for _ in range(1_000):  # a request that takes 1 ms, and 500 tokens for others that take 50 ms
        waits.append(thread.ask("b", 0.001))
        thread.share.sent(500)
        thread.spent_s += 0.05
        thread.pass_s(0.1)
    assert max(waits) == 0.0


@pytest.mark.parametrize("count", [10_000])
def test_a_request_that_would_wait_for_long_takes_no_place(count: int) -> None:
    thread = Thread()
    thread.share.arrive("a")
    for _ in range(200):
        thread.ask("s", 0.01)
        thread.pass_s(0.002)
    waits = [thread.share.arrive("s") for _ in range(count)]
    thread.now_s += max(waits) + 1.0
    assert MOST_WAIT_S < max(waits) <= MOST_WAIT_S + 0.2
    assert thread.share.arrive("s") == 0.0


@pytest.mark.parametrize("late_s", [0.0, 0.6])
def test_what_parsing_takes_on_other_threads_is_charged(late_s: float) -> None:
    thread = Thread()
    thread.share.arrive("a")
    waits = []
    for _ in range(3):  # requests that take the loop nothing, and another thread 0.4 s each
        waits.append(thread.ask("s", 0.0))
        thread.pass_s(late_s)
        thread.share.spent_beside("s", 0.4)
        thread.pass_s(0.3)
    # Two tenants are here, so that one may begin in 3.2 s, which is half of a quarter of the time.
    assert waits[0] == 0.0 and 2.0 < max(waits) <= 0.4 * 8


def test_what_refusals_take_makes_nobody_elses_requests_wait() -> None:
    thread = Thread()
    thread.ask("s", 0.4)
    thread.share.arrive("a")
    waits, refused = [], 0
    for _ in range(200):
        waits.append(thread.ask("a", 0.001))
        for _ in range(50):
            if thread.ask("s", 0.001) > MOST_WAIT_S:
                refused += 1
                thread.spent_s += 0.001
            thread.pass_s(0.002)
    assert refused > 5_000
    assert max(waits) == 0.0


def test_clients_that_ask_again_at_once_are_refused_seldom_and_all_begin() -> None:
    clients, seconds, stream_s = 40, 10.0, 4.0
    thread = Thread()
    thread.ask("s", 0.4)  # a long body
    thread.share.arrive("a")  # a stream that goes on
    thread.pass_s(0.3)
    begin_s, refused, begun = thread.now_s, 0, set[int]()
    turns: list[tuple[float, int, str]] = [(thread.now_s, each, "ask") for each in range(clients)]
    while turns[0][0] < begin_s + seconds:
        thread.now_s, client, what = heappop(turns)
        if what == "begin":
            thread.share.begin("s")
            thread.spent_s += 0.001
            begun.add(client)
            heappush(turns, (thread.now_s + stream_s, client, "leave"))
            continue
        if what == "leave":
            thread.share.leave("s")
        wait_s = thread.share.arrive("s")
        if wait_s <= MOST_WAIT_S:
            heappush(turns, (thread.now_s + wait_s, client, "begin"))
            continue
        refused += 1
        thread.spent_s += 0.001
        heappush(turns, (thread.now_s + thread.share.refuse("s") + 0.001, client, "leave"))
    assert len(begun) == clients
    assert refused <= clients * seconds / 2, "those that begin are not refused any more"


def test_of_a_flood_only_so_many_are_kept_until_they_are_refused() -> None:
    share = LoopShare(refusal_s=1.0)
    kept = []
    for _ in range(1_000):
        share.arrive("s")
        kept.append(share.refuse("s"))
    assert kept == [1.0] * 256 + [0.0] * 744
