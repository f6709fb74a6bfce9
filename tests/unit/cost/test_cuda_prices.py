"""Prices of ``this-cuda`` are what its file says, with nothing fitted elsewhere."""

from pathlib import Path

import pytest

from equipoise.cost.curves.sources import sources_of
from equipoise.cost.kernel import attention_s, gemm_s, stream_s
from equipoise.cost.link import collective_s, strided_group
from equipoise.cost.offload import copy_bytes_per_s
from equipoise.cost.read_curve import device_curve
from equipoise.cost.step.request import Residuals, residuals_of
from equipoise.spec.cluster.spec import own_cluster
from equipoise.spec.device.cuda import this_cuda
from equipoise.spec.device.spec import DeviceSpec
from support.cuda.machine import cuda_device_file, devices
from support.device_files import written

FILE = cuda_device_file(8)


@pytest.fixture
def device(tmp_path: Path) -> DeviceSpec:
    return this_cuda(written(tmp_path, FILE), devices(8))


def test_every_point_of_the_file_is_met(device: DeviceSpec) -> None:
    for point in FILE.gemm:
        timing = gemm_s(device, point.m, point.n, point.k, point.dtype)
        assert float(timing.s) == pytest.approx(point.s.mid)
        assert not timing.extrapolated
    for point in FILE.attention:
        for backward, s in ((False, point.forward_s), (True, point.backward_s)):
            heads = 8
            documents = point.units // heads
            timing = attention_s(
                *(device, [point.tokens] * documents),
                heads=heads,
                kv_heads=heads // point.sharing,
                head_width=point.head_width,
                backward=backward,
            )
            assert timing.total_s == pytest.approx(s.mid)
            assert not timing.extrapolated.any()
    group = strided_group(own_cluster(device, 8), 8, 1)
    pair = strided_group(own_cluster(device, 8), 2, 1)
    for point in FILE.collectives:
        timing = collective_s(point.op, point.bytes, group if point.ranks == 8 else pair)
        assert float(timing.s) == pytest.approx(point.s.mid)
        assert not timing.extrapolated


def test_rates_that_were_measured_are_not_taken_for_peaks(device: DeviceSpec) -> None:
    # Three microseconds to launch; then STREAM's own rate.
    assert float(stream_s(device, 4e12).s) == pytest.approx(1.0 + 3e-6)
    assert copy_bytes_per_s(device) == 50e9
    assert residuals_of(device) == Residuals()


def test_beyond_the_innermost_link_nothing_was_measured(tmp_path: Path) -> None:
    apart = cuda_device_file(8, near=2)
    device = this_cuda(written(tmp_path, apart), devices(8))
    cluster = own_cluster(device, 8)
    near, far = (collective_s("all_reduce", 1 << 30, strided_group(cluster, 2, s)) for s in (1, 2))
    assert not near.extrapolated and far.extrapolated
    assert float(far.s) > 5 * float(near.s)


def test_sources_name_the_measurement(device: DeviceSpec) -> None:
    found = sources_of(own_cluster(device, 8), "bf16")
    measured = "equipoise calibrate, 2026-01-02, 0.5 cores of other load"
    for what in ("matrix products", "attention", "collectives over this-cuda of 8"):
        assert found[what] == measured
    assert found["node"] == "this machine, one rank a CUDA device"
    assert "under load" not in found


def test_a_trainer_elsewhere_reads_the_file(tmp_path: Path) -> None:
    curve = device_curve("llama3-8b", written(tmp_path, FILE))
    assert curve.measured and curve.peak_flop_per_s == 6e14
