"""Expert parallelism: experts live on several ranks, and tokens travel to them and back.

Why
    Of the weights of a mixture of experts a token uses few. Spread over ranks, each keeps and
    updates its own experts alone, and computes them for the tokens of all.

What it decides
    Experts 0 and 1 live on rank 0, 2 and 3 on rank 1; digits are the experts of rows::

                       rank 0                 rank 1
        to rank 0, 1   0 0 1 | 2 3 3          1 1 | 2 2 3
        arrived        0 0 1 | 1 1            2 3 3 | 2 2 3
        by expert      0 0   1 1 1            2 2 2   3 3 3
        computed, and the same way back

    First every rank tells every other how many rows come for each of its experts, then the rows
    go, uneven and unpadded. Ranks may send nothing, and receive nothing; they take part in every
    exchange all the same, so all ranks of a group must run the same number of micro-batches.

    The weights of each expert are on one rank of every group along ep, and split by ZeRO along
    edp. Their gradients are sums over the tokens of all ranks: over ep because the tokens came,
    over edp by ``fully_shard``; nobody divides by a number of ranks.

Kept true (tests/multi/test_expert.py)
    Loss and every gradient equal one rank's in fp64, at every ZeRO stage, with experts and ranks
    that no token chose, and numbers of experts that ranks do not divide; what is dropped for want
    of capacity is the same; the bytes sent are those of ``schedule.expert``.

Sources
    GShard: arXiv:2006.16668. Folding over the ranks of attention: arXiv:2504.14960.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from equipoise.base.axes import EXPERT_AXIS, REPLICATE_AXIS, SHARD_AXIS
from equipoise.base.errors import LayoutError
from equipoise.comm.group import TIMEOUT
from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import Mesh, Peers
from equipoise.nn.moe import Experts, MixtureOfExperts
from equipoise.schedule.expert import split_experts


@dataclass(frozen=True, slots=True, eq=False)
class ExpertExchange:
    """Sends rows to the ranks of their experts, and their outputs back."""

    peers: Peers
    """The ranks that share the experts."""
    experts: tuple[int, ...]
    """Experts of each."""
    ledger: Ledger
    """What this rank sent and received."""

    def __call__(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> Tensor:
        """Outputs of rows that are sorted by expert [R, D]."""
        here_NX = self.tell(counts_X)
        by_rank = torch.stack([each.sum() for each in counts_X.split(self.experts)])
        sent, received = by_rank.tolist(), here_NX.sum(1).tolist()
        order_S = sort_arrivals(here_NX)
        arrived_SD = _permute(self.send(x_RD, sent, received), order_S)
        y_SD = _permute(experts(arrived_SD, here_NX.sum(0)), torch.argsort(order_S))
        return self.send(y_SD, received, sent)

    def send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """As ``move``, and gradients come back."""
        out: Tensor = _AllToAll.apply(rows, sent, received, self)  # type: ignore[no-untyped-call]
        return out

    def tell(self, counts_X: Tensor) -> Tensor:
        """Rows that come from each rank for each expert here, int64 [ranks, experts here]."""
        here = self.experts[self.peers.rank]
        told = self.move(counts_X, self.experts, [here] * self.peers.count)
        return told.view(self.peers.count, here)

    def move(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send so many first rows to each rank, and receive as many as each sends."""
        out = rows.new_empty(sum(received), *rows.shape[1:])
        row_bytes = rows.element_size() * rows[:1].numel() if len(rows) else 0
        for peer, (to, by) in enumerate(zip(sent, received, strict=True)):
            if peer != self.peers.rank:
                self.ledger.sent_bytes[peer] += to * row_bytes
                self.ledger.sent_messages[peer] += to > 0
                self.ledger.received_bytes[peer] += by * out[:1].numel() * out.element_size()
        dist.all_to_all_single(
            out, rows.contiguous(), list(received), list(sent), group=self.peers.group
        )
        return out


