"""Limits of a tenant, by a clock that the test turns."""

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.serve.http.fault import HttpError
from equipoise.serve.http.limits import TenantLimits, limits_of
from equipoise.serve.http.tenants import Tenant


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def refusal(limits: TenantLimits, tokens: int, answers: int = 1) -> HttpError:
    with pytest.raises(HttpError) as refused:
        limits.take(tokens, answers)
    return refused.value


def made(**settings: Any) -> tuple[TenantLimits, Clock]:
    clock = Clock()
    return TenantLimits(Tenant("a", **settings), clock), clock


def test_requests_a_minute() -> None:
    limits, clock = made(requests_per_minute=2)
    for _ in range(2):
        limits.take(5, 1)
        limits.end(1)
    refused = refusal(limits, 5)
    assert refused.status == 429
    assert refused.message == "Tenant a has used its 2 requests a minute. Try again in 30 s."
    assert refused.body["error"]["type"] == refused.body["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
        "Retry-After": "30",
        "retry-after-ms": "30000",
    }
    clock.now_s = 30
    limits.take(5, 1)


def test_bodies_that_are_here_have_a_bounded_size_together() -> None:
    most = 256 << 20
    limits = limits_of({"a": Tenant("a")}, running=8, waiting=100, body_bytes=4 << 20)["a"]
    with ExitStack() as first, ExitStack() as second:
        limits.hold(most - 10, first)
        limits.hold(10, second)
        with pytest.raises(HttpError) as refused:
            limits.hold(1, second)
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
        assert refused.value.message == (
            "The requests of tenant a that are here have bodies of 268,435,456 bytes, and may have "
            "268,435,456. Wait for one to end."
        )
        second.close()
        limits.hold(10, second)
    with ExitStack() as third:
        limits.hold(most, third)
    many = {str(at): Tenant(str(at)) for at in range(1000)}
    few = limits_of(many, running=8, waiting=100, body_bytes=4 << 20)["7"]
    with ExitStack() as held:
        few.hold(16 << 20, held)  # four of the largest
        with pytest.raises(HttpError):
            few.hold(1, held)


def test_who_has_no_token_left_is_refused_before_its_texts_are_cut() -> None:
    limits, clock = made(tokens_per_minute=60)
    limits.take(10, 1)
    limits.use(60)  # its answer has overdrawn the allowance by 10
    with pytest.raises(HttpError) as refused:
        limits.require_turn()
    assert refused.value.message == ("Tenant a has used its 60 tokens a minute. Try again in 11 s.")
    clock.now_s = 11
    limits.require_turn()


def test_what_comes_too_soon_is_refused_before_it_costs_anything() -> None:
    limits, clock = made(requests_per_minute=2, concurrency=1)
    limits.require_turn()
    limits.take(5, 1)
    with pytest.raises(HttpError) as refused:
        limits.require_turn()
    assert refused.value.message == (
        "Tenant a has 1 answers under way and may have 1 at a time. Wait for one to end."
    )
    limits.count_request()  # which asks for no answer
    limits.end(1)
    for refuse in (limits.require_turn, limits.count_request):
        with pytest.raises(HttpError) as refused:
            refuse()
        assert refused.value.message == (
            "Tenant a has used its 2 requests a minute. Try again in 30 s."
        )
    clock.now_s = 30
    limits.require_turn()
    limits.require_turn()
    limits.count_request()
    assert limits.headers()["x-ratelimit-remaining-requests"] == "0"


def test_tokens_are_paid_when_they_come() -> None:
    limits, clock = made(tokens_per_minute=60)
    limits.take(50, 1)
    limits.use(40)
    assert limits.headers()["x-ratelimit-remaining-tokens"] == "0"
    refused = refusal(limits, 10)
    assert refused.message == "Tenant a has used its 60 tokens a minute. Try again in 40 s."
    clock.now_s = 40
    limits.take(10, 1)


def test_a_prompt_over_the_allowance_is_never_let_in() -> None:
    limits, _ = made(tokens_per_minute=60)
    refused = refusal(limits, 61)
    assert refused.message == (
        "The prompts have 61 tokens, and tenant a may use 60 a minute. Shorten them."
    )
    assert refused.headers["x-should-retry"] == "false"
    assert "Retry-After" not in refused.headers


def test_answers_at_a_time() -> None:
    limits, _ = made(concurrency=3)
    limits.take(1, 2)
    refused = refusal(limits, 1, 2)
    assert refused.status == 429
    assert refused.message == (
        "Tenant a has 2 answers under way and may have 3 at a time. Wait for one to end."
    )
    impossible = refusal(limits, 1, 4)
    assert impossible.status == 400
    assert impossible.message == (
        "The request asks for 4 answers, and tenant a may have 3 at a time. Ask for fewer."
    )
    limits.end(2)
    limits.take(1, 3)


def test_what_the_engine_refuses_is_given_back() -> None:
    limits, _ = made(requests_per_minute=1, tokens_per_minute=10, concurrency=1)
    limits.take(10, 1)
    limits.give_back(10, 1)
    limits.take(10, 1)


def test_a_clock_that_jumps_back_takes_nothing_away() -> None:
    limits, clock = made(requests_per_minute=2)
    clock.now_s = -1e9
    limits.take(1, 1)
    limits.take(1, 1)


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 30), st.integers(0, 10)), max_size=60),
)
def test_no_span_gives_more_than_its_allowance(
    per_minute: int, asked: list[tuple[float, int, int]]
) -> None:
    limits, clock = made(tokens_per_minute=per_minute)
    taken: list[tuple[float, int]] = []
    for pause_s, prompt, output in asked:
        clock.now_s += pause_s
        try:
            limits.take(prompt, 1)
        except HttpError:
            continue
        limits.use(output)
        limits.end(1)
        taken.append((clock.now_s, prompt + output))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            span_s = taken[last][0] - taken[first][0]
            got = sum(tokens for _, tokens in taken[first : last + 1])
            # What the last answer overdrew is not paid back yet.
            assert got <= per_minute * (1 + span_s / 60) + 10 + 1e-6


def test_no_tenant_fills_the_queue() -> None:
    tenants = {"a": Tenant("a", 3.0), "b": Tenant("b"), "c": Tenant("c", concurrency=2)}
    limits = limits_of(tenants, running=8, waiting=100, body_bytes=1)
    for name, most in (("a", 8 + 60), ("b", 8 + 20), ("c", 2)):
        limits[name].take(1, most)
        assert refusal(limits[name], 1).status == 429
    limits_of({"a": Tenant("a")}, running=8, waiting=100, body_bytes=1)["a"].take(1, 10_000)


def test_without_limits_nothing_is_said() -> None:
    limits, _ = made()
    limits.take(10**9, 10**6)
    assert limits.headers() == {}


def test_a_request_at_fault_is_one_of_the_allowance() -> None:
    limits, clock = made(requests_per_minute=2)
    limits.count_refused()
    limits.require_request()
    limits.count_refused()
    for refuse in (limits.require_request, limits.require_turn):
        with pytest.raises(HttpError) as refused:
            refuse()
        assert refused.value.message == (
            "Tenant a has used its 2 requests a minute. Try again in 30 s."
        )
    clock.now_s += 30.0
    limits.require_request()
