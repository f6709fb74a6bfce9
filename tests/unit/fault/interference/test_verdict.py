"""Whose fault a slow rank is, for every way to lose time."""

import numpy as np
import pytest

from equipoise.fault.interference.metrics import METRICS
from equipoise.fault.interference.verdict import verdict

USUAL = {
    "own_busy": 0.9,
    "own_delay": 0.01,
    "probe_stream": 2e-4,
    "probe_random": 4e-5,
    "probe_compute": 4e-4,
    "disk_busy": 0.02,
    "disk_written": 1e5,
    "own_written": 9e4,
    "loop_packets": 100.0,
}


def rows_of(**changed: float) -> np.ndarray:
    values = dict.fromkeys(METRICS, 0.0) | USUAL | changed
    return np.tile([values[name] for name in METRICS], (5, 1))


# A step takes 0.15 s instead of 0.1 s; of the usual one 0.09 s were processor time.
CASES = {
    # Half of the time ready to run, and another process had the core.
    "core taken": ({"own_busy": 0.6, "own_delay": 0.35, "seat_others": 0.4}, "cpu"),
    "machine taken": ({"own_busy": 0.6, "steal": 0.34}, "cpu"),
    # Its own threads waited for each other's cores.
    "own threads": ({"own_busy": 0.6, "own_delay": 0.35, "seat_others": 0.02}, None),
    # More processor time, and so had the probes.
    "memory taken": ({"own_busy": 0.92, "probe_stream": 3.1e-4}, "memory"),
    "caches taken": ({"own_busy": 0.92, "probe_random": 7e-5}, "memory"),
    "slow clock of all": ({"own_busy": 0.92, "probe_compute": 6.2e-4}, "cpu"),
    # More processor time, and nothing else was slower.
    "busy loop": ({"own_busy": 0.95}, None),
    # Neither running nor ready.
    "sleep": ({"own_busy": 0.6}, None),
    "disk taken": ({"own_busy": 0.6, "disk_busy": 0.8, "disk_written": 9e7}, "disk"),
    "own disk": (
        {"own_busy": 0.6, "disk_busy": 0.8, "disk_written": 9e7, "own_written": 8e7},
        None,
    ),
    "network taken": ({"own_busy": 0.6, "loop_packets": 50_000.0}, "network"),
    "own network": ({"own_busy": 0.6, "loop_packets": 70.0}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_each_way_to_lose_time_has_its_culprit(case: str) -> None:
    changed, resource = CASES[case]
    made = verdict(0.15, 0.1, rows_of(**changed), rows_of())
    assert made.slower == pytest.approx(0.5)
    assert made.resource == resource, made
    if resource is None:
        assert made.whose == "this rank" and made.neighbour_share < 0.5
        assert made.text.startswith("a step takes 150.0 ms instead of 100.0 ms, ")
        assert made.text.endswith("of that, which its neighbours do not explain")
    else:
        assert made.whose == "its neighbour on the host" and made.neighbour_share > 0.5


def test_more_work_beside_the_same_neighbour_is_its_own_doing() -> None:
    # It has half of a core; then it computes twice as much, and waits twice as long for the core.
    shared = rows_of(own_busy=0.5, own_delay=0.5, seat_others=0.5)
    made = verdict(0.2, 0.1, shared, shared)
    assert made.whose == "this rank" and made.neighbour_share == 0
    assert made.text == (
        "a step takes 200.0 ms instead of 100.0 ms, computing for 100.0 ms of that, which its "
        "neighbours do not explain"
    )


def test_a_sentence_says_what_was_lost() -> None:
    changed, _ = CASES["core taken"]
    made = verdict(0.15, 0.1, rows_of(**changed), rows_of())
    assert made.text == (
        "a step takes 150.0 ms instead of 100.0 ms, ready to run while others had its cores for "
        "50.0 ms of that"
    )


def test_usual_steps_are_nobodys_fault_and_no_rows_say_nothing() -> None:
    same = verdict(0.104, 0.1, rows_of(seat_others=1.0), rows_of())
    assert same.whose == "nobody" and same.resource is None
    unknown = rows_of() * np.nan
    for now, usual in ((rows_of(), rows_of()[:0]), (rows_of()[:0], rows_of()), (unknown, unknown)):
        made = verdict(0.2, 0.1, now, usual)
        assert made.whose == "unknown"
        assert made.text == "a step takes 200.0 ms instead of 100.0 ms; its host was not sampled"
