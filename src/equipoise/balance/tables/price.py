"""What a shard of an embedding table costs its rank in a step: lookups, and what it exchanges.

Why
    A small table that every sample reads forty times costs more than one of forty million rows
    that is read once. Storage is a constraint; seconds are what ranks wait for.

What it decides
    Seconds of a shard for S samples of all W ranks, share p of its table's ids, D columns::

        compute   4 passes over p S ids of D floats (read; in the backward read the gradient, read
                  and write the row), and 2 over S pooled rows, at the memory's rate
        exchange  8 p S ids + 4 S lengths in, S D e out and S D e back in, 1 / W of it with each
                  other rank, at the rate of the link between the two

    A shard's fixed seconds stand beside its passes, which count each id's row as if read from
    memory: an upper bound where rows repeat. A data-parallel table has 1 / W of the lookups
    everywhere, and sends the rows that its samples touch to all others. All prices are whole
    picoseconds, so plans are equal on all machines.

Kept true (tests/unit/balance/test_tables.py)
    A price grows with ids, width and samples; shards of a table cost at least the whole.

Sources
    Phases of the cost: torchrec's planner (pytorch/torchrec, planner/shard_estimators.py), whose
    objective is the slowest rank's sum of them too. The rates come from ``spec.device``.
"""

from dataclasses import dataclass

from equipoise.base.errors import SpecError
from equipoise.base.shown import counted, shown
from equipoise.schedule.tables.traffic import WIRES, Wire, wire_bytes
from equipoise.spec.tables.table import (
    FLOAT_BYTES,
    SPARSE_OPTIMIZERS,
    SparseOptimizer,
    TableSpec,
)

PS_PER_S = 1e12


@dataclass(frozen=True, slots=True)
class TableMachine:
    """The ranks that hold tables, and their rates."""

    ranks: int
    batch: int
    """Samples of one rank."""
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """Between two ranks of a host."""
    link_bytes_per_s: float
    """Between hosts."""
    ranks_per_host: int = 0
    """0: all on one host."""
    capacity_bytes: int = 1 << 62
    """What one rank keeps of tables and their optimizer's state."""
    optimizer: SparseOptimizer = "row-wise-adagrad"
    wire: Wire = "fp32"
    visitors: int = 0
    """Ranks of other hosts whose samples are looked up here too: ids come over their link."""
    shard_s: float = 0.0
    """Fixed seconds of a shard or a copy on its rank."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.batch < 1:
            raise SpecError(
                f"{counted(self.ranks, 'rank')} of {counted(self.batch, 'sample')} can train "
                "nothing. Give 1 or more of both."
            )
        for name in ("memory_bytes_per_s", "host_bytes_per_s", "link_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} is {getattr(self, name):g}. Give more than 0.")
        for name in ("ranks_per_host", "capacity_bytes", "visitors"):
            if getattr(self, name) < 0:
                raise SpecError(f"{name} is {getattr(self, name):,}. Give 0 or more.")
        if not 0 <= self.shard_s < 1:
            raise SpecError(f"shard_s is {self.shard_s:g}. Give 0 to below 1.")
        for given, known in ((self.optimizer, SPARSE_OPTIMIZERS), (self.wire, WIRES)):
            if given not in known:
                raise SpecError(f"{shown(given)} is not one of {', '.join(known)}.")
        if self.ranks % self.per_host:
            raise SpecError(
                f"{counted(self.ranks, 'rank')} cannot fill hosts of {self.per_host:,}. Give a "
                f"multiple of {self.per_host:,}."
            )

    @property
    def per_host(self) -> int:
        """Ranks of a host."""
        return self.ranks_per_host or self.ranks

    @property
    def samples(self) -> int:
        """Samples of a step, over all ranks."""
        return self.ranks * self.batch

    @property
    def ids_s_per_byte(self) -> float:
        """Seconds to get a byte of ids out of each that all samples need, at each link's rate."""
        near = self.peer_s_per_byte + self.visitors / self.link_bytes_per_s
        return near / (self.ranks + self.visitors)

    @property
    def peer_s_per_byte(self) -> float:
        """Seconds to exchange a byte with every other rank, at each link's rate."""
        away = self.ranks - self.per_host
        return (self.per_host - 1) / self.host_bytes_per_s + away / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class ShardPrice:
    """Seconds of one shard on its rank, in picoseconds."""

    compute_ps: int
    exchange_ps: int

    @property
    def total_ps(self) -> int:
        """Both: the phases of a step follow each other."""
        return self.compute_ps + self.exchange_ps


def price_shard(
    table: TableSpec, machine: TableMachine, *, share: float = 1.0, columns: int | None = None
) -> ShardPrice:
    """A shard with some of the ids and columns of a table, on one rank."""
    width = table.width if columns is None else columns
    samples = machine.samples
    ids = table.ids_per_sample * share * samples
    compute = (4 * ids + 2 * samples) * width * FLOAT_BYTES / machine.memory_bytes_per_s
    compute += machine.shard_s
    asked = (8 * ids + 4 * samples) * machine.ids_s_per_byte
    moved = 2 * samples * wire_bytes(width, machine.wire)
    exchange = asked + moved / machine.ranks * machine.peer_s_per_byte
    return ShardPrice(round(compute * PS_PER_S), round(exchange * PS_PER_S))


def price_host_shard(table: TableSpec, machine: TableMachine, *, share: float) -> ShardPrice:
    """A bucket of rows inside a host: sums among its ranks, then one of them to each host."""
    whole = price_shard(table, machine, share=share)
    local, hosts = machine.per_host, machine.ranks // machine.per_host
    row = wire_bytes(table.width, machine.wire)
    ids = 8 * table.ids_per_sample * share * machine.samples + 4 * machine.samples
    inside = 2 * machine.samples * row * (local - 1) / local / machine.host_bytes_per_s
    across = 2 * machine.samples / local * row * (hosts - 1) / hosts / machine.link_bytes_per_s
    sent = ids / machine.ranks * machine.peer_s_per_byte
    return ShardPrice(whole.compute_ps, round((inside + across + sent) * PS_PER_S))


def price_copy(table: TableSpec, machine: TableMachine) -> ShardPrice:
    """One rank's copy of a data-parallel table: its own samples, and every rank's touched rows."""
    own = table.ids_per_sample * machine.batch
    touched = min(float(table.rows), own)
    passes = 2 * own + 2 * machine.batch + 3 * min(float(table.rows), own * machine.ranks)
    compute = passes * table.width * FLOAT_BYTES / machine.memory_bytes_per_s + machine.shard_s
    moved = 8 + touched * (8 + FLOAT_BYTES * table.width)
    exchange = moved * machine.peer_s_per_byte
    return ShardPrice(round(compute * PS_PER_S), round(exchange * PS_PER_S))
