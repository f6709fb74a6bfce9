"""What stands beside every figure: medians, spread, and what else the machine was doing."""

import os
import statistics
import time
from pathlib import Path
from typing import Any


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most of some measurements."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "runs": len(values),
    }


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def tree_ticks(pid: int) -> dict[int, int]:
    """A process and all that it started, each with its processor ticks so far."""
    times, children = dict[int, int](), dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        number = int(stat.parent.name)
        times[number] = sum(map(int, fields[11:15]))  # its own and its dead children's
        children.setdefault(int(fields[1]), []).append(number)
    ticks, left = dict[int, int](), [pid]
    while left:
        number = left.pop()
        ticks[number] = times.get(number, 0)
        left += children.get(number, [])
    return ticks


def tree_s(pid: int) -> float:
    """Processor seconds of a process and of all that it started, so far."""
    return sum(tree_ticks(pid).values()) / os.sysconf("SC_CLK_TCK")


class LoadStamp:
    """Share of the machine that others used while this process and its children worked."""

    def __init__(self) -> None:
        self._start = (_busy_s(), self._own_s(), time.perf_counter())

    @staticmethod
    def _own_s() -> float:
        return sum(os.times()[:4])

    def other_load(self, ranks_s: float = 0.0) -> float:
        """Cores that others kept busy, on average.

        Args:
            ranks_s: CPU seconds of ranks that a fork server started: they are nobody's
                children here, so this process's own times leave them out [s].
        """
        busy, own, wall = self._start
        others = (_busy_s() - busy) - (self._own_s() - own) - ranks_s
        return max(0.0, others / (time.perf_counter() - wall))


def environment() -> dict[str, Any]:
    """Machine and versions."""
    import torch

    from equipoise.observe.machine import describe_machine

    return describe_machine() | {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": torch.cpu._is_amx_tile_supported(),
    }
