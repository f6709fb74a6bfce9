"""What a calibration runs within its time: counted on a clock that tasks move, never measured."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import EquipoiseError
from equipoise.train.calibrate.agenda import Task, run_agenda
from equipoise.train.calibrate.budgeted import require_needed


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
    # However slow it is, each session ends after a task, and gets on by one.
    kept = []
    for count in (1, 2, 3):
        kept, left, _ = _run(weights, 3, 100.0, 60.0, kept)
        assert (len(kept), len(left)) == (count, 5 - count)


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
    # The first task's pace is not known yet, and a needed one that has begun ends.
    late_s = slowness * max(weights[: max(1, needed)])
    assert spent_s <= max(limit_s + late_s * bool(needed), late_s) + 1e-6
    assert kept or (not needed and weights[0] > limit_s)
    if slowness * sum(weights[:needed]) < limit_s:
        assert set(kept) >= {f"task {at}" for at in range(min(needed, len(weights)))}


def test_a_file_waits_for_what_it_needs() -> None:
    tasks = _tasks(Clock(), [1.0, 1.0, 1.0], 2, 1.0)
    require_needed(tasks, ("task 2",), 3.25)
    with pytest.raises(EquipoiseError) as caught:
        require_needed(tasks, ("task 1", "task 2"), 3.25)
    assert str(caught.value) == (
        "Time ended after 1 of 2 measurements that a forecast needs, while other programs kept 3.2 "
        "cores busy. They are kept, and the same command goes on with the others."
    )
