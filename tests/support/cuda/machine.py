"""A machine with CUDA devices, for tests on one without: its driver's words and its device file."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from equipoise.spec.device.cuda import cuda_file
from equipoise.spec.device.driver import CudaDevice
from equipoise.spec.device.file import (
    AttentionPoint,
    CollectivePoint,
    CudaFacts,
    DeviceFile,
    GemmPoint,
    PairPoint,
    Stream,
    write_device_file,
)
from support.device_files import about

PRODUCT = "NVIDIA H200"

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

_READS_DRIVER = (
    "equipoise.spec.device.driver",
    "equipoise.spec.device.cuda",
    "equipoise.spec.device.by_name",
    "equipoise.observe.machine",
)
"""Modules that ask the driver."""


def devices(count: int, title: str = PRODUCT) -> tuple[CudaDevice, ...]:
    return (CudaDevice(title, 140 << 30),) * count


def facts(count: int, near: int | None = None) -> CudaFacts:
    """Pairs inside blocks of ``near`` devices pass 100 GB/s, the others 10."""
    blocks = [1 << power for power in range(1, count.bit_length()) if count % (1 << power) == 0]
    pairs = []
    for block in sorted({*blocks, count} - {1}):
        rate = 100e9 if block <= (near or count) else 10e9
        pairs += [PairPoint(block, size, about(1e-5 + size / rate)) for size in (1 << 10, 1 << 30)]
    stream = Stream(*[about(20e9)] * 4)
    return CudaFacts(count, 1 << 30, 64 << 30, about(50e9), stream, 16, tuple(pairs), 650.0)


def cuda_device_file(count: int, near: int | None = None, title: str = PRODUCT) -> DeviceFile:
    peaks = (("fp8", 1e15), ("bf16", 6e14), ("fp32", 5e13))
    return DeviceFile(
        form=1,
        machine=title,
        date="2026-01-02",
        torch="2.13.0",
        seconds=90.0,
        other_load_cores=0.5,
        thin_points=0,
        memory_bytes=140 << 30,
        peaks=peaks,
        stream=Stream(*[about(4e12)] * 4),
        disk_read_bytes_per_s=about(5e9),
        disk_write_bytes_per_s=about(3e9),
        gemm=tuple(
            GemmPoint(dtype, m, n, k, about(5e-6 + 2.0 * m * n * k / peak))
            for dtype, peak in peaks
            for m in (16, 32_768)
            for n in (64, 65_536)
            for k in (64, 65_536)
        ),
        attention=tuple(
            AttentionPoint(
                *("bf16", tokens, width),
                about(1e-5 + 1e-15 * width * tokens**2 * units),
                about(2e-5 + 3e-15 * width * tokens**2 * units),
                *(sharing, units),
            )
            for width in (16, 128)
            for sharing in (1, 8)
            for tokens in (16, 65_536)
            for units in (8, 2048)
        ),
        collectives=tuple(
            CollectivePoint(op, ranks, size, about(2e-5 + size / 90e9))
            for op in OPS
            for ranks in sorted({2, count} - {1})
            for size in (1 << 10, 1 << 30)
            if count > 1
        ),
        cuda=facts(count, near),
    )


def show_devices(patch: pytest.MonkeyPatch, shown: Iterable[CudaDevice]) -> None:
    """Let the driver of this machine show devices."""
    kept = tuple(shown)
    for module in _READS_DRIVER:
        patch.setattr(f"{module}.cuda_devices", lambda: kept)


def calibrated_machine(patch: pytest.MonkeyPatch, home: Path, count: int) -> Path:
    """Let this machine have devices that were measured; their file."""
    patch.setenv("HOME", str(home))
    show_devices(patch, devices(count))
    write_device_file(cuda_file(PRODUCT), cuda_device_file(count))
    return cuda_file(PRODUCT)
