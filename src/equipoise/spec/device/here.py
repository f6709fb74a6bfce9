"""``this-cpu``: one core of this machine as a device, calibrated or guessed.

Why
    The smallest cluster is the machine that runs the command, one rank per core. Measurements
    beat what its name promises, so a device file is used if there is one.

What it decides
    Where the device file is (``this-cpu.json`` in the cache), and what replaces a missing one:
    the core's clock times its vector width, and memory in equal shares.

Kept true (tests/unit/spec/device/test_by_name.py)
    A guess is marked as one; a device file of another machine or form is refused.
"""

import os
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.spec.device.cuda import calibrated_cuda
from equipoise.spec.device.file import DeviceFile, device_folder, read_device_file
from equipoise.spec.device.spec import THIS_CPU, DeviceSpec, Dtype

_GUESSED_HZ = 2.5e9
_GUESSED_BYTES_PER_S = 8e9
_CORE_POWER_W = 8.0
_INTERPRETER_BYTES = 300 << 20
"""Resident memory of a rank that has imported torch, before its first tensor."""

_GUESS = 'a guess; "equipoise calibrate" measures it'


def device_file() -> Path:
    """Where ``equipoise calibrate`` writes what it measured of cores, and ``this-cpu`` reads."""
    return device_folder() / f"{THIS_CPU}.json"


def cpu_model() -> str:
    """The processor's name and all cores of the machine, also those this process may not use."""
    name = next(iter(_cpuinfo("model name")), "processor")
    return f"{name}, {os.cpu_count()} cores"


def memory_share_bytes(shares: int | None = None) -> int:
    """One share of this machine's memory: one core's, unless ``shares`` are given."""
    pages = os.sysconf("SC_PHYS_PAGES") // (shares or len(os.sched_getaffinity(0)))
    return os.sysconf("SC_PAGE_SIZE") * pages


def this_cpu(file: Path | None = None) -> DeviceSpec:
    """One core of this machine.

    Args:
        file: A device file; the one in the cache unless given, and a guess if that is missing.

    Raises:
        SpecError: the file is not a device file, of another form, or of another machine.
    """
    path = device_file() if file is None else file
    if file is None and not path.exists():
        return _guess()
    known = read_device_file(path)
    if known.cuda is not None or known.machine != cpu_model():
        raise SpecError(
            f'{path} was measured on "{known.machine}" but this is "{cpu_model()}". Measure '
            f'this one: "equipoise calibrate".'
        )
    return calibrated_device(known, path)


def calibrated_device(known: DeviceFile, path: Path) -> DeviceSpec:
    """The device that a device file describes; its curves are read from the file."""
    if known.cuda is not None:
        return calibrated_cuda(known, known.cuda, path)
    source = f"equipoise calibrate, {known.date}, {known.other_load_cores:.1f} cores of other load"
    guess = _guess()
    return DeviceSpec(
        name=THIS_CPU,
        title=known.machine,
        peaks=known.peaks,
        memory_bytes=known.memory_bytes,
        reserved_bytes=guess.reserved_bytes,
        memory_bytes_per_s=known.stream.triad.mid,
        host_memory_bytes=known.memory_bytes,
        host_bytes_per_s=known.stream.copy.mid,
        host_memory_bytes_per_s=known.stream.triad.mid,
        power_w=guess.power_w,
        idle_power_w=guess.idle_power_w,
        host_power_w=guess.host_power_w,
        usd_per_hour=None,
        disk_read_bytes_per_s=known.disk_read_bytes_per_s.mid,
        disk_write_bytes_per_s=known.disk_write_bytes_per_s.mid,
        curve_file=path,
        sources=tuple(
            (key, source if key == "peaks" or key.endswith("bytes_per_s") else old)
            for key, old in guess.sources
        ),
    )


def _cpuinfo(key: str) -> list[str]:
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return []
    pairs = (line.partition(":") for line in file.read_text().splitlines())
    return [value.strip() for name, _, value in pairs if name.strip() == key]


def _guess() -> DeviceSpec:
    flags = set(next(iter(_cpuinfo("flags")), "").split())
    megahertz = [float(text) for text in _cpuinfo("cpu MHz")]
    hertz = 1e6 * max(megahertz) if megahertz else _GUESSED_HZ
    # Two fused multiply-adds per cycle on vectors of 16, 8 or 4 floats.
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    fp32 = hertz * lanes * 4
    bf16 = 16 * fp32 if "amx_bf16" in flags else 2 * fp32 if "avx512_bf16" in flags else fp32
    peaks: tuple[tuple[Dtype, float], ...] = (("bf16", bf16), ("fp32", fp32))
    memory_bytes = memory_share_bytes()
    system = "read from the operating system, over its cores"
    return DeviceSpec(
        name=THIS_CPU,
        title=cpu_model(),
        peaks=peaks,
        memory_bytes=memory_bytes,
        reserved_bytes=min(_INTERPRETER_BYTES, memory_bytes // 2),
        memory_bytes_per_s=_GUESSED_BYTES_PER_S,
        host_memory_bytes=memory_bytes,
        host_bytes_per_s=_GUESSED_BYTES_PER_S,
        host_memory_bytes_per_s=_GUESSED_BYTES_PER_S,
        power_w=_CORE_POWER_W,
        idle_power_w=_CORE_POWER_W / 4,
        host_power_w=0,
        usd_per_hour=None,
        sources=(
            ("peaks", f"clock x vector width: {_GUESS}"),
            ("memory_bytes", system),
            ("reserved_bytes", "resident memory of a rank that has imported torch"),
            ("memory_bytes_per_s", _GUESS),
            ("host_memory_bytes", system),
            ("host_bytes_per_s", _GUESS),
            ("host_memory_bytes_per_s", _GUESS),
            ("power_w", "a guess: 250 W over 32 cores"),
            ("idle_power_w", "a guess: a quarter of the most"),
            ("host_power_w", "in power_w"),
            ("usd_per_hour", "no public price"),
        ),
    )
