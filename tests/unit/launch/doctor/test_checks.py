"""Every verdict of every check, from facts of machines that are not here."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.launch.doctor.checks import conclusion, count_group_files, examine, would_break
from equipoise.launch.doctor.facts import (
    Facts,
    FolderFacts,
    Limits,
    LinkFacts,
    MachineFacts,
    Needs,
    NetworkFacts,
    Row,
)
from equipoise.launch.doctor.machine import TORCH
from equipoise.spec.layout import Layout

GIB = 1 << 30
ROOT = Path(__file__).parents[4]

LIMITS = Limits(65_536, 65_536, None, None, None)
PACKAGES = {"numpy": ("2.4.1", ">=2.0"), "rich": ("14.0", ">=13.9")}
MACHINE = MachineFacts(
    "2.13.0", PACKAGES, 8, None, 0.5, 64 * GIB, 32 * GIB, LIMITS, {"nvidia": 0, "amd": 0}
)
NETWORK = NetworkFacts("n0", ("10.0.0.7",), ("eth0", "ib0"), 1.8e9, 1.7e9, True, {})
FOLDER = FolderFacts(Path("/data/run"), "", 0.004, 500 * GIB, "lustre", "")
LINKS = LinkFacts(
    ("n0", "n0", "n1"), (2e-5, 3e-5), (2.0 * GIB, 1.5 * GIB), (1e-6, -2e-4), (1e-5, 1e-5)
)
NEEDS = Needs(
    ranks=8,
    nodes=1,
    accelerator="none",
    rank_bytes=2 * GIB,
    device_bytes=0,
    checkpoint_bytes=12 * GIB,
    kept_checkpoints=2,
    group_files=11,
    is_pinned=False,
    terms={"parameters": GIB // 2, "activations": GIB},
)
GPU = {"accelerator": "nvidia", "device_bytes": 78 * GIB}
GPUS = {"accelerators": {"nvidia": 8, "amd": 0}}


def facts_with(**changes) -> Facts:
    """Facts that are well, but for these: of whichever part has a field of that name."""
    parts = {"machine": MACHINE, "network": NETWORK, "folder": FOLDER, "links": LINKS}
    limits = {key: changes.pop(key) for key in list(changes) if key in Limits.__slots__}
    if limits:
        changes["limits"] = dataclasses.replace(LIMITS, **limits)
    for name, part in parts.items():
        own = {key: changes.pop(key) for key in list(changes) if key in part.__slots__}
        parts[name] = dataclasses.replace(part, **own)
    assert not changes
    return Facts(**parts)


def row_of(what: str, needs: dict | None = None, **changes) -> Row:
    rows = examine(facts_with(**changes), dataclasses.replace(NEEDS, **(needs or {})))
    [row] = [row for row in rows if row.what == what]
    return row


def test_what_is_well_says_why_it_matters_and_has_no_fix() -> None:
    for needs, facts in ((NEEDS, facts_with()), (dataclasses.replace(NEEDS, **GPU), GPUS)):
        rows = examine(facts if isinstance(facts, Facts) else facts_with(**facts), needs)
        assert {row.verdict for row in rows} == {"ok"}, [r for r in rows if r.verdict != "ok"]
        assert len({row.what for row in rows}) == len(rows)
        assert all(row.found and row.why.endswith(".") and not row.fix for row in rows)
        assert not would_break(rows)
        assert conclusion(rows, needs) == (
            f"A run of 8 ranks would work here: all {len(rows)} checks are well."
        )


def test_links_are_checked_where_ranks_met() -> None:
    with_links = examine(facts_with(), NEEDS)
    without = examine(dataclasses.replace(facts_with(), links=None), NEEDS)
    assert [row.what for row in with_links[len(without) :]] == [
        "link latency",
        "link bandwidth",
        "clock offsets",
    ]


def test_the_range_of_torch_is_the_packages() -> None:
    first, last = (".".join(map(str, version)) for version in TORCH)
    assert f'"torch>={first},<{last}"' in (ROOT / "pyproject.toml").read_text()


CASES: list[tuple[str, dict, dict, tuple[str, str, str, str]]] = [
    (
        "torch",
        {},
        {"torch": ""},
        (
            "breaks",
            "not installed",
            "ranks compute and meet with it.",
            'pip install "equipoise[train]", or torch>=2.13,<2.14.',
        ),
    ),
    (
        "torch",
        {},
        {"torch": "2.9.1+cpu"},
        (
            "breaks",
            "2.9.1+cpu",
            "ranks compute and meet with it, and use what came with 2.13.",
            'pip install "equipoise[train]", or torch>=2.13,<2.14.',
        ),
    ),
    (
        "torch",
        {},
        {"torch": "2.14.0"},
        (
            "warn",
            "2.14.0",
            "ranks compute and meet with it, and 2.14.0 is untested.",
            'pip install "equipoise[train]", or torch>=2.13,<2.14.',
        ),
    ),
    (
        "packages",
        {},
        {"packages": {"numpy": ("1.26.4", ">=2.0"), "rich": ("14.0", ">=13.9"), "x": ("", "")}},
        (
            "breaks",
            "numpy 1.26.4, rich 14.0, x is missing",
            "the corpus, run.toml and the console are read and written with them.",
            "pip install 'numpy>=2.0' x",
        ),
    ),
    (
        "accelerators",
        {},
        {"accelerators": {"nvidia": 4, "amd": 0}},
        (
            "breaks",
            "4 nvidia",
            "ranks compute on CUDA devices wherever there are some, one each, and 8 want one.",
            "Set layout.dp for 4 ranks, or CUDA_VISIBLE_DEVICES= for CPU ranks.",
        ),
    ),
    (
        "accelerators",
        GPU,
        {"accelerators": {"nvidia": 4, "amd": 0}},
        (
            "breaks",
            "4 nvidia",
            "each of the 8 ranks of a node computes on its own.",
            "Give a cluster of nodes of 4, or make more visible.",
        ),
    ),
    (
        "accelerators",
        GPU,
        {},
        (
            "breaks",
            "none",
            "each of the 8 ranks of a node computes on its own.",
            "Load the driver, give the container its devices, or unset what hides them.",
        ),
    ),
    (
        "cores",
        {},
        {"cores": 2},
        (
            "warn",
            "2 usable",
            "8 ranks on fewer cores wait for each other's slices, some 4 ms each time.",
            "Start 2 ranks here, or allow more cores.",
        ),
    ),
    (
        "cores",
        {},
        {"quota_cores": 1.5},
        (
            "warn",
            "8 usable, and a quota of 1.5 cores' time",
            "a quota stops all 8 ranks for the rest of each period once it is spent.",
            "Start 1 ranks here, or raise the container's CPU limit to 8.",
        ),
    ),
    (
        "other load",
        {},
        {"busy_cores": 5.0},
        (
            "warn",
            "5.0 at work on 8 cores, mean of the last minute",
            "who shares a core with a rank delays every rank that waits for it.",
            "End what else runs, or read no timings of this run as its own.",
        ),
    ),
    (
        "pinning",
        {"is_pinned": True},
        {"cores": 4},
        (
            "warn",
            "8 ranks on 4 cores",
            "pinned ranks that share a core cannot move to one that is free.",
            "Set layout.pin = false, or start fewer ranks.",
        ),
    ),
    (
        "pinning",
        {"is_pinned": True},
        {"busy_cores": 5.0},
        (
            "warn",
            "8 ranks on 8 cores that others use",
            "a pinned rank cannot move away from a stranger, and all ranks wait for it.",
            "Set layout.pin = false while others run here.",
        ),
    ),
    (
        "pinning",
        {"is_pinned": True},
        {},
        ("ok", "8 ranks on 8 cores", "each has its own.", ""),
    ),
    (
        "memory",
        {},
        {"memory_bytes": 12 * GIB},
        (
            "breaks",
            "12.0 GiB free, 16.0 GiB needed",
            "8 ranks are forecast to need 2.0 GiB each, most of it activations.",
            'Set train.recompute = "full", a smaller pack.context_tokens, or layout.zero = 3.',
        ),
    ),
    (
        "memory",
        {},
        {"memory_bytes": 17 * GIB},
        (
            "warn",
            "17.0 GiB free, 16.0 GiB needed",
            "8 ranks are forecast to need 2.0 GiB each, most of it activations. That leaves less "
            "than a fifth.",
            'Set train.recompute = "full", a smaller pack.context_tokens, or layout.zero = 3.',
        ),
    ),
    (
        "memory",
        GPU | {"rank_bytes": 90 * GIB},
        GPUS,
        (
            "breaks",
            "78.0 GiB a device, 90.0 GiB needed",
            "8 ranks are forecast to need 90.0 GiB each, most of it activations.",
            'Set train.recompute = "full", a smaller pack.context_tokens, or layout.zero = 3.',
        ),
    ),
    *(
        (
            "shared memory",
            GPU,
            {"shared_bytes": size, **GPUS},
            (
                verdict,
                found,
                "ranks of one node pass messages through it, and a container has 64 MiB by "
                "default.",
                "docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory at /dev/shm.",
            ),
        )
        for size, verdict, found in (
            (None, "breaks", "no /dev/shm"),
            (64 << 20, "breaks", "64.0 MiB at /dev/shm"),
            (GIB // 2, "warn", "512.0 MiB at /dev/shm"),
        )
    ),
    (
        "open files",
        {"nodes": 128, "group_files": 1027},
        {"open_files": 1024, "most_open_files": 4096},
        (
            "breaks",
            "1,024",
            "connections are open files; with 1,024 ranks a process needs up to 2,072.",
            "ulimit -n 2072.",
        ),
    ),
    (
        "open files",
        {"nodes": 128, "group_files": 1027},
        {"open_files": 1024, "most_open_files": 1024},
        (
            "breaks",
            "1,024",
            "connections are open files; with 1,024 ranks a process needs up to 2,072.",
            "ulimit -n 2072, once an administrator has raised the hard limit of 1,024.",
        ),
    ),
    (
        "processes",
        {},
        {"processes": 100},
        (
            "warn",
            "100",
            "threads count as processes, and 8 ranks start up to 576.",
            "ulimit -u 576.",
        ),
    ),
    (
        "file size",
        {},
        {"file_bytes": GIB},
        (
            "breaks",
            "1.0 GiB",
            "a rank's share of a checkpoint is a file of 1.5 GiB.",
            "ulimit -f unlimited.",
        ),
    ),
    (
        "locked memory",
        GPU | {"nodes": 2},
        {"locked_bytes": 8 << 20, **GPUS},
        (
            "warn",
            "8.0 MiB",
            "network cards of InfiniBand and RoCE read from memory that is locked.",
            "ulimit -l unlimited; docker run --ulimit memlock=-1.",
        ),
    ),
    (
        "host name",
        {"nodes": 2},
        {"addresses": ("127.0.1.1", "::1")},
        (
            "breaks",
            "n0 is 127.0.1.1, ::1",
            "ranks announce the address that it resolves to, and no other node reaches loopback.",
            "Name an interface, GLOO_SOCKET_IFNAME or --interface (up: eth0, ib0), or correct "
            "/etc/hosts.",
        ),
    ),
    (
        "host name",
        {"nodes": 2},
        {"addresses": ()},
        (
            "breaks",
            "n0 resolves to nothing",
            "ranks announce the address that it resolves to, or loopback, which no other node is.",
            "Name an interface, GLOO_SOCKET_IFNAME or --interface (up: eth0, ib0), or correct "
            "/etc/hosts.",
        ),
    ),
    (
        "host name",
        {},
        {"addresses": (), "interfaces": ()},
        (
            "warn",
            "n0 resolves to nothing",
            "ranks announce the address that it resolves to, or loopback after a wait for the "
            "resolver.",
            (
                "Name an interface, GLOO_SOCKET_IFNAME or --interface (up: none), or correct "
                "/etc/hosts."
            ),
        ),
    ),
    (
        "host name",
        {"nodes": 2},
        {"addresses": (), "environment": {"GLOO_SOCKET_IFNAME": "ib0"}},
        (
            "ok",
            "n0 resolves to nothing; ib0 is used",
            "ranks announce the address that it resolves to.",
            "",
        ),
    ),
    (
        "interfaces",
        {},
        {"environment": {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "^eth,ib,lo"}},
        (
            "breaks",
            "GLOO_SOCKET_IFNAME=eth1 and NCCL_SOCKET_IFNAME=^eth,ib,lo; up: eth0, ib0",
            "ranks of several nodes talk through one of them.",
            "Unset it, or name one that is up.",
        ),
    ),
    (
        "port",
        {},
        {"port": 29_400, "port_fault": "Address already in use"},
        (
            "breaks",
            "29400: Address already in use",
            "the first node's agent listens there, and all others dial it.",
            "Stop the program that listens there, or choose another --port.",
        ),
    ),
    (
        "port",
        {},
        {"port": 29_400},
        (
            "ok",
            "29400 is free",
            "the first node's agent listens there, and all others dial it.",
            "",
        ),
    ),
    (
        "clock",
        {},
        {"now_s": 0.0},
        (
            "breaks",
            "1970-01-01 00:00 UTC",
            "it is before 2023-11-14 22:13, when this package was written here, and torchrun "
            "takes a node for dead whose clock is 15 s behind the others.",
            "Set it: chronyc makestep, or timedatectl set-ntp 1.",
        ),
    ),
    *(
        (
            "time service",
            {"nodes": 2},
            {"is_synchronised": known},
            (
                "warn",
                found,
                "unsynchronised clocks drift by a second a day or more, and torchrun ends at 15 s.",
                "Start chronyd, ntpd or systemd-timesyncd on every node.",
            ),
        )
        for known, found in ((False, "not synchronised"), (None, "unknown"))
    ),
    (
        "OMP_NUM_THREADS",
        {},
        {"environment": {"OMP_NUM_THREADS": "4"}},
        (
            "warn",
            "4",
            "under a launcher of your own, 8 ranks have 4 threads each for NumPy.",
            "Set OMP_NUM_THREADS=1.",
        ),
    ),
    (
        "OMP_NUM_THREADS",
        {},
        {"environment": {"OMP_NUM_THREADS": "auto"}},
        (
            "warn",
            "auto",
            "no number of threads: libraries then start one a core, for each of 8.",
            "unset OMP_NUM_THREADS, or set it to 1.",
        ),
    ),
    (
        "OMP_NUM_THREADS",
        {"ranks": 1},
        {"environment": {"OMP_NUM_THREADS": "4"}},
        ("ok", "4", "a rank computes on one thread; launchers of equipoise set it to 1.", ""),
    ),
    (
        "environment",
        {},
        {"environment": {"RANK": "3", "PET_NNODES": "4", "NCCL_P2P_DISABLE": "1", "HOME": "/x"}},
        (
            "warn",
            "RANK=3, PET_NNODES=4, NCCL_P2P_DISABLE=1",
            "it makes what is started here a rank of another run, changes torchrun's flags, takes "
            "NVLink away.",
            "unset RANK PET_NNODES NCCL_P2P_DISABLE",
        ),
    ),
    (
        "folder",
        {},
        {"fault": "Read-only file system"},
        (
            "breaks",
            "/data/run: Read-only file system",
            "journal and checkpoints are written there.",
            "Make it writable, or choose another with --folder and --out.",
        ),
    ),
    (
        "folder",
        {},
        {"fsync_s": 2.5},
        (
            "warn",
            "/data/run: written and synchronised in 2.50 s",
            "a checkpoint counts once the disk has it, and ranks wait for that.",
            "Choose a faster disk with --out, or save less often: checkpoint.every_steps.",
        ),
    ),
    (
        "room",
        {},
        {"free_bytes": 30 * GIB},
        (
            "breaks",
            "30.0 GiB free, 36.0 GiB needed",
            "2 checkpoints are kept and one is written, of 12.0 GiB each.",
            "Free 6.0 GiB, or lower checkpoint.keep.",
        ),
    ),
    (
        "file locks",
        {},
        {"lock_fault": "No locks available"},
        (
            "breaks",
            "No locks available",
            "rank 0 holds a run's folder by a lock, so that two runs never write one journal.",
            "Mount it with locks (NFS: without nolock; Lustre: with flock), or choose another "
            "--out.",
        ),
    ),
    (
        "file system",
        {"nodes": 2},
        {"file_system": "ext4"},
        (
            "breaks",
            "ext4, which other nodes do not see",
            "ranks of every node read the run and its tokens, and write their journals there.",
            "Choose a folder of a file system that all nodes mount, and data.cache beside it.",
        ),
    ),
    (
        "link latency",
        {},
        {"latency_s": (2e-5, 2e-2)},
        (
            "ok",
            "10.0 ms one way, median of 2 ranks",
            "every collective waits at least so long, more than once.",
            "",
        ),
    ),
    (
        "link latency",
        {},
        {"hosts": ("n0", "n1", "n2", "n3"), "latency_s": (2e-5, 2e-5, 2e-2)},
        (
            "warn",
            "20 us one way, median of 3 ranks; rank 3 on n3 20.0 ms",
            "every collective waits at least so long, more than once.",
            "Look for other load on n3, or a longer path to it.",
        ),
    ),
    (
        "link bandwidth",
        {},
        {"hosts": ("n0", "n1", "n2", "n3"), "bytes_per_s": (2.0 * GIB, 0.25 * GIB, 2.0 * GIB)},
        (
            "warn",
            "2.0 GiB/s from rank 0, median of 3 ranks; to rank 2 on n2 256.0 MiB/s",
            "a collective is as slow as the slowest link it crosses.",
            "Look for other load on n2, or leave it out.",
        ),
    ),
    (
        "clock offsets",
        {},
        {"offset_s": (0.0, -20.0)},
        (
            "breaks",
            "at most 20.00 s (rank 2 on n1), known to 10 us",
            "journals and traces of ranks are laid on one time; torchrun drops nodes 15 s behind.",
            "Start chronyd, ntpd or systemd-timesyncd on n1 and on n0.",
        ),
    ),
    (
        "clock offsets",
        {},
        {"offset_s": (0.0, 0.5)},
        (
            "warn",
            "at most 500.0 ms (rank 2 on n1), known to 10 us",
            "journals and traces of ranks are laid on one time; torchrun drops nodes 15 s behind.",
            "Start chronyd, ntpd or systemd-timesyncd on n1 and on n0.",
        ),
    ),
    (
        "clock offsets",
        {},
        {"offset_s": (0.0, 0.5), "offset_error_s": (1e-5, 0.6)},
        (
            "ok",
            "at most 500.0 ms (rank 2 on n1), known to 600.0 ms",
            "journals and traces of ranks are laid on one time; torchrun drops nodes 15 s behind.",
            "",
        ),
    ),
]


@pytest.mark.parametrize(
    ("what", "needs", "changes", "expected"),
    CASES,
    ids=[f"{what}-{expected[0]}-{at}" for at, (what, _, _, expected) in enumerate(CASES)],
)
def test_a_check(
    what: str, needs: dict, changes: dict, expected: tuple[str, str, str, str]
) -> None:
    row = row_of(what, needs, **changes)
    assert (row.verdict, row.found, row.why, row.fix) == expected


def test_a_folder_that_cannot_be_written_is_one_row() -> None:
    rows = examine(facts_with(fault="Permission denied"), NEEDS)
    assert not {"room", "file locks", "file system"} & {row.what for row in rows}


@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker", "ib0,eth9", ""])
def test_interfaces_that_nccl_finds(value: str) -> None:
    assert row_of("interfaces", environment={"NCCL_SOCKET_IFNAME": value}).verdict == "ok"


@pytest.mark.parametrize("value", ["wlan", "=eth", "^=eth0,ib0,lo"])
def test_interfaces_that_nccl_does_not_find(value: str) -> None:
    assert row_of("interfaces", environment={"NCCL_SOCKET_IFNAME": value}).verdict == "breaks"


def test_the_conclusion_counts() -> None:
    one = dataclasses.replace(NEEDS, ranks=1)
    rows = examine(facts_with(fault="No space left on device", cores=8, torch="2.14"), one)
    assert would_break(rows)
    assert conclusion(rows, one) == (
        f"1 of {len(rows)} checks found what would break a run of 1 rank here; 1 warns."
    )
    rows = examine(facts_with(torch="2.14"), NEEDS)
    assert conclusion(rows, NEEDS) == (
        f"A run of 8 ranks would work here; 1 of {len(rows)} checks warns."
    )


def test_files_of_groups() -> None:
    assert count_group_files(Layout()) == 0
    assert count_group_files(Layout(dp=2)) == 2 * 5
    assert count_group_files(Layout(dp=4, ep=4)) == 3 * 7
