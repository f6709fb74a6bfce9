"""Tenants that share an iteration: nobody's rows make the others' wait long, and every row runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.iteration import BatchSchedule
from equipoise.schedule.batching.limit import IterationLimit, pace_s
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.spec.serving import IterationWork
from support.serving.loop import LinearPrice, Loop

DIVIDING = ["user-fair", "uwfq", "vtc"]
PROMPT, OUT = 8, 40


def loop_of(
    streams: dict[str, int],
    price: LinearPrice,
    policy: str = "uwfq",
    weights: dict[str, float] | None = None,
    out: int = OUT,
) -> Loop:
    """As many equal streams of each tenant, all of which decode soon."""
    limits = BatchSettings(4000, 4, 256, iteration_s=1e-6, weights=weights or {})
    outputs = {f"{tenant}{at:03d}": out for tenant, count in streams.items() for at in range(count)}
    loop = Loop(Scheduler(limits, price, FAIR_POLICIES[policy]), outputs)
    for name in outputs:
        loop.submit(ServeRequest(name, name[0], 0.0, PROMPT, out))
    return loop


def rows_of(schedule: BatchSchedule) -> dict[str, list[int]]:
    """Contexts of each tenant's decodes in an iteration."""
    rows: dict[str, list[int]] = {}
    for chunk in schedule.chunks[: schedule.iteration.decodes]:
        rows.setdefault(chunk.request[0], []).append(chunk.start + 1)
    return rows


def decodes_s(price: LinearPrice, contexts: list[int]) -> float:
    count, sum_ = len(contexts), sum(contexts)
    return price.iteration_s(IterationWork(count, sum_, sum_, count, count))


def decoding(loop: Loop) -> dict[str, list[int]]:
    """Contexts of all streams that decode, whether they rest or not."""
    contexts: dict[str, list[int]] = {}
    for name, mine in loop.served.items():
        if mine.sampled and mine.end_s is None:
            contexts.setdefault(name[0], []).append(PROMPT + mine.sampled)
    return contexts


@pytest.mark.parametrize("policy", DIVIDING)
@pytest.mark.parametrize("token", [1e-5, 1e-4, 1e-3])
def test_one_tenant_with_ten_times_the_streams_at_most_doubles_the_others_time(
    policy: str, token: float
) -> None:
    price = LinearPrice(token=token)
    loop = loop_of({"a": 4}, price, policy, out=4 * OUT)
    while len(decoding(loop).get("a", ())) < 4:
        assert loop.step()
    for at in range(40):
        loop.outputs[f"h{at:03d}"] = OUT
        loop.submit(ServeRequest(f"h{at:03d}", "h", loop.now_s, PROMPT, OUT))
    shared = 0
    while not all(loop.served[f"a{at:03d}"].end_s for at in range(4)):
        before = decoding(loop)
        assert loop.step()
        schedule = loop.schedules[-1]
        if len(before) < 2:
            continue
        shared += 1
        page_s = 4 * token + 1e-6 if schedule.iteration.prefills else 0.0
        assert len(rows_of(schedule)["a"]) == len(before["a"]), (
            "within its share, it always decodes"
        )
        assert schedule.predicted_s <= 2 * decodes_s(price, before["a"]) + page_s + 1e-12
    assert shared >= OUT // 2


