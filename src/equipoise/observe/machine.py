"""What this process and this machine are using, read from the operating system."""

import math
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

from equipoise.spec.device.driver import cuda_devices

_STATUS = Path("/proc/self/status")
_TICKS_S = 0.04
"""The system counts busy cores in hundredths of a second."""

BUSY_CORES = 0.3
"""If other processes use more cores while something is timed, they are what is measured: an
operator on two cores waits for the one that another process uses."""


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes() -> int:
    """Memory that this process holds now [bytes]."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Peak memory of this process [bytes]."""
    return _status_bytes("VmHWM")


def available_bytes() -> int:
    """Memory of this machine that programs could still take, all of it where that is unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # another system
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores() -> list[int]:
    """Cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def own_ranks() -> int:
    """Ranks that this machine computes at once: one a CUDA device, or one a core without any."""
    return len(cuda_devices()) or len(usable_cores())


def busy_core_s() -> float:
    """Busy seconds of this machine since boot, summed over its cores."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ticks = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # minus idle and iowait


class OtherLoad:
    """What other processes use of the cores."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), self._others_s()

    @staticmethod
    def _others_s() -> float:
        return busy_core_s() - time.process_time()

    @property
    def cores(self) -> float:
        """Cores in use since the beginning, on average."""
        begin_s, others_s = self._begin
        used_s = self._others_s() - others_s - _TICKS_S
        return used_s / (time.perf_counter() - begin_s)


def run_delay_s() -> float:
    """Seconds that this thread was ready to run while others had the cores; NaN if unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # another system, or a kernel that does not count
        return math.nan


def process_delay_s() -> float:
    """The same of all threads of this process, added up; 0 if unknown."""
    delay_ns, tasks = 0, Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.exists() else ():
        with suppress(OSError, ValueError, IndexError):  # it has ended, or nothing is counted
            delay_ns += int((task / "schedstat").read_text().split()[1])
    return delay_ns / 1e9


def cpu_name() -> str:
    """Model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_machine() -> dict[str, str | int]:
    """The environment of a run, for its journal."""
    return {
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(usable_cores()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def forget_peak() -> None:
    """Reset ``peak_resident_bytes`` to what is held now, if the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
