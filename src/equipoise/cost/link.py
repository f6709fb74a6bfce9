"""Seconds of collectives on a group of ranks, by the links that the group crosses.

Why
    The same all-reduce takes 2 ms on one node and 20 ms over a network, depending on the ranks
    and not on the name of the axis. So a group is priced by where its ranks are.

What it decides
    A group is a chain of *levels*, from the innermost block outwards, each with the number of
    ranks that share a block. Rings run through all levels at once, so the slowest level sets the
    pace and the others add their latency::

        time = max over levels of what each needs for its bytes + latency of the outer levels

    Bytes follow the ring: all-gather and reduce-scatter move ``(n - 1) / n`` of the whole
    tensor across each link, all-reduce twice that. At an outer level the ranks of a block share
    its ports, so ``k`` ranks have ``k`` devices' share, and of a trunk between classes that of as
    many as send at the same time. An all-to-all moves what leaves the
    block. The innermost level uses a measured curve if there is one; a faster or slower link
    than the measured one moves proportionally more or fewer bytes in the same time. *Bytes*
    always means the whole tensor: gathered, reduced, scattered, or sent by one rank in an
    all-to-all.

Kept true (tests/unit/cost/test_link.py)
    Groups given by ranks and by stride have equal prices; a group of one costs nothing; no time
    beats the slowest link's peak; renumbering nodes changes nothing. Held-out points:
    ``bench/published/collectives.py``.

Sources
    Rings and their bytes: nccl-tests, PERFORMANCE.md. Pipelined levels: NCCL's rings pass
    through all nodes. Slowest pair of a matrix: Pipette, arXiv:2405.18093.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Flags, Floats, Ints
from equipoise.base.errors import SpecError
from equipoise.cost.curves.grid import Timing
from equipoise.cost.curves.measured import collective_curve
from equipoise.spec.cluster.link import LinkSpec
from equipoise.spec.cluster.spec import ClusterSpec, NodeClass

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
OPS: tuple[Op, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
)

_PEERS_AT_ONCE = 8
"""Messages that NCCL has in flight in an all-to-all (its rounds of 8 peers)."""


@dataclass(frozen=True, slots=True)
class Level:
    """A link that a group crosses, and how the group fills the blocks that the link joins."""

    link: LinkSpec
    bytes_per_s: float
    """Peak of one device's share, one direction."""
    most: Ints
    """Ranks of the group in the fullest block of this level."""
    least: Ints
    """Ranks of the group in the emptiest block that it touches."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, or many similar groups as arrays."""

    size: Ints
    levels: tuple[Level, ...]
    """Innermost first; the last joins all ranks."""


