"""The input of ``equipoise doctor`` as plain data: facts about a machine, and a run's needs.

Why
    Verdicts must be testable for machines that are not here, above all for broken ones. So facts
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
    """Limits that the shell or the container sets for a process; None for no limit."""

    open_files: int | None
    most_open_files: int | None
    """The value to which a process may raise it."""
    processes: int | None
    locked_bytes: int | None
    file_bytes: int | None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about the machine that runs the command."""

    torch: str
    """Version; empty where it is not installed."""
    packages: Mapping[str, tuple[str, str]]
    """Other packages that a run needs: the version, empty if absent, and the required one."""
    cores: int
    """Cores that this process may run on."""
    quota_cores: float | None
    """Cores' worth of time that the container gets; None for no limit."""
    busy_cores: float
    """Mean number of runnable processes over the last minute."""
    memory_bytes: int
    """Memory available now."""
    shared_bytes: int | None
    """Size of /dev/shm; None if there is none."""
    limits: Limits
    accelerators: Mapping[str, int]
    """Number of devices by maker."""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Facts about the machine's name, its network and clock, and this shell's environment."""

    host: str
    addresses: tuple[str, ...]
    """Addresses that its name resolves to."""
    interfaces: tuple[str, ...]
    """Interfaces that are up, without loopback."""
    now_s: float
    """Since 1970."""
    built_s: float
    """When the newest file of this package was written."""
    is_synchronised: bool | None
    """Whether the kernel reports its clock as synchronised; None if unknown."""
    environment: Mapping[str, str]
    port: int | None = None
    """Asked for."""
    port_fault: str = ""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Facts about the folder that a run will be written to."""

    path: Path
    fault: str
    """The system's error when a file was written, synchronised and removed; empty if none."""
    fsync_s: float
    free_bytes: int
    file_system: str
    lock_fault: str


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """Facts about the links between rank 0 and every other rank."""

    hosts: tuple[str, ...]
    """The host of every rank."""
    latency_s: tuple[float, ...]
    """One way, for ranks 1 and up."""
    bytes_per_s: tuple[float, ...]
    offset_s: tuple[float, ...]
    """Lead of each rank's clock over rank 0's."""
    offset_error_s: tuple[float, ...]
    """Half of the round trip of the measurement."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts."""

    machine: MachineFacts
    network: NetworkFacts
    folder: FolderFacts
    links: LinkFacts | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs of each node."""

    ranks: int
    """Ranks on this node."""
    nodes: int
    accelerator: Accelerator
    rank_bytes: int
    """Forecast peak of a rank, including its libraries."""
    device_bytes: int
    """Memory of the device that a rank computes on; 0 if it uses the node's."""
    checkpoint_bytes: int
    """Bytes of one checkpoint's files."""
    kept_checkpoints: int
    group_files: int
    """Files that one rank's process groups hold open."""
    is_pinned: bool
    terms: Mapping[str, int] = field(default_factory=dict)
    """The forecast's terms."""

    @property
    def world(self) -> int:
        """Ranks on all nodes."""
        return self.ranks * self.nodes