@settings(deadline=None, max_examples=40)
@given(
    streams=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 24), min_size=2, max_size=4),
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 3.0])),
    token=st.sampled_from([1e-6, 1e-4, 1e-3]),
    policy=st.sampled_from(DIVIDING),
)
def test_iterations_keep_their_limit_and_every_stream_has_its_turn(
    streams: dict[str, int], weights: dict[str, float], token: float, policy: str
) -> None:
    price = LinearPrice(token=token, pair=0.0)
    loop = loop_of(streams, price, policy, weights, out=12)
    last: dict[str, int] = {}
    most_rows = sum(streams.values())
    ratio = max(weights.get(each, 1.0) for each in streams) / min(
        weights.get(each, 1.0) for each in streams
    )
    while not loop.scheduler.is_idle:
        before = decoding(loop)
        waiting = {name[0] for name, mine in loop.served.items() if not mine.sampled}
        assert loop.step()
        schedule, number = loop.schedules[-1], len(loop.schedules)
        for chunk in schedule.chunks:
            last[chunk.request] = number
        for name, mine in loop.served.items():
            if mine.sampled and mine.end_s is None:
                assert number - last[name] <= most_rows * ratio + 1
        if len(before) < 2:
            rested = loop.scheduler._residents.decodes.resting
            assert len(loop.scheduler._tenants) > 1 or not rested, "nobody rests for nobody"
            continue
        whole = sum(weights.get(each, 1.0) for each in before)
        taken = sum(map(len, rows_of(schedule).values()))
        one_s = token * (1 + (4 if schedule.iteration.prefills else 0))
        for tenant, contexts in before.items():
            if tenant in waiting:  # its own prompts may take its own time
                continue
            weight = weights.get(tenant, 1.0)
            limit_s = max(2.0, whole / weight) * decodes_s(price, contexts)
            others = [each for name, more in before.items() if name != tenant for each in more]
            share_s = max(2.0, whole / (whole - weight)) * decodes_s(price, others)
            if waiting - {tenant}:
                share_s = limit_s
            assert schedule.predicted_s <= min(limit_s, share_s) + one_s + 1e-12
        assert taken, "somebody decodes in each iteration"


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.integers(1, 40), st.integers(40, 4000)), min_size=1
    ),
    waiting=st.none() | st.dictionaries(st.sampled_from("abcd"), st.integers(0, 60)),
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.1, 1.0, 3.0])),
    iteration_s=st.sampled_from([1e-6, 1e-3, 5e-3, 0.02, 0.1]),
    token=st.sampled_from([1e-6, 1e-4, 1e-3]),
)
def test_what_is_found_without_the_limit_is_what_the_limit_says(
    sizes: dict[str, tuple[int, int]],
    waiting: dict[str, int] | None,
    weights: dict[str, float],
    iteration_s: float,
    token: float,
) -> None:
    limits = BatchSettings(4000, 4, 256, iteration_s=iteration_s, weights=weights)
    limit = IterationLimit(limits, LinearPrice(token=token), sizes, waiting)
    held = limit.holds_all(), limit.holds(0.9 * pace_s(limits)), limit.holds(limit.all_s)
    assert limit.seconds >= pace_s(limits)
    assert held == (limit.all_s <= limit.rows_s, True, limit.all_s <= limit.seconds)


@pytest.mark.parametrize("policy", ["fifo", "job-fair"])
def test_policies_without_shares_let_all_decode(policy: str) -> None:
    loop = loop_of({"a": 1, "h": 30}, LinearPrice(token=1e-3), policy)
    loop.run()
    assert not any(each.iteration.rested for each in loop.schedules)


def test_one_tenant_alone_never_rests() -> None:
    loop = loop_of({"h": 60}, LinearPrice(token=1e-3))
    loop.run()
    assert not any(each.iteration.rested for each in loop.schedules)


def test_who_rests_goes_on_when_the_others_are_gone() -> None:
    price = LinearPrice(token=1e-3)
    loop = loop_of({"a": 1, "h": 30}, price)
    loop.run()
    assert any(each.iteration.rested for each in loop.schedules)
    assert all(mine.sampled == OUT for mine in loop.served.values())
    alone = [
        each for each in loop.schedules if len(each.chunks) == 30 and not each.iteration.prefills
    ]
    assert alone, "all thirty decode together once the other tenant has ended"


def test_a_weight_is_a_share_of_rows() -> None:
    """Two tenants with many streams beside one with a single stream."""
    price = LinearPrice(iteration=1e-2, token=1e-3, pair=0.0)
    loop = loop_of({"a": 1, "h": 30, "k": 30}, price, weights={"a": 1.0, "h": 2.0, "k": 1.0})
    counts = {"h": 0, "k": 0}
    for _ in range(400):
        before = decoding(loop)
        if not loop.step():
            break
        if set(before) == {"a", "h", "k"} and not loop.schedules[-1].iteration.prefills:
            rows = rows_of(loop.schedules[-1])
            if len(rows["h"]) + len(rows["k"]) < len(before["h"]) + len(before["k"]):
                counts["h"] += len(rows["h"])
                counts["k"] += len(rows["k"])
    assert counts["k"] >= 50
    assert counts["h"] / counts["k"] == pytest.approx(2.0, rel=0.15)