def strided_group(cluster: ClusterSpec, size: npt.ArrayLike, stride: npt.ArrayLike) -> Group:
    """Groups of ``size`` ranks, ``stride`` apart, that begin at the start of a block.

    Args:
        cluster: A cluster of one class, without a bandwidth matrix.
        size: Ranks of each group; arrays broadcast with ``stride``.
        stride: Distance between neighbours: the product of the degrees inside.

    Raises:
        SpecError: the cluster has several classes or a matrix, so ranks must be named.

    Cost: about 0.1 us a group.

    >>> from equipoise.spec.cluster.spec import find_cluster
    >>> group = strided_group(find_cluster("h100-sxm:64"), [8, 16, 8], [1, 1, 8])
    >>> [level.most.tolist() for level in group.levels]
    [[8, 8, 1], [8, 16, 8]]
    """
    if not cluster.is_uniform:
        raise SpecError(
            f"{cluster.name} has {len(cluster.classes)} classes of nodes or measured links, so the "
            f"price depends on where a group is. Name its ranks."
        )
    sizes, strides = np.broadcast_arrays(
        np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
    )
    levels = []
    of = cluster.classes[0]
    for tier in of.tiers:
        inside = np.clip(tier.devices // strides, 1, sizes)
        levels.append(Level(tier.link, tier.link.bytes_per_s, inside, inside))
    if of.nic is not None and of.nodes > 1:
        levels.append(Level(of.nic, of.nic_bytes_per_s, sizes, sizes))
    return Group(sizes, tuple(levels))


def group_of(cluster: ClusterSpec, ranks: npt.ArrayLike, *, at_once: int | None = None) -> Group:
    """The group of these ranks, in ring order.

    Args:
        cluster: Where they stand.
        ranks: Their numbers.
        at_once: Ranks of a class that send to another class at the same time, and share the trunk;
            all of its devices unless given.

    Raises:
        SpecError: a rank is not a device of the cluster, or is named twice.

    >>> from equipoise.spec.cluster.spec import find_cluster
    >>> group = group_of(find_cluster("h100-sxm:64"), [0, 1, 8, 9, 16])
    >>> [(int(level.most), int(level.least)) for level in group.levels]
    [(2, 1), (5, 5)]
    """
    ids = np.asarray(ranks, dtype=np.int64)
    if len(np.unique(ids)) != len(ids):
        raise SpecError(
            f"A group of {len(ids)} ranks names {len(ids) - len(np.unique(ids))} of them twice. "
            f"Name each once."
        )
    node, place, kind = cluster.node_of(ids), cluster.place_in_node(ids), cluster.class_of(ids)
    touched = [cluster.classes[index] for index in np.unique(kind)]
    levels = [
        _level(link, link.bytes_per_s, node * _FAR + place // block)
        for block, link in _tiers(touched)
    ]
    nodes = len(np.unique(node))
    if nodes > 1:
        nics = [each for each in touched if each.nic is not None]
        slow = min(nics, key=lambda each: each.nic_bytes_per_s, default=None)
        if slow is not None and slow.nic is not None:
            rate = min(slow.nic_bytes_per_s, _matrix_rate(cluster, node, ids))
            levels.append(_level(slow.nic, rate, kind))
    if len(touched) > 1:
        if cluster.between is None:
            raise SpecError(
                f"Ranks {int(ids[0])} and {int(ids[kind != kind[0]][0])} stand in "
                f'"{touched[0].name}" and "{touched[1].name}", and {cluster.name} has no link '
                f"between classes. Give cluster.between, or keep the group within a class."
            )
        widest = max(each.devices_per_node for each in touched)
        share = cluster.between.bytes_per_s / widest
        if cluster.trunk_bytes_per_s is not None:
            senders = min(each.devices for each in touched)
            share = min(share, cluster.trunk_bytes_per_s / min(senders, at_once or senders))
        levels.append(_level(cluster.between, share, np.zeros_like(ids)))
    return Group(np.asarray(len(ids)), tuple(levels))


_FAR = 1 << 20
"""Larger than any node has blocks."""


def _tiers(touched: list[NodeClass]) -> list[tuple[int, LinkSpec]]:
    """Blocks inside the nodes of some classes; the slower link where classes differ."""
    tiers: dict[int, LinkSpec] = {}
    for each in touched:
        for tier in each.tiers:
            known = tiers.get(tier.devices)
            if known is None or tier.link.bytes_per_s < known.bytes_per_s:
                tiers[tier.devices] = tier.link
    return sorted(tiers.items(), key=lambda pair: pair[0])


def _level(link: LinkSpec, rate: float, blocks: Ints) -> Level:
    _, counts = np.unique(blocks, return_counts=True)
    return Level(link, rate, np.asarray(counts.max()), np.asarray(counts.min()))


def _matrix_rate(cluster: ClusterSpec, node: Ints, ids: Ints) -> float:
    """A device's share of the slowest pair of nodes on a ring through the ranks in order."""
    if cluster.node_bytes_per_s is None:
        return math.inf
    after = np.roll(node, -1)
    crosses = node != after
    if not crosses.any():
        return math.inf
    sizes = np.array([each.devices_per_node for each in cluster.classes])
    rates = cluster.node_bytes_per_s[node, after] / sizes[cluster.class_of(ids)]
    return float(rates[crosses].min())


def collective_s(op: Op, size_bytes: npt.ArrayLike, group: Group) -> Timing:
    """Seconds of a collective.

    Args:
        op: The collective.
        size_bytes: Bytes of the whole tensor; broadcasts with the group's arrays.
        group: From ``group_of`` or ``strided_group``. ``send`` goes from one rank to another,
            over the outermost link that the group crosses.

    Returns:
        Seconds, flagged if they rest on unmeasured sizes or links.

    Cost: about 1 us a group and size.

    >>> from equipoise.spec.cluster.spec import find_cluster
    >>> node = strided_group(find_cluster("h100-sxm:16"), 8, 1)
    >>> round(float(collective_s("all_reduce", 1 << 29, node).s) * 1e3, 2)
    2.11
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    shape = np.broadcast_shapes(size.shape, group.size.shape)
    pace: Floats = np.zeros(shape)
    latency: Floats = np.zeros(shape)
    flags: Flags = np.zeros(shape, dtype=bool)
    inner: Ints = np.ones_like(group.size)  # ranks that share a block of the level below
    for level in group.levels:
        crosses = level.most > inner
        timing = _level_timing(op, size, group.size, inner, level)
        here = np.broadcast_to(crosses, shape)
        first = np.broadcast_to(inner == 1, shape)
        # A curve includes its own latency; an outer level's comes on top of the pace.
        wait = _latency_s(op, level, inner) * (~first)
        pace = np.where(here, np.maximum(pace, timing.s), pace)
        latency = latency + np.where(here, wait, 0.0)
        flags = flags | (here & timing.extrapolated)
        inner = np.maximum(inner, level.least)
    return Timing(pace + latency, flags)


def _level_timing(op: Op, size: Floats, ranks: Ints, inner: Ints, level: Level) -> Timing:
    """Time of one level for its bytes: by a curve if single ranks meet, else by its rate."""
    rate = level.bytes_per_s * level.link.efficiency * inner
    moved = _moved(op, size, ranks, inner)
    alone = _latency_s(op, level, inner) * (inner == 1)
    s = moved / rate + alone
    flags = np.ones(s.shape, dtype=bool)
    curve = collective_curve(level.link)
    if curve is not None and (inner == 1).any():
        measured = curve.at(op, size * (curve.bytes_per_s / level.bytes_per_s), level.most)
        use = np.broadcast_to(inner == 1, s.shape)
        s = np.where(use, measured.s, s)
        flags = np.where(use, measured.extrapolated, flags)
    return Timing(s, flags)


def _moved(op: Op, size: Floats, ranks: Ints, inner: Ints) -> Floats:
    """Bytes that one block's ranks together pass to the next, divided by their ports."""
    ring = (ranks - 1) / np.maximum(ranks, 1)
    if op == "all_reduce":
        return np.asarray(2 * ring * size)
    if op in ("all_gather", "reduce_scatter"):
        return np.asarray(ring * size)
    if op == "all_to_all":
        return np.asarray((ranks - inner) / np.maximum(ranks, 1) * size * inner)
    if op == "broadcast":
        return np.asarray(size * np.ones_like(ranks), dtype=np.float64)
    # One rank sends through its own port; the block's other ports do not help.
    return np.asarray(size * inner, dtype=np.float64)


def _latency_s(op: Op, level: Level, inner: Ints) -> Floats:
    """Latency of the messages that follow each other across one level."""
    blocks = np.maximum(level.most / inner, 1.0)
    hop = level.link.latency_s
    if op == "all_reduce":  # a tree if it is faster than the ring
        return np.asarray(hop * 2 * np.minimum(blocks - 1, np.ceil(np.log2(blocks)) + 1))
    if op in ("all_gather", "reduce_scatter"):
        return np.asarray(hop * (blocks - 1))
    if op == "all_to_all":
        return np.asarray(hop * np.ceil(np.maximum(level.most - inner, 0) / _PEERS_AT_ONCE))
    if op == "broadcast":
        return np.asarray(hop * np.ceil(np.log2(blocks)))
    return np.asarray(hop * np.ones_like(blocks))
