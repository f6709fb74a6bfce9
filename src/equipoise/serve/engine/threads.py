"""Threads that compute: given back by who will not compute any more, and fewer beside others.

Why
    GNU's OpenMP lets idle threads wait actively only while there are no more of them than cores. A
    pool that the thread which built an engine leaves behind makes every parallel region of the
    engine's own thread wait for the kernel: 95 us a region instead of 17, measured on two cores.

    All threads of a region wait for the last one. If another process has its core, that is until
    the kernel takes the core away again, milliseconds, and an iteration has hundreds of regions:
    beside busy processes a token took 1.2 s on two threads and 0.04 s on one, on two cores.

What it decides
    As many threads as cores are left by what others use, rounded; a look every half second.

Kept true (tests/unit/serve/engine/test_threads.py)
    Threads follow the load down and up, and do not change between the two.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable

import torch

from equipoise.observe.machine import OtherLoad

_LIBRARY = "libgomp.so.1"
_SOFT = 1
"""Resources are made again when they are needed: ``omp_pause_soft``."""

_SPAN_S = 0.5
"""Time over which others' load is averaged [s]."""

_DOWN, _UP = -0.25, 0.15
"""Added to the load before it is rounded: a core is given up from 0.75 on, and used below 0.35."""


def release_threads() -> None:
    """Give back the calling thread's pool, if this torch computes with GNU's OpenMP."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(_LIBRARY).omp_pause_resource_all(_SOFT)


class SharedCores:
    """How many threads the calling thread computes with beside other processes."""

    def __init__(
        self,
        most: int,
        *,
        load: Callable[[], OtherLoad] = OtherLoad,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with all threads, and to watch others.

        Args:
            most: Threads where nobody else computes.
            load: Begins to watch.
            clock: Seconds.
        """
        self.threads = self._most = most
        self._watch, self._clock = load, clock
        self._load, self._begin_s = load(), clock()

    def follow(self) -> bool:
        """Set the calling thread's threads; whether others leave it all cores."""
        now_s = self._clock()
        if now_s - self._begin_s >= _SPAN_S:
            cores = max(0.0, self._load.cores)
            fewer, more = (max(1, self._most - round(cores + each)) for each in (_DOWN, _UP))
            self.threads = fewer if fewer < self.threads else max(self.threads, more)
            self._load, self._begin_s = self._watch(), now_s
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        return self.threads == self._most
