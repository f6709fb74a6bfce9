"""A sampler's rows come about a second apart, and nothing of it is left."""

import threading
import time

import numpy as np
import pytest

from equipoise.fault.interference.journaled import HostRecord, read_host
from equipoise.fault.interference.metrics import METRICS
from equipoise.fault.interference.sampler import HostSampler, Probe
from equipoise.observe.journal import Journal


@pytest.mark.long
def test_rows_come_once_a_second_and_the_journal_has_them(tmp_path) -> None:
    with Journal(tmp_path / "journal", 0) as journal, HostSampler() as sampler:
        record, rows = HostRecord(journal), []
        assert sampler.is_running and sampler.take() == []
        deadline = time.monotonic() + 240  # it takes two seconds
        while len(rows) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            rows += (taken := sampler.take())
            record.write(taken)
    assert len(rows) >= 2 and rows[1][0] - rows[0][0] >= 0.9
    assert not any(each.name == "host-sampler" for each in threading.enumerate())
    for _, row in rows:
        assert len(row) == len(METRICS)
        assert np.nanmin(row) >= 0

    times, values = read_host(tmp_path / "journal" / "rank-00000.jsonl")
    assert times.tolist() == [at for at, _ in rows]
    np.testing.assert_allclose(values, np.stack([row for _, row in rows]), rtol=1e-3)


def test_rows_of_other_metrics_are_read_by_name(tmp_path) -> None:
    with Journal(tmp_path, 1) as journal:
        journal.write("scalar", "host", t=1.0, values=[7])  # before any names
        journal.write("instant", "host-metrics", names=["steal", "of-later", "own_busy"])
        journal.write("scalar", "host", t=2.0, values=[0.25, 3, None])
        journal.write("scalar", "step", step=1)
    times, rows = read_host(tmp_path / "rank-00001.jsonl")
    assert times.tolist() == [2.0] and rows.shape == (1, len(METRICS))
    assert rows[0, list(METRICS).index("steal")] == 0.25
    assert np.isnan(np.delete(rows, list(METRICS).index("steal"))).all()


def test_a_system_that_does_not_count_is_not_sampled() -> None:
    with HostSampler(lambda: False) as sampler:
        assert not sampler.is_running and sampler.take() == []


def test_probes_take_time_of_the_processor() -> None:
    took = Probe().run()
    assert set(took) == {"probe_stream", "probe_random", "probe_compute"}
    assert min(took.values()) > 0
