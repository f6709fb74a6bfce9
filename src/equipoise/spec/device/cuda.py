"""``this-cuda``: one CUDA device of this machine, as ``equipoise calibrate`` measured it.

What it decides
    Where its file is: one for each product, for machines with other devices may share a home.
    What was not measured comes from the table, if the device is in it: idle power, the host's
    power, and price. A device that nobody measured has no price at all, and is refused.

    Links of a node are told apart by what pairs of its devices measured: blocks whose pairs are
    alike, within ``_ALIKE``, are one *tier*.

Kept true (tests/unit/spec/device/test_cuda.py)
    A device that was not measured, or of another product, is refused; tiers grow, and none is
    faster than the one inside it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.spec.device.driver import CudaDevice, cuda_devices
from equipoise.spec.device.file import CudaFacts, DeviceFile, device_folder, read_device_file
from equipoise.spec.device.spec import THIS_CPU, THIS_CUDA, DeviceSpec
from equipoise.spec.device.table import DEVICES

_ALIKE = 1.5
"""Rates of pairs that differ by less are of one kind of link."""

_TITLES = {
    "H200": "h200",
    "H100 80GB HBM3": "h100-sxm",
    "A100-SXM4-80GB": "a100-80",
    "A100-SXM4-40GB": "a100-40",
    "V100-SXM2-32GB": "v100-32",
    "V100-SXM2-16GB": "v100-16",
}
"""What the driver calls a device, without its brand, and its name in the table of devices."""

_IDLE_SHARE = 0.1
"""Idle power over the most, of devices that are not in the table: as of an H100."""


def shipped_device(title: str) -> DeviceSpec | None:
    """The device of the table that a product is; None for any other.

    Args:
        title: What the driver, or torch, calls it.

    >>> shipped_device("NVIDIA A100-SXM4-80GB").name, shipped_device("NVIDIA H100 PCIe")
    ('a100-80', None)
    """
    name = _TITLES.get(re.sub(r"^(NVIDIA|Tesla) ", "", title.strip()))
    return None if name is None else DEVICES[name]


def cuda_file(title: str) -> Path:
    """Where ``equipoise calibrate`` writes what it measured of a product, and it is read.

    >>> cuda_file("NVIDIA H100 80GB HBM3").name
    'this-cuda-nvidia-h100-80gb-hbm3.json'
    """
    words = re.findall(r"[a-z0-9]+", title.casefold())
    return device_folder() / f"{'-'.join([THIS_CUDA, *words])}.json"


def one_product(devices: Sequence[CudaDevice]) -> str:
    """The product that all devices of this machine are.

    Raises:
        SpecError: there are no devices, or devices of several products.
    """
    titles = sorted({each.title for each in devices})
    if not titles:
        raise SpecError(
            f"{THIS_CUDA} names the CUDA devices of this machine, which has none that ranks would "
            f"compute on. Name a device of the table ({', '.join(DEVICES)}), or {THIS_CPU}."
        )
    if len(titles) > 1:
        raise SpecError(
            f"This machine has CUDA devices of {len(titles)} products ({', '.join(titles)}), and "
            f"{THIS_CUDA} is one. Show those of one product: CUDA_VISIBLE_DEVICES=0,1."
        )
    return titles[0]


def this_cuda(file: Path | None = None, devices: Sequence[CudaDevice] | None = None) -> DeviceSpec:
    """One CUDA device of this machine.

    Args:
        file: A device file; the one in the cache unless given.
        devices: Those of this machine; the driver's unless given.

    Raises:
        SpecError: no devices, devices of several products, none that was measured, or a file that
            is not a device file, of another form, or of another product.
    """
    shown = cuda_devices() if devices is None else devices
    title = one_product(shown)
    path = cuda_file(title) if file is None else file
    if file is None and not path.exists():
        raise SpecError(
            f"The CUDA devices of this machine ({len(shown)} of {title}) were never measured: "
            f'{path} is not there. Measure them: "equipoise calibrate".'
        )
    known = read_device_file(path)
    if known.cuda is None or known.machine != title:
        raise SpecError(
            f'{path} was measured on "{known.machine}", but the CUDA devices of this machine are '
            f'"{title}". Measure these: "equipoise calibrate".'
        )
    return calibrated_cuda(known, known.cuda, path)


def calibrated_cuda(known: DeviceFile, facts: CudaFacts, path: Path) -> DeviceSpec:
    """The device that a file of CUDA devices describes; its curves are read from the file."""
    load = f"{known.other_load_cores:.1f} cores of other load"
    measured = f"equipoise calibrate, {known.date}, {load}"
    driver = f"the driver, {known.date}"
    shipped = shipped_device(known.machine)
    of_host = facts.host_stream.triad.mid * facts.host_cores / facts.devices
    if facts.power_limit_w is not None:
        power_w, power = facts.power_limit_w, f"{driver}: the board's limit"
    elif shipped is not None:
        power_w, power = shipped.power_w, dict(shipped.sources)["power_w"]
    else:
        power_w, power = 0.0, "unknown: not in the table, and the driver names no limit"
    if shipped is not None:
        idle_w, host_w, usd = shipped.idle_power_w, shipped.host_power_w, shipped.usd_per_hour
        names = ("idle_power_w", "host_power_w", "usd_per_hour")
        idle, of_the_host, price = (dict(shipped.sources)[name] for name in names)
    else:
        idle_w, host_w, usd = _IDLE_SHARE * power_w, 0.0, None
        idle, of_the_host = f"a guess: {_IDLE_SHARE:.0%} of the most", "unknown: counted as 0"
        price = "no public price"
    return DeviceSpec(
        name=THIS_CUDA,
        title=known.machine,
        peaks=known.peaks,
        memory_bytes=known.memory_bytes,
        reserved_bytes=facts.reserved_bytes,
        memory_bytes_per_s=known.stream.triad.mid,
        host_memory_bytes=facts.host_memory_bytes,
        host_bytes_per_s=facts.host_bytes_per_s.mid,
        host_memory_bytes_per_s=of_host,
        power_w=power_w,
        idle_power_w=idle_w,
        host_power_w=host_w,
        usd_per_hour=usd,
        disk_read_bytes_per_s=known.disk_read_bytes_per_s.mid,
        disk_write_bytes_per_s=known.disk_write_bytes_per_s.mid,
        curve_file=path,
        sources=(
            ("peaks", measured),
            ("memory_bytes", driver),
            ("reserved_bytes", f"{driver}: held beside torch's allocator"),
            ("memory_bytes_per_s", measured),
            ("host_memory_bytes", "read from the operating system, over its devices"),
            ("host_bytes_per_s", measured),
            (
                "host_memory_bytes_per_s",
                f"{measured}: triad on {facts.host_cores} cores, over {facts.devices} devices",
            ),
            ("power_w", power),
            ("idle_power_w", idle),
            ("host_power_w", of_the_host),
            ("usd_per_hour", price),
        ),
    )


@dataclass(frozen=True, slots=True)
class CudaTier:
    """Blocks of neighbouring devices whose pairs are joined alike."""

    devices: int
    """How many a block has."""
    bytes_per_s: float
    """One message's rate between the slowest pair."""
    latency_s: float


