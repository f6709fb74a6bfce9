"""The clock that measures a rank's computing, the same for prices and for the steps beside them.

What it decides
    On a CPU, the processor time of the computing thread: it stands still while the rank waits for
    a message or another program has the core, so prices measured on a busy machine hold for a step
    that runs alone. Threads that share one operator spin while they wait for each other, so one
    thread's time is the operator's. On an accelerator the host only launches kernels, so it is
    wall-clock time between two moments at which the device is idle.

Kept true (tests/unit/nn/test_clock.py)
    Neither sleep nor other threads count.
"""

import time
from collections.abc import Callable

import torch


def busy_clock(device: torch.device) -> Callable[[], float]:
    """A function that reads a device's computing time [s]; only differences mean anything."""
    if device.type != "cuda":
        return time.thread_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
