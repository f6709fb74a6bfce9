"""What ranks of meshes and of tensor parallelism run in these tests."""

import torch
import torch.distributed as dist

from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.spec.layout import Layout


def mesh_of(
    ranks: Ranks, layouts: list[Layout], axes: list[tuple[str, ...]]
) -> list[dict[tuple[str, ...], tuple[list[int], int, int]]]:
    """Of each layout and axes: the peers, this rank's number, and the sum of their ranks."""
    found = []
    for layout in layouts:
        mesh = Mesh.join(ranks, layout)
        rows = {}
        for each in axes:
            peers = mesh.peers(*each)
            total = torch.tensor(ranks.rank)
            if peers.group is not None:
                dist.all_reduce(total, group=peers.group)
                assert dist.get_rank(peers.group) == peers.rank
            rows[each] = (list(peers.ranks), peers.rank, int(total))
        found.append(rows)
    return found


def weights_mesh_of(
    ranks: Ranks, layouts: list[Layout]
) -> list[tuple[tuple[str, ...], list[int], list[int], list[int]]]:
    """Of each layout's mesh of weights: names, sizes, this rank's place and the sum of each dim."""
    found = []
    for layout in layouts:
        weights = Mesh.join(ranks, layout).weights
        sums = []
        for dim in range(weights.ndim):
            total = torch.tensor(ranks.rank)
            dist.all_reduce(total, group=weights.get_group(dim))
            sums.append(int(total))
        place = weights.get_coordinate()
        found.append((weights.mesh_dim_names, list(weights.shape), list(place), sums))
    return found


def join_mesh(ranks: Ranks, layout: Layout, axis: str) -> None:
    Mesh.join(ranks, layout).peers(axis)
