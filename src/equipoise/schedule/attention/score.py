"""Score an attention strategy: what it moves, how even it is, how long it takes.

Why
    A table, JSON and a drawing compare strategies by the same figures; they are collected here.

What it decides
    How much of the predicted time is *exposed communication*: what free links would save. The
    remaining waits are for other ranks' tiles, which no link can shorten.

Kept true (tests/unit/schedule/attention/test_score.py)
    Compute of the busiest rank, waiting for peers and exposed communication add up to the
    predicted time, and none is negative.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import LayoutError
from equipoise.schedule.attention.count import AttentionCounts, Wire, count_attention
from equipoise.schedule.attention.price import AttentionPrice, LinkPrice, price_attention
from equipoise.schedule.attention.schedule import AttentionSchedule


@dataclass(frozen=True, slots=True)
class AssumedMachine:
    """Speeds that a prediction assumes."""

    flop_per_s: float
    """Speed of one rank's attention, in whole blocks."""
    link: LinkPrice
    """Link between any two ranks; if ``link_in_node`` is given, between nodes."""
    link_in_node: LinkPrice | None = None
    ranks_per_node: int | None = None
    """Ranks that share a node; with ``link_in_node``."""
    block: int = 1
    """Queries and keys of a kernel's block; tiles are computed in whole blocks [tokens]."""
    tile_s: float = 0.0
    """Fixed time of each tile's kernel in the forward pass [s]."""

    def __post_init__(self) -> None:
        if not self.flop_per_s > 0:
            raise LayoutError(
                f"A rank's speed is {self.flop_per_s:g} FLOP/s. Give a speed above 0."
            )
        if self.block < 1 or not 0 <= self.tile_s < float("inf"):
            raise LayoutError(
                f"A kernel's block is {self.block} tokens and its fixed time {self.tile_s:g} s. "
                f"Give 1 or more and 0 or more."
            )

    def __str__(self) -> str:
        links = _write_link(self.link)
        if self.link_in_node is not None:
            links = f"{_write_link(self.link_in_node)} within a node, {links} between nodes"
        blocks = "" if self.block == 1 else f" in blocks of {self.block}"
        tile = f"{1e6 * self.tile_s:g} us a tile, " if self.tile_s else ""
        return f"{self.flop_per_s / 1e12:g} TFLOP/s a rank{blocks}, {tile}links of {links}"


def _write_link(link: LinkPrice) -> str:
    return f"{1e6 * link.latency_s:g} us and {link.bytes_per_s / 1e9:g} GB/s"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScore:
    """One attention layer, forward and backward, under one strategy."""

    name: str
    sharding: str
    schedule: AttentionSchedule
    wire: Wire
    counts: AttentionCounts
    price: AttentionPrice
    exposed_ns: float
    """Predicted time that free links would save [ns]."""

    @property
    def messages(self) -> int:
        """Messages of both passes."""
        return 2 * int(self.counts.messages.sum())

    @property
    def compute_ns(self) -> float:
        """Compute of the busiest rank, both passes [ns]."""
        return float(self.price.compute_ns.max(initial=0.0))

    @property
    def peers_ns(self) -> float:
        """The rest of the predicted time: waiting for the tiles of others [ns]."""
        return max(0.0, self.price.total_ns - self.compute_ns - self.exposed_ns)

    @property
    def exposed_share(self) -> float:
        """Exposed communication over the predicted time; 0 if that is 0."""
        return self.exposed_ns / self.price.total_ns if self.price.total_ns else 0.0


def price_on(
    schedule: AttentionSchedule, wire: Wire, machine: AssumedMachine, *, is_free: bool = False
) -> AttentionPrice:
    """Predict a schedule's time on an assumed machine.

    ``is_free`` assumes links that take no time.
    """
    head_flop = 4 * wire.head_width  # QK and PV, 2 each

    def tile_ns(
        pairs: npt.NDArray[np.float64], _: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        return pairs * (1e9 * head_flop * schedule.heads / machine.flop_per_s)

    near = machine.link if machine.link_in_node is None else machine.link_in_node
    return price_attention(
        schedule,
        tile_ns,
        LinkPrice(0.0, float("inf")) if is_free else near,
        wire,
        node_link=None if is_free else machine.link,
        ranks_per_node=machine.ranks_per_node,
        block=machine.block,
        call_ns=1e9 * machine.tile_s,
    )


def score_attention(
    schedule: AttentionSchedule,
    wire: Wire,
    machine: AssumedMachine,
    *,
    sharding: str,
    name: str | None = None,
) -> AttentionScore:
    """Count and price one schedule.

    ``sharding`` and ``name`` are the names to show for the placement and the strategy.

    Cost: twice ``price_attention``, and ``count_attention``.

    >>> from equipoise.schedule.attention.strategies import write_attention
    >>> home = [np.array([[0, 0, 4]]), np.array([[0, 4, 6]])]
    >>> schedule = write_attention("ring", home, [6], heads=2, kv_heads=1)
    >>> machine = AssumedMachine(1e12, LinkPrice(1e-6, 1e9))
    >>> score = score_attention(schedule, Wire(8), machine, sharding="contiguous")
    >>> score.messages, score.counts.total_bytes
    (4, 576)
    """
    price = price_on(schedule, wire, machine)
    free = price_on(schedule, wire, machine, is_free=True)
    return AttentionScore(
        name=schedule.strategy if name is None else name,
        sharding=sharding,
        schedule=schedule,
        wire=wire,
        counts=count_attention(schedule, wire),
        price=price,
        exposed_ns=max(0.0, price.total_ns - free.total_ns),
    )
