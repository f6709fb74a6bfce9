"""On a CUDA device: its calibration predicts kernels and steps that it did not measure."""

import dataclasses
import statistics
from pathlib import Path

import pytest
import torch

from equipoise.comm.measure import OPS
from equipoise.cost.kernel import attention_s, gemm_s
from equipoise.cost.step.request import StepOptions
from equipoise.nn.measure_kernels import (
    AttentionCall,
    Patience,
    attention_samples,
    gemm_samples,
    multiplies,
    sampler_on,
)
from equipoise.schedule.attention.price import LinkPrice
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import own_cluster
from equipoise.spec.device.cuda import this_cuda
from equipoise.spec.device.driver import CudaDevice, cuda_devices
from equipoise.spec.device.file import DeviceFile, write_device_file
from equipoise.spec.device.spec import DeviceSpec
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.calibrate.devices import measure_devices
from equipoise.train.calibrate.model import measure_parts
from equipoise.train.calibrate.parts_plan import PartsPlan
from equipoise.train.calibrate.plan import CalibrationPlan
from equipoise.train.calibrate.ranks import Target
from support.devices.trained_step import trained_step_s
from support.progresses import CountedStages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MODEL = ModelSpec(layers=7, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=8192, head_width=64)
"""Its number of layers is none of those that were timed."""

TOKENS, CONTEXT = 8192, 4096

PLAN = dataclasses.replace(
    CalibrationPlan.of_devices(),
    rows=(1024, 16_384),
    widths=(512, 4096),
    doc_tokens=(256, 2048, 8192),
    head_widths=(64,),
    sharings=(4,),
    units=(16, 128),
    plain_tokens=256,
    stream_elements=1 << 24,
    collective_bytes=(1 << 10, 1 << 24),
    disk_bytes=1 << 20,
)


def calibrated(
    folder: Path,
    shown: tuple[CudaDevice, ...],
    target: Target,
    model: ModelSpec = MODEL,
    plan: CalibrationPlan = PLAN,
) -> tuple[DeviceFile, DeviceSpec]:
    """What one device measures of its kernels, and of a model's parts; and what it is priced as."""
    measured = measure_devices(plan, shown, folder, CountedStages(), target=target)
    parts = measure_parts(
        PartsPlan(model, "bf16", TOKENS, CONTEXT, steps=5),
        *(LinkPrice(0.0, float("inf")), CountedStages(), target),
    )
    measured = dataclasses.replace(measured, parts=(parts,))
    file = folder / "this-cuda.json"
    write_device_file(file, measured)
    return measured, this_cuda(file, shown)


def predicted_step_s(device: DeviceSpec, lengths: list[int], model: ModelSpec = MODEL) -> float:
    """Seconds of the same step, by the parts of decoders of other depths."""
    options = StepOptions(CONTEXT, 1, precision="bf16")
    machine = Machine(own_cluster(device, 1))
    price = price_step(model, machine, Layout(zero=1), options, documents=[[lengths]])
    assert "launches" not in price.terms  # by timed parts
    return price.step_s


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceFile, DeviceSpec]:
    """Ranks start anew for each of its stages and ways of sharing: a minute in all."""
    return calibrated(tmp_path_factory.mktemp("one"), cuda_devices()[:1], Target.cuda(1))


def test_the_driver_and_torch_show_the_same_devices() -> None:
    shown = cuda_devices()
    assert len(shown) == torch.cuda.device_count()
    for at, each in enumerate(shown):
        assert each.title == torch.cuda.get_device_name(at)
        assert each.memory_bytes == torch.cuda.get_device_properties(at).total_memory


def test_the_file_holds_what_the_device_does(one: tuple[DeviceFile, DeviceSpec]) -> None:
    measured, device = one
    peaks = dict(measured.peaks)
    assert peaks["bf16"] > peaks["fp32"] > 0
    assert ("fp8" in peaks) == multiplies(torch.device("cuda", 0), "fp8")
    assert measured.cuda is not None and 0 < measured.cuda.reserved_bytes < 8 << 30
    assert device.usable_bytes < torch.cuda.get_device_properties(0).total_memory
    assert measured.stream.triad.mid > measured.cuda.host_bytes_per_s.mid


def test_kernels_between_the_measured_sizes_are_met(
    one: tuple[DeviceFile, DeviceSpec],
) -> None:
    _, device = one
    sampler, patience = sampler_on(torch.device("cuda", 0)), Patience()
    for m, n, k in ((3000, 1536, 2048), (8192, 1024, 2816)):
        taken = statistics.median(gemm_samples(sampler, ("bf16", m, n, k), patience))
        timing = gemm_s(device, m, n, k, "bf16")
        assert not timing.extrapolated
        assert 0.5 < float(timing.s) / taken < 2
    call = AttentionCall([1024] * 4, 16, 4, 64)
    both = attention_samples(sampler, "bf16", call, patience)
    for backward, samples in zip((False, True), both, strict=True):
        timing = attention_s(
            *(device, call.doc_tokens),
            heads=16,
            kv_heads=4,
            head_width=64,
            backward=backward,
        )
        assert not timing.extrapolated.any()
        assert 0.5 < timing.total_s / statistics.median(samples) < 2


@pytest.mark.parametrize("lengths", [[4096, 4096], [4096, *([256] * 16)], [1024] * 5])
def test_steps_that_were_not_measured_are_met(
    lengths: list[int], one: tuple[DeviceFile, DeviceSpec]
) -> None:
    _, device = one
    (taken_s,) = Target.cuda(1).run(trained_step_s, MODEL, lengths)
    ratio = predicted_step_s(device, lengths) / taken_s
    print(f"{lengths}: predicted over measured {ratio:.3f}")
    assert 0.67 < ratio < 1.5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_links_of_two_devices_are_measured(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, dtypes=("bf16",), doc_tokens=(256,))
    shown = cuda_devices()[:2]
    measured = measure_devices(plan, shown, tmp_path, CountedStages(), target=Target.cuda(2))
    assert {(point.op, point.ranks) for point in measured.collectives} == {(op, 2) for op in OPS}
    assert measured.cuda is not None and {pair.block for pair in measured.cuda.pairs} == {2}
    small, large = sorted(measured.cuda.pairs, key=lambda pair: pair.bytes)
    assert 0 < small.s.mid < large.s.mid
