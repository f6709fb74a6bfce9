"""What a rank and its host did within a second, read from /proc.

Why
    A rank on a shared host may be slow through no fault of its own: others take its core, its
    share of memory bandwidth, its disk or its network. Their traces are in counters that the
    kernel keeps anyway, and a few numbers are probed: how long the same small piece of work
    takes this second.

What it decides
    ``METRICS``: the metrics of a row in their order, each with the resource that it speaks of.
    Shares of processors are per core, so that hosts of any size compare. A counter that this
    kernel lacks is NaN.

Kept true (tests/unit/fault/interference/test_metrics.py)
    A row has a number for each metric; what a process itself does shows in its own metrics.

Sources
    proc(5); pressure stall information: Documentation/accounting/psi.rst of Linux. The choice
    of metrics follows CloudFormer, arXiv:2509.03394, as far as /proc has them.
"""

import math
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.observe.machine import process_delay_s

Resource = Literal["cpu", "memory", "disk", "network"]
RESOURCES: tuple[Resource, ...] = ("cpu", "memory", "disk", "network")

METRICS: dict[str, Resource] = {
    # This rank's process.
    "own_busy": "cpu",
    "own_system": "cpu",
    "own_delay": "cpu",
    "own_forced": "cpu",
    "own_yields": "network",
    "own_faults": "memory",
    "own_major": "disk",
    "own_read": "disk",
    "own_written": "disk",
    # Probes in this process: seconds that a fixed piece of work takes.
    "wake_late": "cpu",
    "probe_compute": "cpu",
    "probe_stream": "memory",
    "probe_random": "memory",
    # The host. ``seat``: the cores that this process may run on, less what it ran itself.
    "seat_others": "cpu",
    "others_busy": "cpu",
    "user": "cpu",
    "system": "cpu",
    "softirq": "network",
    "iowait": "disk",
    "steal": "cpu",
    "switches": "cpu",
    "interrupts": "network",
    "forks": "cpu",
    "running": "cpu",
    "blocked": "disk",
    "cpu_stall": "cpu",
    "memory_stall": "memory",
    "memory_full": "memory",
    "io_stall": "disk",
    "io_full": "disk",
    "faults": "memory",
    "allocated": "memory",
    "reclaimed": "memory",
    "available": "memory",
    "dirty": "disk",
    "writeback": "disk",
    "disk_reads": "disk",
    "disk_read": "disk",
    "disk_writes": "disk",
    "disk_written": "disk",
    "disk_busy": "disk",
    "disk_queue": "disk",
    "disk_flushes": "disk",
    "loop_bytes": "network",
    "loop_packets": "network",
    "link_bytes": "network",
    "link_packets": "network",
    "received": "network",
}
"""Metrics in the order of a row: shares [s/s per core], rates [1/s, bytes/s], probes [s]."""

_GAUGES = frozenset({"running", "blocked", "available", "dirty", "writeback"})
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_PROC = Path("/proc")
_SECTOR_BYTES = 512


def is_known() -> bool:
    """Whether this system has the counters without which no row says anything."""
    return (_PROC / "stat").exists() and (_PROC / "self/schedstat").exists()


def read_counters() -> dict[str, float]:
    """Counters and gauges of this process and this host, as they stand now."""
    # The system's faults before its own ones, and nothing between: what reading costs is in both.
    return _memory() | _own() | _stat() | _pressure() | _disks() | _network()


def rates(before: Mapping[str, float], after: Mapping[str, float], span_s: float) -> Floats:
    """A row of ``METRICS`` from two readings ``span_s`` apart, float64 [metrics]; NaN if unknown.

    Probes and ``wake_late`` are read as they are in ``after``.
    """
    cores = max(1.0, after.get("cores", 1.0))
    seat = max(1.0, after.get("seat_cores", 1.0))

    def rate(name: str) -> float:
        if name in _GAUGES or name.startswith("probe_") or name == "wake_late":
            return after.get(name, math.nan)
        return (after.get(name, math.nan) - before.get(name, math.nan)) / span_s

    values = {name: rate(name) for name in METRICS}
    busy, seat_busy = rate("busy"), rate("seat_busy")
    values["others_busy"] = max(0.0, busy - values["own_busy"]) / cores
    values["seat_others"] = max(0.0, seat_busy - values["own_busy"]) / seat
    for name in ("user", "system", "softirq", "iowait", "steal", "switches", "interrupts"):
        values[name] /= cores
    for name in ("running", "blocked"):
        values[name] /= cores
    return np.array([values[name] for name in METRICS])


def _lines(name: str) -> list[str]:
    try:
        return (_PROC / name).read_text().splitlines()
    except OSError:  # this kernel does not count it
        return []


