"""Sample this rank and its host once a second, on a thread of their own.

Why
    Whether a neighbour slowed a step can only be said from what the host did at that time.

What it decides
    A row is read each second and kept until it is taken; a run takes rows between steps, so only
    its own thread writes its journal. Small probes, some 1.5 ms a second in all, take time of the
    processor alone: a neighbour that uses up memory bandwidth makes them longer, one that takes
    the core does not.

Kept true (tests/unit/fault/interference/test_sampler.py)
    Rows come about a second apart; a sampler that is closed leaves no thread; where /proc lacks
    the counters nothing is started.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.fault.interference.metrics import is_known, rates, read_counters

_PERIOD_S = 1.0
_MOST_ROWS = 600
"""Rows that wait to be taken: ten minutes, longer than any step that still runs."""

_PROBE_BYTES = 8 << 20
"""Past the caches of one core [bytes]."""
_RANDOM_READS = 8192
_PRODUCT = 96
_PRODUCTS = 4


class Probe:
    """Three small pieces of work, timed in seconds of this thread's processor time."""

    def __init__(self) -> None:
        generator = np.random.Generator(np.random.Philox(0))
        # Ones, since pages of zeros that were never written share one page of memory.
        self._words = np.ones(_PROBE_BYTES // 8, dtype=np.int64)
        self._places = generator.integers(0, len(self._words), _RANDOM_READS)
        self._square = generator.standard_normal((_PRODUCT, _PRODUCT)).astype(np.float32)

    def run(self) -> dict[str, float]:
        """Seconds that each takes now."""
        marks = [time.thread_time()]
        self._words.sum()
        marks.append(time.thread_time())
        self._words.take(self._places)
        marks.append(time.thread_time())
        for _ in range(_PRODUCTS):
            np.einsum("ij,kj->ik", self._square, self._square)  # on this thread alone, unlike dot
        marks.append(time.thread_time())
        stream, random, compute = np.diff(marks).tolist()
        return {"probe_stream": stream, "probe_random": random, "probe_compute": compute}


class HostSampler:
    """Rows of ``METRICS``, one a second, with the time at which each ended."""

    def __init__(self, counts: Callable[[], bool] = is_known) -> None:
        """Start sampling; nothing starts where ``counts`` says that the system does not count."""
        self._rows: deque[tuple[float, Floats]] = deque(maxlen=_MOST_ROWS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-sampler", daemon=True)
        if counts():
            self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether rows come."""
        return self._thread.is_alive()

    def take(self) -> list[tuple[float, Floats]]:
        """Rows since the last call: unix seconds of a row's end, and float64 [metrics]."""
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        return rows

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        probe = Probe()
        before, at = read_counters(), time.monotonic()
        while True:
            asked_s = max(0.0, _PERIOD_S - (time.monotonic() - at))
            began = time.monotonic()
            if self._ended.wait(asked_s):
                return
            late_s = max(0.0, time.monotonic() - began - asked_s)
            probed = probe.run()
            after, now = read_counters(), time.monotonic()
            row = rates(before, {**after, **probed, "wake_late": late_s}, now - at)
            self._rows.append((time.time(), row))
            before, at = after, now
