"""The clock that a rank's computing is measured by: one for prices and for the steps beside them.

What it decides
    On a CPU, processor time of the thread that computes: it stands still while the rank waits for
    a message, or while another program has the core, so a price that was measured beside others is
    the price of a step that runs alone. Threads that share one operator wait for each other
    busily, so one of them shows what all take. On an accelerator, where the host only asks, time
    on the wall between two moments at which the device has nothing left to do.

Kept true (tests/unit/nn/test_clock.py)
    Sleep and other threads do not count.
"""

import time
from collections.abc import Callable

import torch


def busy_clock(device: torch.device) -> Callable[[], float]:
    """Reads seconds of computing on a device; only differences mean anything."""
    if device.type != "cuda":
        return time.thread_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
