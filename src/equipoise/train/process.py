"""What a training process sets for itself before it computes."""

import ctypes
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from equipoise.observe.machine import usable_cores

_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = 1, -1, -2, -3
"""Numbers of glibc's malloc.h."""

_LEAST_CHUNK, _LARGEST_SLIVER = 32, 176
"""Bytes of a chunk of glibc's: the smallest, and two slivers of neighbours merged."""

_SPARES = 2000
"""Chunks of each size; more than small objects of a layer's forward and backward."""


def return_freed_memory() -> None:
    """Hand what is free in the allocator back, so that a peak counts what comes after."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def keep_freed_memory() -> None:
    """Make the allocator reuse what activations free instead of returning it.

    By default glibc maps and unmaps every large tensor, and the kernel zeroes each page again
    at its first touch: 50,000 page faults a step for a 7M decoder, a tenth of its time.
    Small freed chunks are merged at once: an aligned tensor leaves a sliver behind it, and
    a sliver that waits in a list of its own keeps the tensor's place from being used again
    (the launcher switches off the other such list, ``launch.agent.ALLOCATOR``).

    Elsewhere than on glibc nothing is done.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MXFAST, 0)
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(_M_TOP_PAD, 16 << 20)


def spare_small_chunks() -> None:
    """Give the allocator free chunks for small objects, so that they leave slivers alone.

    glibc 2.36 cuts an aligned tensor out of a larger chunk and frees what is left as slivers
    beside it (``_int_memalign``). A small object that settles in one keeps the places of the
    tensors on both sides from being merged when these are freed, so that larger ones go
    elsewhere: a 2M decoder's rank touched half as much again as it ever held. Small chunks are
    used oldest first, so a sliver waits behind all these spares, and is merged by then.

    Once, before the first step: 2.8 MB. Elsewhere than on glibc nothing is done.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    spares = []
    for chunk in range(_LEAST_CHUNK, _LARGEST_SLIVER + 1, 16):
        for _ in range(_SPARES):
            spares.append(libc.malloc(chunk - 8))
            libc.malloc(_LEAST_CHUNK - 8)  # is kept, so that spares are not merged
    for spare in spares:
        libc.free(spare)


def settle(local_rank: int, *, pin: bool) -> None:
    """One thread a rank, reused memory and, when asked, a core of its own.

    All threads of the process move there, also those that its process group began with.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    if pin:
        cores = usable_cores()
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(int(thread.name), {cores[local_rank % len(cores)]})


class StopRequest:
    """Set by SIGINT or SIGTERM: finish the step, save, leave."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked.set()

    def __bool__(self) -> bool:
        return self._asked.is_set()
