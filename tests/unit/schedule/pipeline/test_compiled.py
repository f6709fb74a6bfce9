"""Loops compiled and as they stand: the same schedules, the same times."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.arrays import Ints
from equipoise.schedule import compiled
from equipoise.schedule.compiled import compile_loop, run_loop
from equipoise.schedule.pipeline import fill as pipeline_fill
from equipoise.schedule.pipeline import replay as pipeline_replay
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import count_in_flight, run_order
from equipoise.schedule.pipeline.strategies import write_pipeline
from support.pipelines import WHOLE, steps, write_if_legal


def both(loop: compiled.Loop, _: int, *tables: Ints) -> int:
    """Compiled, after it gave the same numbers as it stands."""
    lists = [table.tolist() for table in tables]
    plain = loop(*lists)
    found = compile_loop(loop)(*tables)
    assert found == plain
    assert [table.tolist() for table in tables] == lists
    return int(found)


@pytest.fixture(scope="module", autouse=True)
def compare():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_replay, "run_loop", both)
        patch.setattr(pipeline_fill, "run_loop", both)
        yield


@settings(deadline=None)
@given(steps(), st.sampled_from(WHOLE), st.one_of(st.none(), st.integers(1, 200)))
def test_both_ways_write_and_replay_alike(step, strategy: str, most_held: int | None) -> None:
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks, most_held=most_held)
    if schedule is not None:
        pipeline_replay.replay_pipeline(schedule, prices)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_ranks_that_wait_for_ever_stand_at_the_same_place(lengths, data) -> None:
    count = sum(lengths)
    needs = data.draw(st.lists(st.integers(-2, count - 1), min_size=count, max_size=count))
    starts = np.cumsum([0, *lengths])
    run = run_order(starts, np.array(needs, dtype=np.int64))
    assert run.done == (run.end_ns >= 0).sum() == (run.now - starts[:-1]).sum()


def test_a_loop_is_compiled_once_something_is(monkeypatch) -> None:
    seen: list[type] = []

    def note(table: compiled.Numbers) -> int:
        seen.append(type(table))
        table[0] = 7
        return len(table)

    monkeypatch.setattr(compiled, "is_loaded", lambda: False)
    table = np.zeros(3, dtype=np.int64)
    assert run_loop(note, 10, table) == 3
    assert seen == [list] and table.tolist() == [7, 0, 0]
    monkeypatch.setattr(compiled, "compile_loop", lambda loop: loop)
    assert run_loop(note, 1_000_000, table) == 3
    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    assert run_loop(note, 10, table) == 3
    assert seen == [list, np.ndarray, np.ndarray]


def test_where_no_machine_code_can_be_kept_it_is_compiled_again(monkeypatch) -> None:
    import numba

    asked = []

    def njit(signature: str, *, cache: bool = False):
        asked.append((signature, cache))
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda loop: loop

    monkeypatch.setattr(numba, "njit", njit)
    loop = lambda one, other: 5  # noqa: E731
    assert compile_loop.__wrapped__(loop)(1, 2) == 5
    assert asked == [
        ("int64(int64[::1], int64[::1])", True),
        ("int64(int64[::1], int64[::1])", False),
    ]


def test_a_schedule_that_looks_at_no_price_is_written_once() -> None:
    one, other = (make_prices(each, each, each, stages=4, micro_batches=8) for each in (1, 2))
    first, second = (write_pipeline("interleaved", each, ranks=2) for each in (one, other))
    assert first is second
    filled = [write_pipeline("interleaved-zb", each, ranks=2) for each in (one, other)]
    assert filled[0].paths is filled[1].paths
    assert write_pipeline("interleaved", one, ranks=4) is not first


def test_in_flight_of_ranks_without_work_is_nothing() -> None:
    schedule = write_pipeline("gpipe", make_prices(1, 1, 1, stages=2, micro_batches=3), ranks=2)
    nothing = np.empty((0, 3), dtype=np.int64)
    first, second = schedule.orders
    for orders in ((nothing, first, second), (first, nothing, second), (first, second, nothing)):
        held = count_in_flight(dataclasses.replace(schedule, orders=orders)).peak
        assert held.tolist() == [3 if len(order) else 0 for order in orders]
