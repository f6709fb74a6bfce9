"""Devices of 2023 and later beside H100 and H200, each number with its source."""

from equipoise.base.units import GIB, MIB
from equipoise.spec.device.sourced import RESERVED_BYTES, device_sources
from equipoise.spec.device.spec import DeviceSpec, Dtype

_RESERVED = "as h100-sxm: a context with kernels, and the message library's buffers"
_IDLE_SHARE = 0.1
_IDLE = "a guess: a tenth of the board's power"
_NO_PRICE = "no public price"


def _sources(*, sheet: str, memory: str, host: str) -> tuple[tuple[str, str], ...]:
    return device_sources(
        sheet=sheet, memory=memory, host=host, reserved=_RESERVED, idle=_IDLE, price=_NO_PRICE
    )


def _device(
    name: str,
    title: str,
    peaks_tflops: tuple[tuple[Dtype, float], ...],
    *,
    memory_bytes: int,
    memory_bytes_per_s: float,
    power_w: float,
    host: tuple[float, float, float, float],
    sources: tuple[tuple[str, str], ...],
) -> DeviceSpec:
    """A device; ``host`` is its bytes, bytes/s to the device, bytes/s of its memory, and watts."""
    return DeviceSpec(
        name=name,
        title=title,
        peaks=tuple((dtype, 1e12 * rate) for dtype, rate in peaks_tflops),
        memory_bytes=memory_bytes,
        reserved_bytes=RESERVED_BYTES,
        memory_bytes_per_s=memory_bytes_per_s,
        host_memory_bytes=int(host[0]),
        host_bytes_per_s=host[1],
        host_memory_bytes_per_s=host[2],
        power_w=power_w,
        idle_power_w=_IDLE_SHARE * power_w,
        host_power_w=host[3],
        usd_per_hour=None,
        sources=sources,
    )


_CHANNEL_BYTES = 8
_DGX_H100 = (256e9, 64e9, 16 * _CHANNEL_BYTES * 4800e6 / 8, (10_200 - 8 * 700) / 8)
_DGX_H100_SOURCE = "as NVIDIA DGX H100: 2 TB of host memory, 2 x Xeon 8480C with DDR5-4800, 10.2 kW"
_NVL72 = "NVIDIA GB200 NVL72: 480 GB of LPDDR5X at 512 GB/s for each Grace and two GPUs"

