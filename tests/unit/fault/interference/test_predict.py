"""The shipped predictor: calm is near full speed, a stressed host is not, and it says by what."""

import numpy as np
import pytest
from bench.interference.windows import load

from equipoise.fault.interference.features import flatten
from equipoise.fault.interference.metrics import METRICS, RESOURCES
from equipoise.fault.interference.predict import Predictor

CALM = {
    "own_busy": 0.98,
    "own_yields": 4.0,
    "own_faults": 30.0,
    "wake_late": 1e-4,
    "probe_compute": 4e-4,
    "probe_stream": 4e-4,
    "probe_random": 5e-5,
    "user": 0.5,
    "switches": 300.0,
    "interrupts": 300.0,
    "running": 0.5,
    "available": 0.9,
}
STRESS: dict[str, dict[str, float]] = {
    "cpu": {"own_busy": 0.2, "own_delay": 0.8, "seat_others": 0.8, "others_busy": 0.9,
            "wake_late": 0.02, "running": 3.0, "cpu_stall": 1.0, "own_forced": 80.0},
    "memory": {"faults": 5e5, "allocated": 2e9, "probe_stream": 1.2e-3, "probe_random": 2e-4},
    "disk": {"disk_written": 5e8, "disk_writes": 3e3, "disk_busy": 1.0, "io_stall": 1.0,
             "disk_flushes": 800.0, "disk_queue": 4.0, "blocked": 2.0},
    "network": {"loop_packets": 1e6, "loop_bytes": 2e9, "received": 5e5, "softirq": 0.2},
}  # fmt: skip


def rows_of(count: int, **changed: float) -> np.ndarray:
    values = dict.fromkeys(METRICS, 0.0) | CALM | changed
    return np.tile([values[name] for name in METRICS], (count, 1))


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.load()


def test_each_resource_is_named(predictor: Predictor) -> None:
    calm = predictor.predict(rows_of(20))
    for resource, changed in STRESS.items():
        made = predictor.predict(np.concatenate((rows_of(20), rows_of(4, **changed))))
        assert made.resource == resource
        assert set(made.excess) == set(RESOURCES) and 0 < made.speed <= 1
        assert made.excess[made.resource] == max(made.excess.values())
        assert made.speed <= calm.speed
    assert calm.speed > 0.6


def test_what_was_recorded_is_predicted(predictor: Predictor) -> None:
    windows = load()
    scaled = predictor.scale.apply(windows.rows)
    made = predictor.trees.predict(flatten(scaled)).clip(0.02, 1)
    assert np.abs(made - windows.performance).mean() < 0.06  # 0.18 if nothing were known
    calm, taken = made[windows.kind == ""], made[windows.kind == "product"]
    assert calm.mean() > taken.mean() + 0.3


def test_unknown_metrics_are_no_news(predictor: Predictor) -> None:
    rows = rows_of(20)
    rows[:, list(METRICS).index("steal")] = np.nan
    assert 0 < predictor.predict(rows).speed <= 1
