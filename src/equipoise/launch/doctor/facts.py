"""What ``equipoise doctor`` looks at, as plain data: facts of a machine, and a run's needs.

Why
    A verdict must be testable on machines that are not here, and broken ones above all. So facts
    are gathered in one place, and verdicts are functions of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from equipoise.launch.forms import Accelerator

Verdict = Literal["ok", "warn", "breaks"]


@dataclass(frozen=True, slots=True)
class Row:
    """One check."""

    what: str
    found: str
    verdict: Verdict
    why: str
    """Why it matters; of what is well, too."""
    fix: str = ""
    """What to do; empty where all is well."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the shell or the container allows a process; None is no limit."""

    open_files: int | None
    most_open_files: int | None
    """What a process may raise it to."""
    processes: int | None
    locked_bytes: int | None
    file_bytes: int | None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Of the machine that runs the command."""

    torch: str
    """Version; empty where it is not installed."""
    packages: Mapping[str, tuple[str, str]]
    """Of the others that a run needs: the version, empty where there is none, and what is asked."""
    cores: int
    """That this process may run on."""
    quota_cores: float | None
    """Cores' worth of time that the container gets; None where it is not held."""
    busy_cores: float
    """What runs already: mean number of ready processes over the last minute."""
    memory_bytes: int
    """That can be had now."""
    shared_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    limits: Limits
    accelerators: Mapping[str, int]
    """By maker."""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Of the machine's name, its network and its clock, and of this shell's environment."""

    host: str
    addresses: tuple[str, ...]
    """That its name resolves to."""
    interfaces: tuple[str, ...]
    """That are up, loopback left out."""
    now_s: float
    """Since 1970."""
    built_s: float
    """When the newest file of this package was written."""
    is_synchronised: bool | None
    """Whether the kernel says that somebody keeps its clock; None where it does not say."""
    environment: Mapping[str, str]
    port: int | None = None
    """Asked for."""
    port_fault: str = ""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Of the folder that a run is to be written to."""

    path: Path
    fault: str
    """What the system said when a file was written, synchronised and removed."""
    fsync_s: float
    free_bytes: int
    file_system: str
    lock_fault: str


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """Between rank 0 and every other rank."""

    hosts: tuple[str, ...]
    """Of every rank."""
    latency_s: tuple[float, ...]
    """One way, of rank 1 and on."""
    bytes_per_s: tuple[float, ...]
    offset_s: tuple[float, ...]
    """Of each rank's clock before rank 0's."""
    offset_error_s: tuple[float, ...]
    """Half of the round trip that it was read over."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was found."""

    machine: MachineFacts
    network: NetworkFacts
    folder: FolderFacts
    links: LinkFacts | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run asks of each node."""

    ranks: int
    """On this node."""
    nodes: int
    accelerator: Accelerator
    rank_bytes: int
    """Forecast peak of a rank, its libraries counted."""
    device_bytes: int
    """Memory of the device that a rank computes on; 0 where that is the node's."""
    checkpoint_bytes: int
    """All files of one."""
    kept_checkpoints: int
    group_files: int
    """Files that one rank's process groups hold open."""
    is_pinned: bool
    terms: Mapping[str, int] = field(default_factory=dict)
    """Of the forecast."""

    @property
    def world(self) -> int:
        """Ranks on all nodes."""
        return self.ranks * self.nodes
