"""The CUDA devices of this machine, as its driver reports them, without torch.

Why
    What prices ``this-cuda`` must know its devices, and may not import torch.

What it decides
    Devices are those that a rank started here would compute on: what the driver shows of
    ``CUDA_VISIBLE_DEVICES``, and none if the installed torch is built without CUDA, or with a newer
    one than the driver has. The driver reads that variable once in a process, so it is asked once.
    No context is made on a device.

Kept true (tests/unit/spec/device/test_driver.py)
    Names and bytes are the driver's; where it fails, or torch could not use it, there is no device.

Sources
    CUDA Driver API: ``cuInit``, ``cuDriverGetVersion``, ``cuDeviceGetCount``, ``cuDeviceGetName``,
    ``cuDeviceTotalMem``. ``torch/version.py`` names the CUDA that torch was built with; drivers of
    its major version have all that it needs (CUDA Compatibility, minor versions).
"""

import ctypes
import functools
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One device, as the driver reports it."""

    title: str
    """The product's name."""
    memory_bytes: int


@functools.cache
def cuda_devices() -> tuple[CudaDevice, ...]:
    """The devices that ranks of this machine compute on; none where they compute on cores."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    built = torch_cuda(_torch_version_file())
    return () if built is None else read_driver(driver, built)


def read_driver(driver: Any, least: int = 0) -> tuple[CudaDevice, ...]:
    """The devices that a driver shows; none if it fails or is too old.

    Args:
        driver: The driver's library, as ``ctypes`` loads it.
        least: Major version of CUDA that it must have.
    """
    count, version = ctypes.c_int(), ctypes.c_int()
    if (
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGetCount(ctypes.byref(count))
        or version.value // 1000 < least
    ):
        return ()
    devices = []
    for ordinal in range(count.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        if (
            driver.cuDeviceGet(ctypes.byref(device), ordinal)
            or driver.cuDeviceGetName(name, _NAME_BYTES, device)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        ):
            return ()
        devices.append(CudaDevice(name.value.decode(errors="replace").strip(), size.value))
    return tuple(devices)


def torch_cuda(version: Path | None) -> int | None:
    """The major version of CUDA that a torch was built with; None without CUDA.

    Args:
        version: Its ``version.py``; None where torch is not installed, which asks for no version.
    """
    if version is None:
        return 0
    try:
        text = version.read_text(encoding="utf-8")
    except OSError:
        return None
    named = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)", text, re.MULTILINE)
    return None if named is None else int(named[1])


def _torch_version_file() -> Path | None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("version.py")


def power_limit_w(title: str, program: str = "nvidia-smi") -> float | None:
    """The lowest power limit of a product's boards in this machine [W]; None if nobody says.

    Args:
        title: The product.
        program: What is asked.
    """
    words = [program, "--query-gpu=name,power.limit", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    limits = []
    for line in asked.stdout.splitlines():
        name, _, limit = line.rpartition(",")
        with suppress(ValueError):  # "[N/A]"
            limits += [float(limit)] * (name.strip() == title)
    return min(limits, default=None)
