"""The process groups of a layout, built once and handed down.

Why
    Groups in module globals have given other trainers silently wrong gradients, and groups that
    are made where they are first used hang when ranks come there in another order. All groups
    of a run are made here, by every rank in the same order.

What it decides
    ``peers("tp")`` are the ranks that differ from this one along tp alone. A group of one rank has
    no process group, so that nobody takes it for all ranks.

    ``weights`` is the mesh on which a stage's weights are placed: tensor parallelism outside,
    data parallelism inside, so that a weight is first split over tp and each part over dp x cp,
    both plain and of any size::

        tp = 2, dp x cp = 2        rows of a weight [5, D]

        tp 0, dp 0    0 1          tp 1, dp 0    3
        tp 0, dp 1    2            tp 1, dp 1    4

Kept true (tests/multi/test_mesh.py)
    Every rank's peers are those of ``Layout.group_of``, and a sum over them reaches them alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equipoise.base.axes import REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS
from equipoise.base.errors import LayoutError
from equipoise.comm.group import TIMEOUT, Ranks
from equipoise.spec.layout import ATTENTION_AXES, EXPERT_AXES, Layout

_AXES = tuple((axis,) for axis in (*ATTENTION_AXES, *EXPERT_AXES))
_COMPOSED = (("dp", "cp"),)


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The ranks that differ from this one along some axes alone."""

    ranks: tuple[int, ...]
    """Ranks of the world, in the order of the axes."""
    rank: int
    """This rank's number among them."""
    group: dist.ProcessGroup | None
    """None where it is alone."""

    @property
    def count(self) -> int:
        """How many they are, this one included."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """One rank's place in a layout, and the groups that it belongs to."""

    ranks: Ranks
    layout: Layout
    coordinates: Mapping[str, int]
    """Where this rank stands on each axis, of attention and of experts."""
    weights: DeviceMesh
    """Of the weights of this rank's stage: axes tp, dp_replicate, dp_shard; the outer two only
    where they are of more than one rank."""
    _peers: Mapping[tuple[str, ...], Peers]

    @classmethod
    def join(cls, ranks: Ranks, layout: Layout) -> "Mesh":
        """Make every group of the layout; all ranks call it at the same time.

        Raises:
            LayoutError: the degrees do not multiply to the ranks.

        Cost: a process group for each axis of more than one rank, milliseconds each.
        """
        layout.require_world(ranks.world)
        made: dict[tuple[tuple[int, ...], ...], Peers] = {}

        def join_groups(rows: list[list[int]]) -> Peers:
            key = tuple(map(tuple, rows))
            if key not in made:
                made[key] = _join_groups(ranks, rows)
            return made[key]

        peers = {axes: join_groups(layout.groups(*axes).tolist()) for axes in (*_AXES, *_COMPOSED)}
        weights = _weights_mesh(ranks, layout, peers["tp",], join_groups)
        coordinates = MappingProxyType(layout.coordinates(ranks.rank))
        return cls(ranks, layout, coordinates, weights, MappingProxyType(peers))

    def peers(self, *axes: str) -> Peers:
        """The ranks that differ from this one along these axes alone.

        Args:
            axes: One axis of attention or of experts; or dp, cp.

        Raises:
            LayoutError: no group was made along these.
        """
        if axes not in self._peers:
            made = ", ".join(" x ".join(each) for each in self._peers)
            raise LayoutError(f"No group runs along {' x '.join(axes)}. Groups run along {made}.")
        return self._peers[axes]


def _join_groups(ranks: Ranks, rows: list[list[int]]) -> Peers:
    """Make these groups, of which each rank is in one."""
    found: Peers | None = None
    for row in rows:
        group = None
        if len(row) == ranks.world and row == sorted(row):
            group = dist.group.WORLD
        elif len(row) > 1:
            # Numbered as the row says, not by rank: an order of axes may not be ascending.
            group = dist.new_group(row, timeout=TIMEOUT, sort_ranks=False)
        if ranks.rank in row:
            found = Peers(tuple(row), row.index(ranks.rank), group)
    assert found is not None  # noqa: S101  the groups of a layout partition its ranks
    return found


def _weights_mesh(
    ranks: Ranks,
    layout: Layout,
    tensor: Peers,
    join_groups: Callable[[list[list[int]]], Peers],
) -> DeviceMesh:
    copies = layout.zero_ranks if layout.zero == 0 else layout.replicas
    shape = (layout.pp, layout.tp, copies, layout.zero_ranks // copies)
    grid = layout.grid("pp", "tp", "dp", "cp").reshape(shape)
    stage = torch.from_numpy(grid[layout.coordinates(ranks.rank)["pp"]])
    names, dims, groups = [], [], []
    for dim, name in enumerate((TENSOR_AXIS, REPLICATE_AXIS, SHARD_AXIS)):
        if shape[dim + 1] == 1 and name != SHARD_AXIS:
            continue
        rows = np.moveaxis(grid, dim + 1, -1).reshape(-1, shape[dim + 1]).tolist()
        group = (tensor if name == TENSOR_AXIS else join_groups(rows)).group
        if group is None:  # ``fully_shard`` wants a group also where there is nothing to shard
            group = [dist.new_group([rank], timeout=TIMEOUT) for rank in range(ranks.world)][
                ranks.rank
            ]
        names.append(name)
        dims.append(dim)
        groups.append(group)
    mesh = stage.reshape([shape[dim + 1] for dim in dims])
    return DeviceMesh.from_group(groups, ranks.device.type, mesh=mesh, mesh_dim_names=tuple(names))
