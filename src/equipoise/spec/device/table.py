"""The shipped devices, each number with its source."""

from equipoise.base.units import GIB, MIB
from equipoise.spec.device.later import LATER
from equipoise.spec.device.sourced import RESERVED_BYTES, device_sources
from equipoise.spec.device.spec import DeviceSpec, Dtype

_HOPPER_PEAKS: tuple[tuple[Dtype, float], ...] = (
    ("fp8", 1978.9e12),
    ("bf16", 989.4e12),
    ("fp16", 989.4e12),
    ("tf32", 494.7e12),
    ("fp32", 66.9e12),
)
_AMPERE_PEAKS: tuple[tuple[Dtype, float], ...] = (
    ("bf16", 312e12),
    ("fp16", 312e12),
    ("tf32", 156e12),
    ("fp32", 19.5e12),
)
_VOLTA_PEAKS: tuple[tuple[Dtype, float], ...] = (("fp16", 125e12), ("fp32", 15.7e12))

_DGX_H100 = (
    "NVIDIA DGX H100 datasheet: 2 TB of host memory and 10.2 kW for 8 GPUs; each of its two Xeon "
    "8480C has 8 channels of DDR5-4800"
)
_DGX_A100 = (
    "NVIDIA DGX A100 datasheet: 2 TB (80 GB) or 1 TB (40 GB) and 6.5 kW for 8 GPUs; each of its "
    "two EPYC 7742 has 8 channels of DDR4-3200"
)
_DGX_1 = (
    "NVIDIA DGX-1 datasheet: 512 GB of host memory at 2,133 MHz and 3.5 kW for 8 GPUs; each of its "
    "two Xeon E5-2698 v4 has 4 channels"
)

_CHANNEL_BYTES = 8
"""Bytes that a memory channel passes at a time."""