def cuda_tiers(facts: CudaFacts) -> tuple[CudaTier, ...]:
    """The links inside a node by growing blocks, from messages of pairs; none of one device.

    >>> from equipoise.spec.device.file import PairPoint, Stream
    >>> from equipoise.spec.device.parts import Measured
    >>> def point(block, size, s):
    ...     return PairPoint(block, size, Measured(s, s, s))
    >>> rate = Measured(1e9, 1e9, 1e9)
    >>> pairs = [point(2, 1000, 1e-5), point(2, 10**9, 0.01)]
    >>> for block in (4, 8):
    ...     pairs += [point(block, 1000, 2e-5), point(block, 10**9, 0.1)]
    >>> facts = CudaFacts(8, 0, 1, rate, Stream(rate, rate, rate, rate), 8, tuple(pairs))
    >>> [(tier.devices, round(tier.bytes_per_s / 1e9)) for tier in cuda_tiers(facts)]
    [(2, 100), (8, 10)]
    """
    tiers: list[CudaTier] = []
    for block in sorted({each.block for each in facts.pairs}):
        points = sorted((p for p in facts.pairs if p.block == block), key=lambda p: p.bytes)
        first, last = points[0], points[-1]
        rate = last.bytes / last.s.mid
        if last.s.mid > first.s.mid:
            rate = (last.bytes - first.bytes) / (last.s.mid - first.s.mid)
        wait_s = first.s.mid
        if tiers:  # a wider block is never joined better than what lies inside
            rate, wait_s = min(rate, tiers[-1].bytes_per_s), max(wait_s, tiers[-1].latency_s)
            if tiers[-1].bytes_per_s < _ALIKE * rate:
                tiers.pop()
        tiers.append(CudaTier(block, rate, wait_s))
    return tuple(tiers)