def sort_arrivals(here_NX: Tensor) -> Tensor:
    """The order that sorts arrived rows, which lie by rank and then by expert, by expert first.

    Args:
        here_NX: Rows from each rank for each expert, int64 [ranks, experts here].

    >>> sort_arrivals(torch.tensor([[1, 2], [2, 0]])).tolist()
    [0, 3, 4, 1, 2]
    """
    ranks, experts = here_NX.shape
    expert = torch.arange(experts, device=here_NX.device).repeat(ranks)
    return torch.argsort(expert.repeat_interleave(here_NX.reshape(-1)), stable=True)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], exchange: ExpertExchange
    ) -> Tensor:
        ctx.way_back = (received, sent, exchange)
        return exchange.move(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent, exchange = ctx.way_back
        return exchange.move(grads[0], received, sent), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; the backward puts gradients back without adding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grads[0][torch.argsort(order)], None


def _permute(rows: Tensor, order: Tensor) -> Tensor:
    out: Tensor = _Permute.apply(rows, order)  # type: ignore[no-untyped-call]
    return out


def spread_experts(module: nn.Module, mesh: Mesh, *, policy: MixedPrecisionPolicy) -> list[Ledger]:
    """Keep of every layer's experts this rank's alone, and let tokens travel to the others.

    To be called by every rank of the mesh, on the same whole weights, before ``fully_shard`` takes
    the rest of the module.

    Args:
        module: Holds ``MixtureOfExperts`` layers.
        mesh: Its ``ep`` ranks share the experts; ZeRO splits each rank's over ``edp``.
        policy: Of mixed precision.

    Returns:
        What this rank will send, one ledger for each layer; none where ep is 1.

    Raises:
        LayoutError: a rank would have no expert, or the weights of each are to be split.
    """
    layout = mesh.layout
    if layout.etp > 1:
        raise LayoutError(
            f"etp = {layout.etp} would split the weights of each expert, and whole experts alone "
            f"can be spread. Set etp = 1 and ep = {layout.ep * layout.etp}."
        )
    if layout.ep == 1:
        return []
    layers = [each for each in module.modules() if isinstance(each, MixtureOfExperts)]
    peers, weights = mesh.peers("ep"), _experts_mesh(mesh)
    is_copied = REPLICATE_AXIS in (weights.mesh_dim_names or ())
    dims = DataParallelMeshDims(shard=SHARD_AXIS, replicate=REPLICATE_AXIS if is_copied else None)
    ledgers = []
    for layer in layers:
        shares = split_experts(layer.router.weight.shape[0], ranks=peers.count)
        first = sum(shares[: peers.rank])
        for matrix in (layer.experts.gate, layer.experts.up, layer.experts.down):
            whole = matrix.weight.detach()
            mine = whole[first : first + shares[peers.rank]].clone()
            matrix.weight = _place(mine, whole, weights)
        fully_shard(
            layer.experts,
            mesh=weights,
            dp_mesh_dims=dims,
            reshard_after_forward=layout.zero == 3,
            mp_policy=policy,
        )
        ledgers.append(Ledger(peers.count))
        layer.exchange = ExpertExchange(peers, tuple(shares), ledgers[-1])
    return ledgers


def _place(mine: Tensor, whole: Tensor, weights: DeviceMesh) -> nn.Parameter:
    placements: list[Placement] = [Shard(0), *[Replicate()] * (weights.ndim - 1)]
    placed = DTensor.from_local(
        mine,
        weights,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    parameter = nn.Parameter(placed)
    # A parameter is a detached tensor, whose spec torch takes from a cache: there it may be of an
    # equal mesh that was made before, and ``fully_shard`` wants this very one.
    parameter._spec = placed._spec  # type: ignore[attr-defined]
    return parameter


def _experts_mesh(mesh: Mesh) -> DeviceMesh:
    """Of the weights of experts: ep outside, so that ZeRO splits what a rank has of them."""
    layout = mesh.layout
    grid = layout.grid("pp", "ep", "edp", "etp")[mesh.coordinates["pp"], :, :, 0]
    alone = [dist.new_group([rank], timeout=TIMEOUT) for rank in range(layout.world)]
    single = alone[mesh.ranks.rank]
    groups = [mesh.peers(axis).group or single for axis in ("ep", "edp")]
    names, shape = [EXPERT_AXIS, SHARD_AXIS], [layout.ep, layout.edp]
    if layout.zero == 0:
        names, shape, groups = (
            [EXPERT_AXIS, REPLICATE_AXIS, SHARD_AXIS],
            [*shape, 1],
            [*groups, single],
        )
    ranks = torch.from_numpy(grid.copy()).reshape(shape)
    return DeviceMesh.from_group(
        groups, mesh.ranks.device.type, mesh=ranks, mesh_dim_names=tuple(names)
    )
