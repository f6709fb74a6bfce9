"""One device under a bench: its name and peaks, and how long work on it takes."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from equipoise.comm.group import name_device
from equipoise.nn.device.clock import await_device
from equipoise.nn.measure import gemm_flop_per_s
from equipoise.spec.device.cuda import shipped_device
from equipoise.spec.device.spec import DeviceSpec

_LARGE = 8192


NO_DEVICE = "This machine has no CUDA device, so nothing was measured."


def run_here(measure: Callable[[torch.device], dict[str, Any]]) -> None:
    """Print what a bench measures on this machine's first device; exit with 2 where it has none."""
    if not torch.cuda.is_available():
        sys.stderr.write(f"{NO_DEVICE}\n")
        sys.exit(2)
    json.dump(measure(torch.device("cuda", 0)), sys.stdout, indent=1)


def known_device(device: torch.device) -> DeviceSpec | None:
    """The device of the table that this one is; None for others, and for a CPU."""
    return shipped_device(name_device(device))


def bf16_peak(device: torch.device, *, size: int = _LARGE) -> tuple[float, str]:
    """Peak rate of products in bf16 [FLOP/s], and where it is from."""
    known = known_device(device)
    if known is not None:
        return known.peak_flop_per_s("bf16"), f"datasheet of {known.name}"
    rate = gemm_flop_per_s(device, torch.bfloat16, size=size)
    return rate, f"a product of {size} x {size} x {size}, measured"


def device_facts(device: torch.device) -> dict[str, Any]:
    """What stands beside every figure of a device."""
    facts: dict[str, Any] = {"device": name_device(device), "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return facts


def call_s(
    call: Callable[[], object], device: torch.device, *, samples: int = 5, calls: int = 1
) -> list[float]:
    """Seconds of one call: ``samples`` of the mean of ``calls``, after as many to warm up.

    The device is waited for before and after each sample alone, so that short kernels follow each
    other as they do in a step.
    """
    taken = []
    for number in range(samples + 1):
        await_device(device)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        await_device(device)
        if number:
            taken.append((time.perf_counter() - begin) / calls)
    return taken
