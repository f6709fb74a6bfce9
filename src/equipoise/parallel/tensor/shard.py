"""Tensor and sequence parallelism: each rank gets its share of the weights, and its peers.

What it decides
    Weights become DTensors on the mesh of weights: split over tp as their modules declare, whole
    over data-parallel ranks, which ``parallel.zero.shard`` then shards. So names, whole tensors,
    norms and checkpoints are those of one rank, whatever the layout.

    A key/value head that ranks do not divide is copied, the run of heads that a rank's queries
    read is computed, and gradients are summed: exact for any number of heads, for the memory of
    the copies.

Kept true (tests/multi/parallel/test_tensor.py)
    Loss and every gradient equal one rank's in float64 at 1 to 4 ranks, with data and context
    parallelism, where a rank has no token; a rerun is bitwise the same.

Sources
    Tensor parallelism: arXiv:1909.08053. Sequence parallelism: arXiv:2205.05198.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from equipoise.base.axes import TENSOR_AXIS
from equipoise.comm.mesh import Mesh, Peers
from equipoise.nn.declare import Placement, Split, declared
from equipoise.nn.decoder import Attention, Decoder, DecoderLayer
from equipoise.nn.tensor import part_of
from equipoise.parallel.overlap.feed import feed_in_parts, gather_in_parts, sum_in_parts
from equipoise.parallel.overlap.parts import PartedSites, Parts
from equipoise.parallel.tensor.rows import enter, leave


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """This rank among those that share its weights; a ``nn.tensor.TensorRanks``."""

    peers: Peers
    sites: PartedSites = field(default_factory=lambda: PartedSites(1))
    """In how many parts rows of a block travel, each while the one before is computed."""
    ffn: int = 0
    """Hidden units of a feed-forward that this rank has."""

    @property
    def ranks(self) -> int:
        """How many they are."""
        return self.peers.count

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.peers.rank

    def enter(self, x_tD: Tensor, tokens: int) -> Tensor:
        """Every rank's rows; the backward sums their gradients."""
        return enter(x_tD, tokens, self.peers)

    def leave(self, partial_TD: Tensor) -> Tensor:
        """This rank's rows of the sum."""
        return leave(partial_TD, self.peers)

    def through(self, x_tD: Tensor, tokens: int, f: Callable[[Tensor], Tensor]) -> Tensor:
        """This rank's rows of the sum of ``f`` of every rank's rows."""
        hidden = x_tD.shape[1]
        sent = 2 * tokens * hidden * x_tD.element_size() * (self.ranks - 1) / self.ranks
        flop = 6.0 * tokens * hidden * self.ffn
        parts = self.sites.choose(flop=flop, moved_bytes=sent, most=tokens // self.ranks)
        if parts == 1:
            return self.leave(f(self.enter(x_tD, tokens)))
        return feed_in_parts(x_tD, tokens, f, self.peers, parts)

    def enter_through(
        self, x_tD: Tensor, tokens: int, f: Callable[[Tensor], tuple[Tensor, ...]], columns: int
    ) -> tuple[Tensor, ...]:
        """``f`` of every rank's rows."""
        parts = self._choose(x_tD, tokens, x_tD.shape[1], columns)
        if parts == 1:
            return f(self.enter(x_tD, tokens))
        return gather_in_parts(x_tD, tokens, f, self.peers, parts)

    def leave_through(self, x_TC: Tensor, f: Callable[[Tensor], Tensor], columns: int) -> Tensor:
        """This rank's rows of the sum of every rank's ``f``."""
        parts = self._choose(x_TC, len(x_TC), columns, x_TC.shape[1])
        if parts == 1:
            return self.leave(f(x_TC))
        return sum_in_parts(x_TC, f, self.peers, parts)

    def _choose(self, x: Tensor, tokens: int, hidden: int, columns: int) -> int:
        """Parts of rows of a hidden width that travel one way, beside a product to columns."""
        sent = tokens * hidden * x.element_size() * (self.ranks - 1) / self.ranks
        flop = 2.0 * tokens * hidden * columns
        return self.sites.choose(flop=flop, moved_bytes=sent, most=tokens // self.ranks, ways=1)

    def max_(self, x: Tensor) -> Tensor:
        """The largest over ranks."""
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.peers.group)
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """The sum in the order of ranks, which every one computes alike."""
        parts = x.new_empty(self.ranks * x.numel())
        dist.all_gather_single(parts, x.flatten(), group=self.peers.group)
        return x.copy_(parts.view(self.ranks, *x.shape).sum(0))

    def join_columns(self, x_Tv: Tensor, columns: int) -> Tensor:
        """Every rank's columns side by side; the last ranks may have fewer, or none."""
        longest = -(-columns // self.ranks)
        padded = x_Tv.new_zeros(len(x_Tv), longest)
        padded[:, : x_Tv.shape[1]] = x_Tv.detach()
        parts = x_Tv.new_empty(self.ranks * padded.numel())
        dist.all_gather_single(parts, padded.flatten(), group=self.peers.group)
        by_rank = parts.view(self.ranks, *padded.shape).unbind()
        return torch.cat(by_rank, dim=1)[:, :columns].contiguous()


def split_weights(decoder: Decoder, mesh: Mesh, *, parts: Parts = 1) -> None:
    """Leave each rank its share of a decoder's weights, and let its blocks know of the others.

    Args:
        decoder: Whole, and the same on every rank.
        mesh: Of a layout whose tp is more than one rank.
        parts: In how many rows of a block travel.

    Raises:
        LayoutError: the model does not divide over tp, or a weight is declared by no module.
    """
    mesh.layout.require_model(decoder.model)
    # It warns that putting a weight together that is split twice takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    placements = declared(decoder)
    peers = mesh.peers("tp")
    owners = dict(decoder.named_modules())
    for name, parameter in list(decoder.named_parameters()):
        if isinstance(parameter, DTensor):
            continue  # an expert's, which has its place on other axes
        stem, _, key = name.rpartition(".")
        share = _share(parameter, placements[name], mesh.weights, peers)
        owners[stem].register_parameter(key, nn.Parameter(share, parameter.requires_grad))
    group = TensorGroup(peers, PartedSites(parts), decoder.model.ffn // peers.count)
    for module in decoder.modules():
        if isinstance(module, Attention | DecoderLayer | Decoder):
            module.tensor = group


def _share(weight: Tensor, placement: Placement, mesh: DeviceMesh, peers: Peers) -> DTensor:
    """A whole weight placed on a mesh; this rank keeps its part alone."""
    places: list[Replicate | Shard] = [Replicate() for _ in range(mesh.ndim)]
    part = weight.detach()
    if isinstance(placement, Split) and (placement.parts or peers.count) % peers.count == 0:
        own = part_of(weight.shape[placement.dim], ranks=peers.count, rank=peers.rank)
        part = part.narrow(placement.dim, own.start, len(own))
        places[(mesh.mesh_dim_names or ()).index(TENSOR_AXIS)] = Shard(placement.dim)
    return DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),
        mesh,
        places,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
