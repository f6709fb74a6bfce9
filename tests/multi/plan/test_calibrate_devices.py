"""Calibration of devices, on ranks of a CPU whose queue stands in for a device's."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.comm.local import run_ranks
from equipoise.comm.measure import OPS, pair_samples
from equipoise.cost.kernel import attention_s, gemm_s
from equipoise.cost.link import collective_s, strided_group
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import own_cluster
from equipoise.spec.device.cuda import this_cuda
from equipoise.spec.device.file import DeviceFile, read_device_file, write_device_file
from equipoise.train.calibrate.devices import measure_devices
from equipoise.train.calibrate.plan import CalibrationPlan
from equipoise.train.calibrate.ranks import measure_kernels
from support.cuda.machine import PRODUCT, devices
from support.cuda.stand_in import target
from support.progresses import CountedStages
from support.small_plan import SMALL

PLAN = dataclasses.replace(
    SMALL,
    dtypes=("fp8", "bf16", "fp32"),
    sharings=(1, 2),
    units=(2, 64),
    pack_tokens=32,
    plain_tokens=16,
)


def measure(folder: Path, ranks: int, plan: CalibrationPlan = PLAN) -> DeviceFile:
    stages = CountedStages()
    measured = measure_devices(
        *(plan, devices(ranks), folder, stages), target=target(ranks), power_w=lambda title: None
    )
    assert stages.done == stages.total >= 4
    return measured


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> DeviceFile:
    return measure(tmp_path_factory.mktemp("disk"), 2)


def test_two_devices_give_a_whole_file_that_prices_what_was_measured(
    measured: DeviceFile, tmp_path: Path
) -> None:
    file = tmp_path / "this-cuda.json"
    write_device_file(file, measured)
    assert read_device_file(file) == measured
    assert measured.machine == PRODUCT and measured.memory_bytes == devices(1)[0].memory_bytes
    assert [dtype for dtype, _ in measured.peaks] == ["fp8", "bf16", "fp32"]
    assert len(measured.gemm) == 3 * 7
    # In bf16 units of 2 and 64 of 16 tokens, one document of 32; in fp32 documents of 16 alone.
    calls = [(p.dtype, p.tokens, p.units) for p in measured.attention if p.sharing == 1]
    assert calls == [
        *(("bf16", 16, 2), ("bf16", 16, 64), ("bf16", 32, 2)),
        ("fp32", 16, 2),
    ]
    assert {(point.op, point.ranks) for point in measured.collectives} == {(op, 2) for op in OPS}
    facts = measured.cuda
    assert facts is not None and (facts.devices, facts.reserved_bytes) == (2, 0)
    assert {(pair.block, pair.bytes) for pair in facts.pairs} == {(2, 1 << 10), (2, 1 << 12)}
    assert facts.host_cores >= 1 and facts.host_bytes_per_s.mid > 0

    device = this_cuda(file, devices(2))
    for point in measured.gemm:
        timing = gemm_s(device, point.m, point.n, point.k, point.dtype)
        assert float(timing.s) == pytest.approx(point.s.mid) and not timing.extrapolated
    for point in measured.attention:
        shape = {"heads": 2, "kv_heads": 2 // point.sharing, "head_width": point.head_width}
        packed = [point.tokens] * (point.units // 2)
        for backward, s in ((False, point.forward_s), (True, point.backward_s)):
            timing = attention_s(device, packed, dtype=point.dtype, backward=backward, **shape)
            assert timing.total_s == pytest.approx(s.mid)
    pair = strided_group(own_cluster(device, 2), 2, 1)
    for point in measured.collectives:
        assert float(collective_s(point.op, point.bytes, pair).s) == pytest.approx(point.s.mid)


def test_one_device_has_no_links(tmp_path: Path) -> None:
    one = measure(tmp_path, 1, dataclasses.replace(PLAN, dtypes=("bf16",)))
    assert one.cuda is not None and one.cuda.pairs == () == one.collectives
    write_device_file(tmp_path / "one.json", one)
    machine = Machine(own_cluster(this_cuda(tmp_path / "one.json", devices(1)), 1))
    assert machine.collective((0,))("all_reduce", 1e6) == 0.0


def test_every_pair_is_timed_once() -> None:
    rows = run_ranks(3, pair_samples, 1 << 10)
    assert set(rows[0]) == {(0, 1), (0, 2), (1, 2)}
    assert all(len(samples) == 7 and min(samples) > 0 for samples in rows[0].values())
    assert rows[0] == rows[1] == rows[2]


def test_ranks_of_new_interpreters_measure_too() -> None:
    """As those on CUDA devices are."""
    work = "bf16", PLAN.products("bf16", 32), []
    samples, spent_s = target(1, fresh=True).take(measure_kernels, work, 10.0)
    assert len(samples) == len(work[1]) and spent_s > 0