_TABLE = (
    DeviceSpec(
        name="h100-sxm",
        title="NVIDIA H100 SXM5 80 GB HBM3, 700 W",
        peaks=_HOPPER_PEAKS,
        memory_bytes=81_559 * MIB,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=3.35e12,
        host_memory_bytes=256 * 10**9,
        host_bytes_per_s=64e9,
        host_memory_bytes_per_s=16 * _CHANNEL_BYTES * 4800e6 / 8,
        power_w=700,
        idle_power_w=70,
        host_power_w=(10_200 - 8 * 700) / 8,
        usd_per_hour=55.04 / 8,
        sources=device_sources(
            sheet="NVIDIA H100 Tensor Core GPU datasheet (dense halves of the sparse figures)",
            host=_DGX_H100,
            price="AWS p5.48xlarge on demand, us-east-1, second half of 2025, over 8 GPUs",
        ),
    ),
    DeviceSpec(
        name="h100-sxm-500w",
        title="NVIDIA H100 SXM5 96 GB HBM2e, 500 W (Grand Teton)",
        peaks=_HOPPER_PEAKS,
        memory_bytes=97_871 * MIB,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=2.4e12,
        host_memory_bytes=256 * 10**9,
        host_bytes_per_s=64e9,
        host_memory_bytes_per_s=16 * _CHANNEL_BYTES * 4800e6 / 8,
        power_w=500,
        idle_power_w=70,
        host_power_w=(10_200 - 8 * 700) / 8,
        usd_per_hour=None,
        sources=device_sources(
            sheet="torchtitan benchmarks (96 GB HBM2e, 2.4 TB/s, 500 W); peaks as h100-sxm, "
            "which a card held to 500 W does not sustain",
            memory="torchtitan benchmarks: 96 GB, less what the driver keeps of an 80 GB card",
            host=_DGX_H100,
            price="no public price",
        ),
    ),
    DeviceSpec(
        name="h200",
        title="NVIDIA H200 SXM 141 GB HBM3e, 700 W",
        peaks=_HOPPER_PEAKS,
        memory_bytes=143_771 * MIB,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=4.8e12,
        host_memory_bytes=256 * 10**9,
        host_bytes_per_s=64e9,
        host_memory_bytes_per_s=16 * _CHANNEL_BYTES * 4800e6 / 8,
        power_w=700,
        idle_power_w=75,
        host_power_w=(10_200 - 8 * 700) / 8,
        usd_per_hour=63.296 / 8,
        sources=device_sources(
            sheet="NVIDIA H200 Tensor Core GPU datasheet",
            host=_DGX_H100,
            price="AWS p5en.48xlarge on demand, us-east-1, second half of 2025, over 8 GPUs",
        ),
    ),
    DeviceSpec(
        name="a100-80",
        title="NVIDIA A100 SXM4 80 GB HBM2e, 400 W",
        peaks=_AMPERE_PEAKS,
        memory_bytes=81_920 * MIB,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=2.039e12,
        host_memory_bytes=256 * 10**9,
        host_bytes_per_s=32e9,
        host_memory_bytes_per_s=16 * _CHANNEL_BYTES * 3200e6 / 8,
        power_w=400,
        idle_power_w=55,
        host_power_w=(6_500 - 8 * 400) / 8,
        usd_per_hour=27.447 / 8,
        sources=device_sources(
            sheet="NVIDIA A100 Tensor Core GPU datasheet",
            host=_DGX_A100,
            price="AWS p4de.24xlarge on demand, us-east-1, second half of 2025, over 8 GPUs",
        ),
    ),
    DeviceSpec(
        name="a100-40",
        title="NVIDIA A100 SXM4 40 GB HBM2, 400 W",
        peaks=_AMPERE_PEAKS,
        memory_bytes=40_960 * MIB,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=1.555e12,
        host_memory_bytes=128 * 10**9,
        host_bytes_per_s=32e9,
        host_memory_bytes_per_s=16 * _CHANNEL_BYTES * 3200e6 / 8,
        power_w=400,
        idle_power_w=50,
        host_power_w=(6_500 - 8 * 400) / 8,
        usd_per_hour=21.957 / 8,
        sources=device_sources(
            sheet="NVIDIA A100 Tensor Core GPU datasheet",
            host=_DGX_A100,
            price="AWS p4d.24xlarge on demand, us-east-1, second half of 2025, over 8 GPUs",
        ),
    ),
    DeviceSpec(
        name="v100-32",
        title="NVIDIA V100 SXM2 32 GB HBM2, 300 W",
        peaks=_VOLTA_PEAKS,
        memory_bytes=32_510 * MIB,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=0.9e12,
        host_memory_bytes=64 * 10**9,
        host_bytes_per_s=16e9,
        host_memory_bytes_per_s=8 * _CHANNEL_BYTES * 2133e6 / 8,
        power_w=300,
        idle_power_w=40,
        host_power_w=(3_500 - 8 * 300) / 8,
        usd_per_hour=31.212 / 8,
        sources=device_sources(
            sheet="NVIDIA V100 Tensor Core GPU datasheet",
            host=_DGX_1,
            price="AWS p3dn.24xlarge on demand, us-east-1, over 8 GPUs",
        ),
    ),
    DeviceSpec(
        name="v100-16",
        title="NVIDIA V100 SXM2 16 GB HBM2, 300 W",
        peaks=_VOLTA_PEAKS,
        memory_bytes=16_160 * MIB,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=0.9e12,
        host_memory_bytes=64 * 10**9,
        host_bytes_per_s=16e9,
        host_memory_bytes_per_s=8 * _CHANNEL_BYTES * 2133e6 / 8,
        power_w=300,
        idle_power_w=40,
        host_power_w=(3_500 - 8 * 300) / 8,
        usd_per_hour=24.48 / 8,
        sources=device_sources(
            sheet="NVIDIA V100 Tensor Core GPU datasheet",
            host=_DGX_1,
            price="AWS p3.16xlarge on demand, us-east-1, over 8 GPUs",
        ),
    ),
    DeviceSpec(
        name="mi250x",
        title="AMD Instinct MI250X, one of its two dies (GCD), 64 GB HBM2e",
        peaks=(("bf16", 191.5e12), ("fp16", 191.5e12), ("fp32", 47.85e12)),
        memory_bytes=64 * GIB,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=1.6384e12,
        host_memory_bytes=64 * GIB,
        host_bytes_per_s=36e9,
        host_memory_bytes_per_s=8 * _CHANNEL_BYTES * 3200e6 / 8,
        power_w=280,
        idle_power_w=45,
        host_power_w=0,
        usd_per_hour=None,
        sources=device_sources(
            sheet="AMD Instinct MI250X datasheet, halved: 383 TFLOP/s, 3.2768 TB/s, 560 W; "
            "xGMI to the host 36 GB/s (OLCF Frontier user guide)",
            memory="AMD Instinct MI250X datasheet, halved",
            host="OLCF Frontier user guide: 512 GiB in 8 channels of DDR4-3200 for 8 dies; no "
            "figure for the host's power",
            price="no public price",
            idle="rocm-smi at rest, about, halved",
        ),
    ),
)

DEVICES: dict[str, DeviceSpec] = {device.name: device for device in (*_TABLE, *LATER)}
"""Devices by name; ``this-cpu`` is made on request."""
