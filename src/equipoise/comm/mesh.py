"""The process groups of a layout, built once and handed down.

Why
    Groups in module globals have given other trainers silently wrong gradients, and groups made
    at first use hang if ranks get there in different orders. All groups of a run are made here,
    by every rank in the same order.

What it decides
    ``peers("tp")`` are the ranks that differ from this one only along tp. A group of one rank has
    no process group, since ``None`` would mean all ranks to torch.

    ``weights`` is the mesh on which a stage's weights are placed: tensor parallelism outside,
    data parallelism inside, so that a weight is first split over tp and each part over dp x cp,
    both evenly and for any size::

        tp = 2, dp x cp = 2        rows of a weight [5, D]

        tp 0, dp 0    0 1          tp 1, dp 0    3
        tp 0, dp 1    2            tp 1, dp 1    4

Kept true (tests/multi/comm/test_mesh.py)
    Every rank's peers are those of ``Layout.group_of``, and a sum over them reaches only them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equipoise.base.axes import REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS
from equipoise.base.errors import LayoutError
from equipoise.comm.group import TIMEOUT, Ranks
from equipoise.comm.mail import LinkGroups
from equipoise.spec.layout import ATTENTION_AXES, EXPERT_AXES, Layout

_AXES = tuple((axis,) for axis in (*ATTENTION_AXES, *EXPERT_AXES))
_COMPOSED = (("dp", "cp"),)
_MESSAGING = (("dp",), ("cp",), ("pp",))
"""Axes along which rank sends to rank: divided documents, shared micro-batches, pipelines."""


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The ranks that differ from this one only along some axes."""

    ranks: tuple[int, ...]
    """Ranks of the world, in the order of the axes."""
    rank: int
    """This rank's number among them."""
    group: dist.ProcessGroup | None
    """None for a rank alone."""
    links: LinkGroups | None = None
    """Where messages between two of them go on devices whose messages have no tags."""

    @property
    def count(self) -> int:
        """Number of peers, with this rank."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """One rank's place in a layout, and the groups that it belongs to."""

    ranks: Ranks
    layout: Layout
    coordinates: Mapping[str, int]
    """This rank's coordinate on each axis of attention and of experts."""
    weights: DeviceMesh
    """The mesh of this stage's weights: axes tp, dp_replicate, dp_shard; the outer two only if
    they have more than one rank."""
    _peers: Mapping[tuple[str, ...], Peers]

    @classmethod
    def join(cls, ranks: Ranks, layout: Layout) -> "Mesh":
        """Make every group of the layout; all ranks call it at the same time.

        Raises:
            LayoutError: the degrees do not multiply to the ranks.

        Cost: a process group for each axis of more than one rank, milliseconds each.
        """
        layout.require_world(ranks.world)
        peers = {
            axes: _join_groups(ranks, layout.groups(*axes).tolist())
            for axes in (*_AXES, *_COMPOSED)
        }
        if not ranks.has_tags:
            for axes in _MESSAGING:
                links = _link(ranks, layout.groups(*axes).tolist())
                peers[axes] = dataclasses.replace(peers[axes], links=links)
        weights = join_weights(ranks, layout)
        coordinates = MappingProxyType(layout.coordinates(ranks.rank))
        return cls(ranks, layout, coordinates, weights, MappingProxyType(peers))

    def peers(self, *axes: str) -> Peers:
        """The ranks that differ from this one only along these axes.

        Args:
            axes: One axis of attention or of experts; or dp, cp.

        Raises:
            LayoutError: no group was made along these axes.
        """
        if axes not in self._peers:
            made = ", ".join(" x ".join(each) for each in self._peers)
            raise LayoutError(f"No group runs along {' x '.join(axes)}. Groups run along {made}.")
        return self._peers[axes]

    def turned(self, axis: str, turn: int) -> Peers:
        """The peers along an axis, numbered from another one; all ranks call it at the same time.

        Args:
            axis: Of attention or of experts.
            turn: Which of the peers is number 0.

        Cost: a process group for each turn that was not asked for before.
        """
        rows = np.roll(self.layout.groups(axis), -turn, axis=1)
        return _join_groups(self.ranks, rows.tolist())


def _join_groups(ranks: Ranks, rows: list[list[int]]) -> Peers:
    """Make disjoint groups of all ranks, unless made before; return this rank's."""
    key = tuple(map(tuple, rows))
    if key not in ranks.made:
        groups = {row: _make_group(ranks, row) for row in key}
        (mine,) = (row for row in key if ranks.rank in row)
        ranks.made[key] = Peers(mine, mine.index(ranks.rank), groups[mine])
    peers: Peers = ranks.made[key]
    return peers


def _link(ranks: Ranks, rows: list[list[int]]) -> LinkGroups | None:
    """Both directions of messages in each of some disjoint groups; None for a rank alone."""
    key = ("links", tuple(map(tuple, rows)))
    if key not in ranks.made:
        mine = None
        for row in key[1]:
            pair = [
                dist.new_group(row, timeout=TIMEOUT, sort_ranks=False)
                for _ in range(2 * (len(row) > 1))
            ]
            if pair and ranks.rank in row:
                mine = LinkGroups(*pair)
        if mine is not None:
            mine.open(ranks.device)
        ranks.made[key] = mine
    links: LinkGroups | None = ranks.made[key]
    return links


def _make_group(ranks: Ranks, row: tuple[int, ...]) -> dist.ProcessGroup | None:
    if len(row) == 1:
        return None
    if row == tuple(range(ranks.world)):
        return dist.group.WORLD
    # Numbered in the row's order, not by rank: an order of axes may not be ascending.
    group: dist.ProcessGroup = dist.new_group(row, timeout=TIMEOUT, sort_ranks=False)
    return group


def join_alone(ranks: Ranks) -> dist.ProcessGroup:
    """A group of this rank alone, which ``fully_shard`` needs if there is nothing to shard."""
    if "alone" not in ranks.made:
        groups = [dist.new_group([rank], timeout=TIMEOUT) for rank in range(ranks.world)]
        ranks.made["alone"] = groups[ranks.rank]
    group: dist.ProcessGroup = ranks.made["alone"]
    return group


def join_weights(ranks: Ranks, layout: Layout) -> DeviceMesh:
    """The mesh on which a stage's weights are placed, made once; every rank calls it.

    Args:
        ranks: All of them.
        layout: Degrees, ZeRO stage and replicas.
    """
    copies = layout.zero_ranks if layout.zero == 0 else layout.replicas
    shape = (layout.pp, layout.tp, copies, layout.zero_ranks // copies)
    grid = layout.grid("pp", "tp", "dp", "cp").reshape(shape)
    names, groups = [], []
    for dim, name in enumerate((TENSOR_AXIS, REPLICATE_AXIS, SHARD_AXIS), start=1):
        if shape[dim] > 1 or name == SHARD_AXIS:
            rows = np.moveaxis(grid, dim, -1).reshape(-1, shape[dim]).tolist()
            names.append(name)
            groups.append(_join_groups(ranks, rows).group or join_alone(ranks))
    stage = grid[layout.coordinates(ranks.rank)["pp"]]
    mesh = stage.reshape([*(size for size in shape[1:3] if size > 1), shape[3]])
    # torch caches meshes and replaces an equal one by the first, so this must be the first.
    key = (tuple(names), mesh.shape, mesh.tobytes())
    if key not in ranks.made:
        ranks.made[key] = DeviceMesh.from_group(
            groups, ranks.device.type, mesh=torch.from_numpy(mesh), mesh_dim_names=tuple(names)
        )
    made: DeviceMesh = ranks.made[key]
    return made