LATER = (
    _device(
        "h800",
        "NVIDIA H800 SXM5 80 GB HBM3, 700 W: an H100 with less NVLink",
        (("fp8", 1978.9), ("bf16", 989.4), ("fp16", 989.4), ("tf32", 494.7), ("fp32", 66.9)),
        memory_bytes=81_559 * MIB,
        memory_bytes_per_s=3.35e12,
        power_w=700,
        host=_DGX_H100,
        sources=_sources(
            sheet="NVIDIA H100 datasheet, whose chip it is; FP64 and NVLink alone are less",
            memory="as h100-sxm",
            host=_DGX_H100_SOURCE,
        ),
    ),
    _device(
        "h20",
        "NVIDIA H20 SXM 96 GB HBM3, 400 W",
        (("fp8", 296), ("bf16", 148), ("fp16", 148), ("tf32", 74), ("fp32", 44)),
        memory_bytes=97_871 * MIB,
        memory_bytes_per_s=4.0e12,
        power_w=400,
        host=_DGX_H100,
        sources=_sources(
            sheet="NVIDIA HGX H20: 148 TFLOP/s in BF16, 4.0 TB/s, 400 W (willitrunai.com)",
            memory="96 GB, less what the driver keeps of an 80 GB card",
            host=_DGX_H100_SOURCE,
        ),
    ),
    _device(
        "b200",
        "NVIDIA B200 SXM 180 GB HBM3e, 1000 W",
        (("fp8", 4500), ("bf16", 2250), ("fp16", 2250), ("tf32", 1100), ("fp32", 75)),
        memory_bytes=180 * GIB,
        memory_bytes_per_s=7.7e12,
        power_w=1000,
        host=(250e9, 128e9, 16 * _CHANNEL_BYTES * 5600e6 / 8, (14_300 - 8 * 1000) / 8),
        sources=_sources(
            sheet="aiconfigurator-core 0.12.0, systems/b200_sxm.yaml, after NVIDIA's Blackwell "
            "datasheet (dense)",
            memory="aiconfigurator-core 0.12.0, systems/b200_sxm.yaml",
            host="NVIDIA DGX B200 datasheet: 2 TB, 2 x Xeon 8570 with DDR5-5600, 14.3 kW",
        ),
    ),
    _device(
        "b300",
        "NVIDIA B300 SXM 288 GB HBM3e, 1100 W",
        (("fp8", 4500), ("bf16", 2250), ("fp16", 2250), ("tf32", 1100), ("fp32", 75)),
        memory_bytes=268 * GIB,
        memory_bytes_per_s=8e12,
        power_w=1100,
        host=(250e9, 128e9, 16 * _CHANNEL_BYTES * 6400e6 / 8, (14_000 - 8 * 1100) / 8),
        sources=_sources(
            sheet="NVIDIA DGX B300 datasheet: 72 PFLOP/s in FP8 (36 dense) and 64 TB/s for 8 GPUs; "
            "other dense peaks as b200",
            memory="NVIDIA DGX B300 datasheet: 2.3 TB for 8 GPUs, 288 GB each",
            host="NVIDIA DGX B300 datasheet: 2 TB, 2 x Xeon 6776P with DDR5-6400, about 14 kW",
        ),
    ),
    _device(
        "gb200",
        "NVIDIA GB200, one of its two GPUs, 186 GB HBM3e, 1200 W",
        (("fp8", 5000), ("bf16", 2500), ("fp16", 2500), ("tf32", 1250), ("fp32", 80)),
        memory_bytes=189_471 * MIB,
        memory_bytes_per_s=8e12,
        power_w=1200,
        host=(240e9, 225e9, 256e9, (120_000 - 72 * 1200) / 72),
        sources=_sources(
            sheet="aiconfigurator-core 0.12.0, systems/gb200.yaml, after NVIDIA's Blackwell "
            "datasheet (dense); NVLink-C2C 900 GB/s both ways for two GPUs",
            memory="aiconfigurator-core 0.12.0, systems/gb200.yaml: nvidia-smi",
            host=f"{_NVL72}; about 120 kW a rack",
        ),
    ),
    _device(
        "gb300",
        "NVIDIA GB300, one of its two GPUs, 278 GB HBM3e, 1400 W",
        (("fp8", 5000), ("bf16", 2500), ("fp16", 2500), ("tf32", 1250), ("fp32", 80)),
        memory_bytes=284_208 * MIB,
        memory_bytes_per_s=8e12,
        power_w=1400,
        host=(240e9, 225e9, 256e9, (132_000 - 72 * 1400) / 72),
        sources=_sources(
            sheet="aiconfigurator-core 0.12.0, systems/gb300.yaml, after NVIDIA's Blackwell Ultra "
            "datasheet (dense); NVLink-C2C 900 GB/s both ways for two GPUs",
            memory="aiconfigurator-core 0.12.0, systems/gb300.yaml: nvidia-smi",
            host=f"{_NVL72}; about 132 kW a rack",
        ),
    ),
    _device(
        "l40s",
        "NVIDIA L40S 48 GB GDDR6, 350 W",
        (("fp8", 733), ("bf16", 362.05), ("fp16", 362.05), ("tf32", 183), ("fp32", 91.6)),
        memory_bytes=46_068 * MIB,
        memory_bytes_per_s=0.864e12,
        power_w=350,
        host=(128e9, 32e9, 16 * _CHANNEL_BYTES * 4800e6 / 8, 350),
        sources=_sources(
            sheet="NVIDIA L40S datasheet (dense halves of the sparse figures)",
            memory="aiconfigurator-core 0.12.0, systems/l40s.yaml: nvidia-smi",
            host="a guess: 1 TB, two processors with DDR5-4800 and 2.8 kW for 8 GPUs",
        ),
    ),
    _device(
        "mi300x",
        "AMD Instinct MI300X 192 GB HBM3, 750 W",
        (("fp8", 2614.9), ("bf16", 1307.4), ("fp16", 1307.4), ("tf32", 653.7), ("fp32", 163.4)),
        memory_bytes=192 * GIB,
        memory_bytes_per_s=5.3e12,
        power_w=750,
        host=(256e9, 64e9, 24 * _CHANNEL_BYTES * 4800e6 / 8, 500),
        sources=_sources(
            sheet="AMD Instinct MI300X datasheet",
            memory="AMD Instinct MI300X datasheet",
            host="a guess: 2 TB, two EPYC 9004 with 12 channels of DDR5-4800, 4 kW for 8 GPUs",
        ),
    ),
    _device(
        "mi355x",
        "AMD Instinct MI355X 288 GB HBM3E, 1400 W",
        (("fp8", 5033.2), ("bf16", 2516.6), ("fp16", 2516.6), ("fp32", 157.3)),
        memory_bytes=288 * GIB,
        memory_bytes_per_s=8e12,
        power_w=1400,
        host=(384e9, 64e9, 24 * _CHANNEL_BYTES * 6400e6 / 8, 500),
        sources=_sources(
            sheet="AMD Instinct MI355X datasheet (dense halves of the sparse figures)",
            memory="AMD Instinct MI355X datasheet",
            host="a guess: 3 TB, two EPYC 9005 with 12 channels of DDR5-6400, 4 kW for 8 GPUs",
        ),
    ),
)
"""In the order in which tables list them."""