def _own() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    io = dict(line.split(": ") for line in _lines("self/io"))
    return {
        "own_busy": used.ru_utime + used.ru_stime,
        "own_system": used.ru_stime,
        "own_delay": process_delay_s(),
        "own_forced": float(used.ru_nivcsw),
        "own_yields": float(used.ru_nvcsw),
        "own_faults": float(used.ru_minflt),
        "own_major": float(used.ru_majflt),
        "own_read": float(io.get("read_bytes", math.nan)),
        "own_written": float(io.get("write_bytes", math.nan)),
    }


def _stat() -> dict[str, float]:
    counters: dict[str, float] = {}
    seat = os.sched_getaffinity(0)
    cores = seat_busy = 0.0
    for line in _lines("stat"):
        name, *fields = line.split()
        if name == "cpu":
            user, nice, system, _, iowait, irq, softirq, steal = map(int, fields[:8])
            counters["user"] = (user + nice) * _TICK_S
            counters["system"] = (system + irq) * _TICK_S
            counters["softirq"] = softirq * _TICK_S
            counters["iowait"] = iowait * _TICK_S
            counters["steal"] = steal * _TICK_S
            counters["busy"] = (user + nice + system + irq + softirq) * _TICK_S
        elif name.startswith("cpu"):
            cores += 1
            if int(name[3:]) in seat:
                ticks = list(map(int, fields[:7]))
                seat_busy += (sum(ticks) - ticks[3] - ticks[4]) * _TICK_S
        elif name in _STAT_NAMES:
            counters[_STAT_NAMES[name]] = float(fields[0])
    return counters | {"cores": cores, "seat_cores": float(len(seat)), "seat_busy": seat_busy}


_STAT_NAMES = {
    "ctxt": "switches",
    "intr": "interrupts",
    "processes": "forks",
    "procs_running": "running",
    "procs_blocked": "blocked",
}


def _pressure() -> dict[str, float]:
    counters: dict[str, float] = {}
    for stem in ("cpu", "memory", "io"):
        for line in _lines(f"pressure/{stem}"):
            kind, *fields = line.split()
            total_s = int(fields[-1].removeprefix("total=")) / 1e6
            counters[f"{stem}_{'stall' if kind == 'some' else 'full'}"] = total_s
    return counters


def _memory() -> dict[str, float]:
    page = os.sysconf("SC_PAGE_SIZE")
    counts = {name: int(value) for name, value in map(str.split, _lines("vmstat"))}
    available = total = math.nan
    for line in _lines("meminfo"):
        name, value, *_ = line.split()
        if name == "MemTotal:":
            total = float(value)
        elif name == "MemAvailable:":
            available = float(value)
    reclaimed = counts.get("pgsteal_kswapd", 0) + counts.get("pgsteal_direct", 0)
    allocated = sum(value for name, value in counts.items() if name.startswith("pgalloc_"))
    return {
        "faults": float(counts.get("pgfault", math.nan)),
        "allocated": float(allocated * page),
        "reclaimed": float(reclaimed * page),
        "available": available / total,
        "dirty": float(counts.get("nr_dirty", math.nan)) * page,
        "writeback": float(counts.get("nr_writeback", math.nan)) * page,
    }


def _disks() -> dict[str, float]:
    """Sums over whole disks: a partition's share is in its disk's."""
    sums = [0] * 20
    for line in _lines("diskstats"):
        _, _, name, *fields = line.split()
        if name.startswith(("loop", "ram", "zram", "dm-", "md")) or _is_partition(name):
            continue
        for at, field in enumerate(fields[: len(sums)]):
            sums[at] += int(field)
    return {
        "disk_reads": float(sums[0]),
        "disk_read": float(sums[2] * _SECTOR_BYTES),
        "disk_writes": float(sums[4]),
        "disk_written": float(sums[6] * _SECTOR_BYTES),
        "disk_busy": sums[9] / 1e3,
        "disk_queue": sums[10] / 1e3,
        "disk_flushes": float(sums[15]),
    }


def _is_partition(name: str) -> bool:
    return not Path("/sys/block", name).exists()


def _network() -> dict[str, float]:
    sums = {"loop_bytes": 0.0, "loop_packets": 0.0, "link_bytes": 0.0, "link_packets": 0.0}
    for line in _lines("net/dev")[2:]:
        name, _, rest = line.partition(":")
        fields = list(map(int, rest.split()))
        stem = "loop" if name.strip() == "lo" else "link"
        sums[f"{stem}_bytes"] += fields[0] + fields[8]
        sums[f"{stem}_packets"] += fields[1] + fields[9]
    received = [line.split()[1:] for line in _lines("softirqs") if "NET_RX:" in line]
    return sums | {"received": float(sum(map(int, received[0]))) if received else math.nan}
