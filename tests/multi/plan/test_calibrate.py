"""Calibration on real ranks: a whole device file, whose curves price what was measured."""

from pathlib import Path

import numpy as np
import pytest

from equipoise.comm.local import run_ranks
from equipoise.comm.measure import OPS, collective_samples
from equipoise.cost.kernel import attention_s, gemm_s, stream_s
from equipoise.cost.link import collective_s, strided_group
from equipoise.spec.cluster.link import LinkSpec
from equipoise.spec.cluster.spec import ClusterSpec, NodeClass, Tier
from equipoise.spec.device.file import read_device_file, write_device_file
from equipoise.spec.device.here import cpu_model, this_cpu
from equipoise.train.calibrate.measure import measure_machine
from support.devices.small_plan import SMALL
from support.progresses import CountedStages


def test_a_small_plan_gives_a_whole_file_that_prices_what_was_measured(tmp_path: Path) -> None:
    stages = CountedStages()
    found = measure_machine(SMALL, tmp_path, stages)
    assert stages.total == stages.done >= 7
    file = tmp_path / "this-cpu.json"
    write_device_file(file, found)
    assert read_device_file(file) == found
    assert [path.name for path in tmp_path.iterdir()] == ["this-cpu.json"]
    assert found.machine == cpu_model()
    assert found.seconds > 0
    assert 0 <= found.thin_points < 80
    assert len(found.gemm) == 2 * 7
    assert len(found.attention) == 2 * 2
    assert {point.op for point in found.collectives} == set(OPS)

    device = this_cpu(file)
    for point in found.gemm:
        timing = gemm_s(device, point.m, point.n, point.k, point.dtype)
        assert float(timing.s) == pytest.approx(point.s.mid)
        assert not timing.extrapolated
        assert 2 * point.m * point.n * point.k / point.s.mid <= device.peak_flop_per_s(point.dtype)
    assert gemm_s(device, 1024, 64, 64, "fp32").extrapolated
    for point in found.attention:
        for backward, s in ((False, point.forward_s), (True, point.backward_s)):
            timing = attention_s(
                device,
                [point.tokens],
                heads=4,
                kv_heads=2,
                head_width=16,
                dtype=point.dtype,
                backward=backward,
            )
            assert timing.total_s == pytest.approx(4 * s.mid)
    assert float(stream_s(device, found.stream.triad.mid).s) == pytest.approx(1.0)
    gloo = LinkSpec("gloo", 2e9, 0.5, 1e-4, "measured", str(file))
    node = NodeClass("this-cpu", device, 1, (Tier(2, gloo),), None, 0)
    pair = strided_group(ClusterSpec("here", (node,)), 2, 1)
    for point in found.collectives:
        if point.ranks == 2:
            timing = collective_s(point.op, point.bytes, pair)
            assert float(timing.s) == pytest.approx(point.s.mid)


def test_every_rank_has_the_same_samples_of_every_operation() -> None:
    for op in OPS:
        rows = run_ranks(3, collective_samples, op, 1 << 10)
        assert len(rows[0]) == 7
        assert np.array_equal(rows[0], rows[1])
        assert np.array_equal(rows[0], rows[2])
        assert min(rows[0]) > 0
