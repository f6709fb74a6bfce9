"""What is read of a machine: control groups as containers have them, ports, folders, names."""

import importlib.metadata
import os
import socket
import time
from pathlib import Path

import pytest

from equipoise.launch.doctor import gather as doctor_gather
from equipoise.launch.doctor.cgroup import Quota, read_quota
from equipoise.launch.doctor.gather import read_folder, read_machine, read_network
from support.launch.ports import free_port

GIB = 1 << 30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_group_of_version_2_holds(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/kubepods/pod7/box\n")
    write(root, cpu__max="max 100000")
    write(root / "kubepods/pod7", cpu__max="150000 100000", memory__max=4 * GIB)
    write(root / "kubepods/pod7", memory__current=GIB, memory__stat=f"anon 1\ninactive_file {GIB}")
    write(root / "kubepods/pod7/box", cpu__max="400000 100000", memory__max="max")
    assert read_quota(root, own) == Quota(1.5, 4 * GIB)


def test_groups_of_version_1(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n9:name=systemd:/\n")
    write(root / "cpu/docker/1", cpu__cfs_quota_us=250_000, cpu__cfs_period_us=100_000)
    write(root / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    write(root / "memory/docker/1", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    write(root / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    assert read_quota(root, own) == Quota(2.5, GIB)


def test_what_cannot_be_read_holds_nothing_back(tmp_path: Path) -> None:
    assert read_quota(tmp_path / "none", tmp_path / "neither") == Quota(None, None)


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_machine()
    assert found.torch.startswith("2.")
    assert {"numpy", "rich", "tokenizers"} <= set(found.packages)
    assert not {"torch", "pytest"} & set(found.packages)
    assert found.packages["numpy"] == (importlib.metadata.version("numpy"), ">=2.0")
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 0
    monkeypatch.setattr(doctor_gather, "read_quota", lambda: Quota(0.5, 7))
    held = read_machine()
    assert (held.quota_cores, held.memory_bytes) == (0.5, 7)


def test_a_package_that_is_not_here() -> None:
    assert doctor_gather._version("no-such-package") == ""


def test_accelerators_that_this_shell_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev/nvidia0"), Path("/dev/nvidia1")])
    for shown, count in ((None, 2), ("", 0), ("1", 1), ("0,1,2", 2)):
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert doctor_gather._nvidia() == count


def test_a_port_that_is_taken() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert read_network(port).port_fault == "Address already in use"
    found = read_network(port)
    assert (found.port, found.port_fault) == (port, "")


def test_the_network_and_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = read_network()
    assert found.host == socket.gethostname()
    assert "lo" not in found.interfaces
    assert found.built_s < found.now_s <= time.time()
    assert found.environment["NCCL_DEBUG"] == "INFO"
    assert found.port is None
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert read_network().addresses == ()


def test_a_folder_is_left_as_it_was(tmp_path: Path) -> None:
    found = read_folder(tmp_path / "runs" / "demo")
    assert (found.path, found.fault, found.lock_fault) == (tmp_path / "runs" / "demo", "", "")
    assert found.free_bytes > 0
    assert found.file_system not in ("", "unknown")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "file"
    file.touch()
    assert read_folder(file).fault == "is a file"
    monkeypatch.setattr(os, "fsync", refuse)
    assert read_folder(tmp_path).fault == "No space left on device"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(doctor_gather.fcntl, "flock", refuse)
    found = read_folder(tmp_path)
    assert (found.fault, found.lock_fault) == ("", "No locks available")


def test_the_file_system_of_a_folder() -> None:
    assert doctor_gather._file_system(Path("/proc/self")) == "proc"
