"""Read the facts of this machine: files of the kernel, limits, names, one file written and removed.

Kept true (tests/unit/launch/doctor/test_gather.py)
    A port in use and an unwritable folder are reported with the system's error; whatever was
    written to a folder is removed.
"""

import ctypes
import fcntl
import importlib.metadata
import os
import re
import resource
import socket
import struct
import time
from pathlib import Path

import equipoise
from equipoise.launch.doctor.cgroup import read_quota
from equipoise.launch.doctor.facts import FolderFacts, Limits, MachineFacts, NetworkFacts
from equipoise.observe.machine import usable_cores

_STA_UNSYNC = 0x40
"""From Linux's timex.h: this clock is not synchronised."""

_TIMEX_FORM, _TIMEX_BYTES = "@Illlli", 512
"""modes, offset, freq, maxerror, esterror, status; the rest of the struct is not read."""


_SHARED = Path("/dev", "shm")


def read_machine() -> MachineFacts:
    """Facts about this machine and its container."""
    quota = read_quota()
    available = _meminfo("MemAvailable")
    return MachineFacts(
        torch=_version("torch"),
        packages=_packages(),
        cores=len(usable_cores()),
        quota_cores=quota.cores,
        busy_cores=os.getloadavg()[0],
        memory_bytes=available if quota.free_bytes is None else min(available, quota.free_bytes),
        shared_bytes=_size_of(_SHARED),
        limits=_limits(),
        accelerators={"nvidia": _nvidia(), "amd": _amd()},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _packages() -> dict[str, tuple[str, str]]:
    """Packages that this one's metadata requires to plan and to train, without torch."""
    versions = {}
    for line in importlib.metadata.requires("equipoise") or []:
        wanted, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", wanted)
        is_ours = not marker or "'train'" in marker.replace('"', "'")
        if name and is_ours and name[0] != "torch":
            versions[name[0]] = _version(name[0]), wanted[name.end() :].strip()
    return versions


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _size_of(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _limits() -> Limits:
    def soft(name: int, which: int = 0) -> int | None:
        value = resource.getrlimit(name)[which]
        return None if value == resource.RLIM_INFINITY else value

    return Limits(
        open_files=soft(resource.RLIMIT_NOFILE),
        most_open_files=soft(resource.RLIMIT_NOFILE, 1),
        processes=soft(resource.RLIMIT_NPROC),
        locked_bytes=soft(resource.RLIMIT_MEMLOCK),
        file_bytes=soft(resource.RLIMIT_FSIZE),
    )


def _nvidia() -> int:
    """The number of devices that CUDA programs of this shell would see."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return devices
    return min(devices, len([each for each in shown.split(",") if each.strip()]))


def _amd() -> int:
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(path.read_text().strip() != "0" for path in nodes)


def read_network(port: int | None = None) -> NetworkFacts:
    """This machine's name, interfaces, clock and environment; and whether a port is free."""
    host = socket.gethostname()
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    return NetworkFacts(
        host=host,
        addresses=tuple(dict.fromkeys(str(info[4][0]) for info in infos)),
        interfaces=tuple(_interfaces()),
        now_s=time.time(),
        built_s=_built_s(),
        is_synchronised=_is_synchronised(),
        environment=dict(os.environ),
        port=port,
        port_fault="" if port is None else _port_fault(port),
    )


def _interfaces() -> list[str]:
    names = []
    for _, name in socket.if_nameindex():
        flags = Path("/sys/class/net") / name / "flags"
        try:
            is_up = int(flags.read_text(), 16) & 1
        except (OSError, ValueError):
            is_up = 1
        if is_up and name != "lo":
            names.append(name)
    return names


def _built_s() -> float:
    folder = Path(equipoise.__file__).parent
    return max(path.stat().st_mtime for path in folder.glob("*.py"))


def _is_synchronised() -> bool | None:
    """The clock's state by adjtimex(2), which changes nothing here."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        if ctypes.CDLL(None).adjtimex(timex) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not struct.unpack_from(_TIMEX_FORM, timex.raw)[-1] & _STA_UNSYNC


def _port_fault(port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""


def read_folder(path: Path) -> FolderFacts:
    """Write, synchronise, lock and remove a file in a folder, or in its nearest parent.

    The folder itself is not created.
    """
    if path.exists() and not path.is_dir():
        return FolderFacts(path, "is a file", 0.0, 0, "", "")
    parent = next(each for each in (path, *path.parents) if each.is_dir())
    file = parent / f".equipoise-doctor-{os.getpid()}"
    fault = lock_fault = ""
    seconds = 0.0
    try:
        with file.open("wb", buffering=0) as out:
            out.write(bytes(1 << 20))
            begin = time.perf_counter()
            os.fsync(out.fileno())
            seconds = time.perf_counter() - begin
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock_fault = error.strerror or str(error)
    except OSError as error:
        fault = error.strerror or str(error)
    finally:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            fault = fault or error.strerror or str(error)
    room = os.statvfs(parent)
    return FolderFacts(
        path=path,
        fault=fault,
        fsync_s=seconds,
        free_bytes=room.f_bavail * room.f_frsize,
        file_system=_file_system(parent),
        lock_fault=lock_fault,
    )


def _file_system(path: Path) -> str:
    """The file system type of the mount that holds a folder."""
    real = path.resolve()
    best, kind = -1, "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, mounted = line.split()[:3]
        # Spaces in a mount's name are octal there.
        mount = Path(where.encode().decode("unicode_escape"))
        if real.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), mounted
    return kind
