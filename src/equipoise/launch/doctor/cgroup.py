"""The limits of this process's container: cores' worth of time and bytes of memory.

What it decides
    Both versions of control groups are read. The tightest of nested groups applies, so every group
    from this process's up to the root is read. A limit that cannot be read does not count.

Kept true (tests/unit/launch/doctor/test_gather.py)
    Files as Kubernetes and Docker leave them, of both versions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 for "no limit"."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits; None for no limit."""

    cores: float | None
    free_bytes: int | None


def read_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Quota:
    """The tightest limits of all groups that hold this process.

    Args:
        root: Where control groups are mounted.
        own: The groups of this process, as the kernel lists them.
    """
    cores: list[float] = []
    free: list[int] = []
    for folder in _groups(root, own):
        if (limit := _words(folder / "cpu.max")) and limit[0] != "max":
            cores.append(int(limit[0]) / int(limit[1]))
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            cores.append(int(quota[0]) / int(period[0]))
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, now = _words(folder / most), _words(folder / used)
            if limit and now and limit[0] != "max" and int(limit[0]) < _NO_LIMIT:
                free.append(max(0, int(limit[0]) - int(now[0]) + _cached(folder)))
    return Quota(min(cores, default=None), min(free, default=None))


def _groups(root: Path, own: Path) -> Iterator[Path]:
    for line in _lines(own):
        _, names, path = line.split(":", 2)
        mounts = [root / name for name in names.split(",")] if names else [root]
        for mount in mounts:
            group = mount / path.lstrip("/")
            while group != mount and mount in group.parents:
                yield group
                group = group.parent
            yield mount


def _cached(folder: Path) -> int:
    """Bytes of cached file pages, which the kernel frees when they are needed."""
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _words(path: Path) -> list[str]:
    return next((line.split() for line in _lines(path)), [])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
