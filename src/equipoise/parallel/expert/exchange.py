"""Expert parallelism: experts live on several ranks, and tokens travel to them and back.

Why
    A token uses few of the weights of a mixture of experts. Spread over ranks, each keeps and
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

    Where ranks do not divide the experts, each layer gives its shorter run to another rank
    (``spec.model.experts.turn_of``): all of a layer's exchanges number ranks from the one that has
    its first run.

    The weights of each expert are on one rank of every group along ep, and split by ZeRO along
    edp. Their gradients are sums over the tokens of all ranks: over ep because the tokens came,
    over edp by ``fully_shard``; nobody divides by a number of ranks.

Kept true (tests/multi/parallel/test_expert.py)
    Loss and every gradient equal one rank's in fp64, at every ZeRO stage, with experts and ranks
    that no token chose, and numbers of experts that ranks do not divide; what is dropped for want
    of capacity is the same; the bytes sent are those of ``schedule.expert.schedule``.

Sources
    GShard: arXiv:2006.16668. Folding over the ranks of attention: arXiv:2504.14960.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from equipoise.base.axes import EXPERT_AXIS, EXPERT_TENSOR_AXIS, REPLICATE_AXIS, SHARD_AXIS
from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import Mesh, Peers, join_alone
from equipoise.nn.decoder import Decoder
from equipoise.nn.moe.layer import ExchangeSteps, Experts, MixtureOfExperts, run_steps
from equipoise.nn.shuffle import permute_rows
from equipoise.nn.tensor import part_of
from equipoise.parallel.expert.split import ExpertSplit
from equipoise.parallel.expert.tiers import ExpertTiers
from equipoise.parallel.overlap.travel import RowsTravel
from equipoise.spec.model.experts import require_units, split_experts, turn_of


@dataclass(slots=True)
class Travelled:
    """What rows took since this was last read, forward and backward, there and back."""

    beside_s: float = 0.0
    """This rank computed meanwhile, or ran other exchanges."""
    waited_s: float = 0.0
    """And then waited for them."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertExchange:
    """Sends rows to the ranks of their experts, and their outputs back."""

    peers: Peers
    """The ranks that share the experts."""
    experts: tuple[int, ...]
    """Experts of each."""
    ledger: Ledger
    """What this rank sent and received."""
    split: ExpertSplit | None
    """The ranks that share the weights of each expert, if this one does not have them whole."""
    travelled: Travelled = field(default_factory=Travelled)

    def __call__(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> Tensor:
        """Outputs [R, D]; rows are sorted by expert, ``counts_X`` rows each."""
        return run_steps(self.steps(x_RD, counts_X, experts))

    def steps(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> ExchangeSteps:
        """As ``__call__``, in steps."""
        here_NX = self.tell(counts_X)
        by_rank = torch.stack([each.sum() for each in counts_X.split(self.experts)])
        totals = [by_rank, here_NX.sum(1)]
        all_NX = here_NX
        if self.split is not None:
            all_NX = self.split.tell(here_NX)
            totals.append(all_NX.flatten(1).sum(1))
        # Sizes of messages must be known on the host: a layer's forward waits here, and nowhere
        # else.
        known: list[int] = torch.cat(totals).tolist()
        ranks = self.peers.count
        sent, received, sizes = known[:ranks], known[ranks : 2 * ranks], known[2 * ranks :]
        out, back = self.way(sent, received), self.way(received, sent)
        left = out.start(x_RD)
        yield
        arrived_SD = out.finish(left)
        if self.split is None:
            y_SD = self.compute(arrived_SD, here_NX, experts)
        else:
            all_SD = self.split.gather(arrived_SD, sizes)
            parts_SD = self.compute(all_SD, all_NX.flatten(0, 1), experts)
            y_SD = self.split.sum_back(parts_SD, sizes)
        left = back.start(y_SD)
        yield
        return back.finish(left)

    def compute(self, rows: Tensor, here_NX: Tensor, experts: Experts) -> Tensor:
        """Outputs of rows that lie by rank and then by expert, in the same order."""
        order = sort_arrivals(here_NX, len(rows))
        return permute_rows(
            experts(permute_rows(rows, order), here_NX.sum(0)), torch.argsort(order)
        )

    def send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """As ``move``, and gradients come back."""
        way = self.way(sent, received)
        return way.finish(way.start(rows))

    def way(self, sent: list[int], received: list[int]) -> RowsTravel:
        """The way of runs of rows to the ranks, in order; a length for each rank."""
        return RowsTravel(self.peers.group, sent, received, self)

    def leave(self, row_bytes: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Add to the ledger what travels once."""
        for peer, (to, by) in enumerate(zip(sent, received, strict=True)):
            if peer != self.peers.rank:
                self.ledger.sent_bytes[peer] += to * row_bytes
                self.ledger.sent_messages[peer] += to > 0
                self.ledger.received_bytes[peer] += by * row_bytes

    def arrive(self, beside_s: float, waited_s: float) -> None:
        """Add to what rows took."""
        self.travelled.beside_s += beside_s
        self.travelled.waited_s += waited_s

    def tell(self, counts_X: Tensor) -> Tensor:
        """Rows that come from each rank for each expert here, int64 [ranks, experts here]."""
        here = self.experts[self.peers.rank]
        arrived = self.move(counts_X, self.experts, [here] * self.peers.count)
        return arrived.view(self.peers.count, here)

    def move(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send runs of rows to the ranks, in order, and receive theirs; a length for each rank."""
        if self.peers.count == 1:
            return rows.view_as(rows)
        out = rows.new_empty(sum(received), *rows.shape[1:])
        self.leave(rows.element_size() * rows.shape[1:].numel(), sent, received)
        dist.all_to_all_single(
            out, rows.contiguous(), list(received), list(sent), group=self.peers.group
        )
        return out


def sort_arrivals(here_NX: Tensor, rows: int) -> Tensor:
    """The order that sorts arrived rows, which lie by rank and then by expert, by expert first.

    Args:
        here_NX: Rows from each rank for each expert, int64 [ranks, experts here].
        rows: Their sum, which the host knows.

    >>> sort_arrivals(torch.tensor([[1, 2], [2, 0]]), 5).tolist()
    [0, 3, 4, 1, 2]
    """
    ranks, experts = here_NX.shape
    expert = torch.arange(experts, device=here_NX.device).repeat(ranks)
    # Without their number the host would wait for the counts.
    arrived = expert.repeat_interleave(here_NX.reshape(-1), output_size=rows)
    return torch.argsort(arrived, stable=True)


def spread_experts(
    module: Decoder,
    mesh: Mesh,
    *,
    policy: MixedPrecisionPolicy,
    tiers: ExpertTiers | None = None,
    turns: bool = True,
) -> list[Ledger]:
    """Keep of every layer's experts this rank's alone, and let tokens travel to the others.

    To be called by every rank of the mesh, on the same whole weights, before ``fully_shard`` takes
    the rest of the module.

    Args:
        module: Holds ``MixtureOfExperts`` layers.
        mesh: Its ``ep`` ranks share the experts, and ``etp`` ranks the hidden units of each; ZeRO
            splits what a rank has of them over ``edp``.
        policy: Of mixed precision.
        tiers: Takes what a rank has of them, instead of ZeRO.
        turns: Whether layers whose runs of experts differ give the shorter one to a rank in turn.

    Returns:
        What this rank will send over ep, one ledger for each layer, in the layer's own numbers of
        ranks; none where ranks share no experts.

    Raises:
        LayoutError: a rank would have no expert, or no hidden unit of its experts.
    """
    layout = mesh.layout
    if layout.ep * layout.etp == 1 and tiers is None:
        return []
    layers, sharers, experts = sparse_layers(module), mesh.peers("etp"), module.model.experts
    split = ExpertSplit(sharers) if sharers.count > 1 else None
    dims = DataParallelMeshDims(
        shard=SHARD_AXIS, replicate=REPLICATE_AXIS if layout.zero == 0 else None
    )
    turned = turns and tiers is None
    # Every rank makes all groups, whatever layers its stages have.
    places = [
        (mesh.turned("ep", turn), _experts_mesh(mesh, turn))
        for turn in range(layout.ep)
        if not turn or (turned and turn_of(turn, experts=experts, ranks=layout.ep))
    ]
    ledgers = []
    for at, layer in enumerate(layers):
        peers, weights = places[at % len(places)]
        shares = split_experts(experts, ranks=peers.count)
        first = sum(shares[: peers.rank])
        parts = layer.experts
        for matrix, dim in ((parts.gate, 1), (parts.up, 1), (parts.down, 2)):
            whole = matrix.weight.detach()
            units = _units(whole.shape[dim], sharers)
            mine = whole[first : first + shares[peers.rank]].narrow(dim, units.start, len(units))
            is_trained = matrix.weight.requires_grad
            matrix.weight = _place(mine, whole, weights, dim, is_trained=is_trained)
        if tiers is not None:
            longest = -(-shares[0] // layout.edp)
            tiers.add(layer.experts, longest, weights, [Shard(0)] * weights.ndim)
        else:
            fully_shard(
                layer.experts,
                mesh=weights,
                dp_mesh_dims=dims,
                reshard_after_forward=layout.zero == 3,
                mp_policy=policy,
            )
        if peers.count * sharers.count == 1:
            continue
        ledgers.append(Ledger(peers.count))
        layer.exchange = ExpertExchange(peers, tuple(shares), ledgers[-1], split)
    return ledgers


def sparse_layers(module: nn.Module) -> list[MixtureOfExperts]:
    """The layers with experts, in order."""
    return [each for each in module.modules() if isinstance(each, MixtureOfExperts)]


def _units(ffn: int, sharers: Peers) -> range:
    """The hidden units of this rank."""
    require_units(ffn, ranks=sharers.count)
    return part_of(ffn, ranks=sharers.count, rank=sharers.rank)


def _place(
    mine: Tensor, whole: Tensor, weights: DeviceMesh, dim: int, *, is_trained: bool
) -> nn.Parameter:
    of_axis = {EXPERT_AXIS: Shard(0), EXPERT_TENSOR_AXIS: Shard(dim)}
    names = weights.mesh_dim_names or ()
    placements: list[Placement] = [of_axis.get(name, Replicate()) for name in names]
    placed = DTensor.from_local(
        mine.clone(memory_format=torch.contiguous_format),
        weights,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    parameter = nn.Parameter(placed, is_trained)
    # A parameter is a detached tensor, whose spec torch takes from a cache: there it may be of an
    # equal mesh that was made before, and ``fully_shard`` wants this very one.
    parameter._spec = placed._spec  # type: ignore[attr-defined]
    return parameter


def _experts_mesh(mesh: Mesh, turn: int) -> DeviceMesh:
    """The mesh of experts' weights: ZeRO innermost, so that it splits what a rank has of them.

    Ranks along ep are numbered as ``Mesh.turned`` does.
    """
    layout = mesh.layout
    grid = layout.grid("pp", "ep", "etp", "edp")[mesh.coordinates["pp"]]
    grid = np.roll(grid, -turn, axis=0)
    alone = join_alone(mesh.ranks)
    # No axis of one rank: torch plans a sum of gradients in time that is exponential in axes.
    both = ((EXPERT_AXIS, "ep"), (EXPERT_TENSOR_AXIS, "etp"))
    axes: list[tuple[str, str | None]] = [each for each in both if layout.size(each[1]) > 1]
    axes += (
        [(REPLICATE_AXIS, "edp"), (SHARD_AXIS, None)] if layout.zero == 0 else [(SHARD_AXIS, "edp")]
    )
    shape = [1 if axis is None else layout.size(axis) for _, axis in axes]
    groups = [(axis and _group_of(mesh, axis, turn)) or alone for _, axis in axes]
    names = [name for name, _ in axes]
    ranks = torch.from_numpy(grid.copy()).reshape(shape)
    return DeviceMesh.from_group(
        groups, mesh.ranks.device.type, mesh=ranks, mesh_dim_names=tuple(names)
    )


def _group_of(mesh: Mesh, axis: str, turn: int) -> dist.ProcessGroup | None:
    peers = mesh.turned(axis, turn) if axis == "ep" else mesh.peers(axis)
    return peers.group
