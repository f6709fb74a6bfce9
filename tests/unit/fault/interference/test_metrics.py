"""Rows of host metrics: a number for each, and a process finds itself in its own."""

import math
import mmap
import os
import time

import numpy as np

from equipoise.fault.interference import metrics
from equipoise.fault.interference.metrics import METRICS, RESOURCES, is_known, rates, read_counters


def row_of(before: dict, after: dict, span_s: float) -> dict[str, float]:
    return dict(zip(METRICS, rates(before, after, span_s).tolist(), strict=True))


def test_what_this_process_does_shows_in_its_own_metrics(tmp_path) -> None:
    assert is_known() and set(METRICS.values()) == set(RESOURCES)
    before, start = read_counters(), time.monotonic()
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    with mmap.mmap(-1, 1 << 20) as memory:  # what NumPy frees it may get again, without a fault
        memory.write(bytes(1 << 20))
    spin = time.process_time()
    while time.process_time() < spin + 0.2:
        np.ones(1 << 20).sum()
    span_s = time.monotonic() - start
    row = row_of(before, read_counters(), span_s)
    assert row["own_busy"] * span_s >= 0.2
    assert row["own_faults"] > 0 and row["own_delay"] >= 0
    assert row["faults"] * span_s >= row["own_faults"] * span_s > 0
    known = {name for name, value in row.items() if math.isfinite(value)}
    probes = {"wake_late", "probe_compute", "probe_stream", "probe_random"}
    assert probes.isdisjoint(known) and {"user", "switches", "loop_bytes"} <= known


def test_shares_are_of_a_core_and_what_is_its_own_is_no_others() -> None:
    zero = dict.fromkeys(
        ("user", "system", "softirq", "iowait", "steal", "switches", "interrupts", "busy"), 0.0
    )
    before = zero | {"own_busy": 0.0, "seat_busy": 0.0, "cores": 4.0, "seat_cores": 2.0}
    after = before | {"user": 6.0, "busy": 6.0, "own_busy": 3.0, "seat_busy": 4.0, "running": 8.0}
    row = row_of(before, after, 2.0)
    assert row["user"] == 6 / 2 / 4
    assert row["others_busy"] == (6 - 3) / 2 / 4
    assert row["seat_others"] == (4 - 3) / 2 / 2
    assert row["running"] == 2.0  # a gauge, per core
    assert math.isnan(row["disk_read"])  # this kernel does not count it


def test_only_whole_disks_are_summed() -> None:
    assert metrics._is_partition("no-such-disk")
