"""A small device file for tests."""

from pathlib import Path

from equipoise.spec.device.file import (
    AttentionPoint,
    CollectivePoint,
    DeviceFile,
    GemmPoint,
    Stream,
    write_device_file,
)
from equipoise.spec.device.parts import Measured


def about(value: float) -> Measured:
    return Measured(value, 0.98 * value, 1.03 * value)


A_FILE = DeviceFile(
    form=1,
    machine="Abacus, 2 cores",
    date="2026-01-02",
    torch="2.13.0",
    seconds=41.5,
    other_load_cores=0.5,
    thin_points=0,
    memory_bytes=8 << 30,
    peaks=(("fp32", 1e11),),
    stream=Stream(about(10e9), about(10e9), about(12e9), about(12e9)),
    disk_read_bytes_per_s=about(5e8),
    disk_write_bytes_per_s=about(3e8),
    gemm=tuple(
        GemmPoint("fp32", m, n, k, about(1e-6 + 2.0 * m * n * k / 1e11))
        for m in (16, 256)
        for n in (16, 256)
        for k in (16, 256)
    ),
    attention=tuple(
        AttentionPoint("fp32", tokens, 32, about(1e-9 * tokens**2), about(3e-9 * tokens**2))
        for tokens in (64, 512)
    ),
    collectives=tuple(
        CollectivePoint(op, 2, size, about(1e-4 + size / 1e9))
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
        for size in (1 << 10, 1 << 22)
    ),
)


def written(folder: Path, device: DeviceFile) -> Path:
    file = folder / "device.json"
    write_device_file(file, device)
    return file
