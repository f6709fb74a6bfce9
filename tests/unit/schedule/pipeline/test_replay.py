"""The replay against the longest path, bounds and closed forms; prices that are refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import CheckError, LayoutError
from equipoise.schedule.pipeline.bound import bound_pipeline
from equipoise.schedule.pipeline.instruction import MICRO_BATCH, OP, STAGE, Op
from equipoise.schedule.pipeline.prices import PipelinePrices, make_prices
from equipoise.schedule.pipeline.replay import count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from support.pipelines import WHOLE, steps, write_if_legal


def longest_path_ns(schedule: PipelineSchedule, prices: PipelinePrices) -> int:
    """The graph of what waits for what, relaxed until nothing changes."""
    times = prices.of_ops()
    ends: dict[tuple[str, int, int], int] = {}
    changed = True
    while changed:
        changed = False
        for rank, table in enumerate(schedule.orders):
            time = 0
            for op, stage, m in table.tolist():
                letter = "FBBW"[op]
                wanted = None
                if letter == "F" and stage:
                    wanted = ("F", stage - 1, m)
                elif letter == "B" and stage + 1 < schedule.stages:
                    wanted = ("B", stage + 1, m)
                elif letter == "B":
                    wanted = ("F", stage, m)
                if wanted:
                    hop = schedule.rank_of[wanted[1]] != rank
                    time = max(time, ends.get(wanted, 0) + int(prices.hop_ns[m]) * int(hop))
                time += int(times[op, stage, m])
                if ends.get((letter, stage, m)) != time:
                    ends[letter, stage, m] = time
                    changed = True
    return max(ends.values())


@given(steps(), st.sampled_from(WHOLE))
def test_the_makespan_is_the_longest_path(step, strategy: str) -> None:
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks)
    if schedule is not None:
        assert replay_pipeline(schedule, prices).makespan_ns == longest_path_ns(schedule, prices)


@given(steps(), st.sampled_from(WHOLE))
def test_in_flight_is_the_live_set(step, strategy: str) -> None:
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks)
    if schedule is None:
        return
    held = count_in_flight(schedule, prices.activation)
    for rank, table in enumerate(schedule.orders):
        live: set[tuple[int, int]] = set()
        peak = 0
        for row in table:
            name = int(row[STAGE]), int(row[MICRO_BATCH])
            if row[OP] == Op.FORWARD:
                live.add(name)
            peak = max(peak, sum(int(prices.activation[each]) for each in live))
            if row[OP] in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                live.remove(name)
        assert held.peak[rank] == peak
        assert held.peak_without_stash[rank] <= peak
        assert not live


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_slower_stage_is_in_no_closed_form(slow: int) -> None:
    column = np.full((4, 1), 10)
    column[slow] = 12
    prices = make_prices(column, column, column, stages=4, micro_batches=8)
    schedule = write_pipeline("1f1b", prices, ranks=4)
    makespan = replay_pipeline(schedule, prices).makespan_ns
    assert makespan == longest_path_ns(schedule, prices)
    assert makespan not in (30 * 11, 36 * 11, 31.5 * 11)  # (m + p - 1)(F + B + W)
    assert makespan > 30 * 11


def test_one_rank_is_never_idle() -> None:
    prices = make_prices(3, 2, 1, hop_ns=50, stages=2, micro_batches=4)
    timeline = replay_pipeline(write_pipeline("interleaved", prices, ranks=1), prices)
    assert (timeline.makespan_ns, timeline.idle_ns.tolist()) == (48, [0])
    assert timeline.bubble_rate == timeline.span_bubble_rate == 0


def test_a_step_without_work() -> None:
    prices = make_prices(0, 0, 0, stages=2, micro_batches=2)
    schedule = write_pipeline("auto", prices, ranks=2)
    timeline = replay_pipeline(schedule, prices)
    assert (timeline.makespan_ns, timeline.bubble_rate) == (0, 0.0)
    assert bound_pipeline(prices, schedule.rank_of) == 0


def test_more_latency_never_helps_a_schedule() -> None:
    waits = []
    for hop in (0, 1, 5, 50):
        prices = make_prices(10, 10, 10, hop_ns=hop, stages=4, micro_batches=8)
        schedule = write_pipeline("1f1b", prices, ranks=4)
        waits.append(replay_pipeline(schedule, prices).makespan_ns)
    assert waits == sorted(waits)
    assert waits[0] == 30 * 11


def test_a_schedule_that_waits_for_ever() -> None:
    prices = make_prices(1, 1, 1, stages=2, micro_batches=2)
    schedule = write_pipeline("1f1b", prices, ranks=2)
    turned = dataclasses.replace(schedule, orders=tuple(each[::-1] for each in schedule.orders))
    with pytest.raises(CheckError) as caught:
        replay_pipeline(turned, prices)
    assert str(caught.value) == (
        "1f1b: 2 of 2 ranks wait for ever, rank 0 first. check_pipeline says for what."
    )


def refusal(*args, **more) -> str:
    with pytest.raises(LayoutError) as caught:
        make_prices(*args, **more)
    return str(caught.value)


def test_prices_that_do_not_go_together() -> None:
    assert refusal([[1, 2]], [[1, 2, 3]], 1) == (
        "Prices of shapes (1, 2), (1, 3), (), (), () do not match 1 stages and 1 micro-batches. "
        "Give tables of [stages, micro-batches]."
    )
    assert refusal([[[1]]], 1, 1) == (
        "Prices have shape (1, 1, 1) and hops (). Give tables of [stages, micro-batches] and "
        "hops of [micro-batches]."
    )
    assert refusal([[1]], 1, 1, hop_ns=[[1]]) == (
        "Prices have shape (1, 1) and hops (1, 1). Give tables of [stages, micro-batches] and "
        "hops of [micro-batches]."
    )


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_prices_that_are_none(wrong: float) -> None:
    assert refusal([[1, wrong]], 1, 1) == (
        f"A forward price is {wrong:g} ns. Prices are 0 or more, and less than 2**62 ns, which are "
        "146 years."
    )
    assert refusal([[1, 1]], 1, 1, hop_ns=wrong) == (
        f"A hop price is {wrong:g} ns. Prices are 0 or more, and less than 2**62 ns, which are 146 "
        "years."
    )
