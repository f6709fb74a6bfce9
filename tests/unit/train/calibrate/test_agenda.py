"""What a calibration runs within its time: counted on a clock that tasks move, never measured."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.train.calibrate.agenda import Task, run_agenda


class Clock:
    """Seconds that pass only while tasks run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _tasks(clock: Clock, weights: list[float], needed: int, slowness: float) -> list[Task]:
    def runs(weight: float) -> Callable[[float], float]:
        def run(limit_s: float) -> float:
            clock.now += weight * slowness
            return limit_s

        return run

    return [
        Task(f"task {at}", weight, at < needed, runs(weight)) for at, weight in enumerate(weights)
    ]


def _run(
    weights: list[float], needed: int, slowness: float, limit_s: float, done: list[str]
) -> tuple[list[str], tuple[str, ...], float]:
    clock, kept = Clock(), list(done)
    left = run_agenda(
        _tasks(clock, weights, needed, slowness),
        done,
        lambda task, _: kept.append(task.name),
        limit_s=limit_s,
        clock=clock,
    )
    return kept, left, clock.now


def test_an_idle_machine_runs_everything_and_a_busy_one_what_is_needed() -> None:
    weights = [5.0, 5.0, 20.0, 10.0, 10.0]
    kept, left, _ = _run(weights, 3, 1.0, 60.0, [])
    assert (len(kept), left) == (5, ())
    kept, left, spent_s = _run(weights, 3, 1.6, 60.0, [])
    assert kept == ["task 0", "task 1", "task 2"]
    assert left == ("task 3", "task 4")
    assert spent_s == pytest.approx(48.0)  # 16 more would have ended at 64
    # However slow it is, what is needed runs; nothing else begins.
    kept, left, _ = _run(weights, 3, 100.0, 60.0, [])
    assert (len(kept), len(left)) == (3, 2)


def test_a_short_task_runs_where_a_long_one_before_it_would_end_late() -> None:
    kept, left, _ = _run([10.0, 80.0, 5.0], 1, 2.0, 60.0, [])
    assert (kept, left) == (["task 0", "task 2"], ("task 1",))


def test_a_session_that_was_stopped_runs_each_task_once() -> None:
    weights, done = [5.0, 5.0, 40.0, 40.0], []
    for expected in (3, 4):
        kept, left, _ = _run(weights, 2, 1.0, 60.0, done)
        assert len(kept) == len(set(kept)) == expected
        done = kept
    assert left == ()


def test_each_task_gets_its_share_of_what_is_left() -> None:
    clock, shares = Clock(), []
    tasks = _tasks(clock, [10.0, 30.0], 2, 0.5)
    run_agenda(tasks, (), lambda _, share: shares.append(share), limit_s=60.0, clock=clock)
    assert shares == pytest.approx([15.0, 55.0])


@given(
    st.lists(st.floats(0.5, 50.0), min_size=1, max_size=8),
    st.integers(0, 4),
    st.floats(0.1, 10.0),
    st.floats(0.0, 200.0),
)
def test_what_is_optional_ends_in_time(
    weights: list[float], needed: int, slowness: float, limit_s: float
) -> None:
    kept, left, spent_s = _run(weights, needed, slowness, limit_s, [])
    assert sorted([*kept, *left]) == sorted(f"task {at}" for at in range(len(weights)))
    must_s = slowness * sum(weights[:needed])
    # The first task's pace is not known yet; a machine as fast as its weights say is assumed.
    first_s = slowness * weights[0] if not needed else 0.0
    assert spent_s <= max(must_s, limit_s, first_s) + 1e-6
    assert set(kept) >= {f"task {at}" for at in range(min(needed, len(weights)))}
