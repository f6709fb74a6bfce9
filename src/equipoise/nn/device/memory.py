"""The memory that this rank's tensors lie in: the process's own, or its device's allocator.

What it decides
    On a CPU what the process holds; on an accelerator what torch's allocator has given to tensors.
    What a CUDA context and NCCL hold beside it is in no forecast of a run: it is
    ``DeviceSpec.reserved_bytes``.

Kept true (tests/unit/nn/device/test_memory.py)
    A tensor's bytes are in what is held and in the peak, until the peak is forgotten.
"""

import torch

from equipoise.cost.memory.overhead import CPU_OVERHEAD, DeviceOverhead
from equipoise.observe import machine


def held_bytes(device: torch.device) -> int:
    """Memory held now [bytes]."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return machine.resident_bytes()


def peak_bytes(device: torch.device) -> int:
    """The most that was held since ``forget_peak`` [bytes]."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return machine.peak_resident_bytes()


def forget_peak(device: torch.device) -> None:
    """Let the peak begin with what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        machine.forget_peak()


def beside_bytes(device: torch.device) -> int:
    """Memory of a device in use outside of torch's allocator; 0 on a CPU [bytes].

    It is the context's, NCCL's and other programs'.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def overhead_of(device: torch.device) -> DeviceOverhead:
    """What is held beside the bytes that a forecast counts: an allocator counts tensors alone."""
    return DeviceOverhead() if device.type == "cuda" else CPU_OVERHEAD
