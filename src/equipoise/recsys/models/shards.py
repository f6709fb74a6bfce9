"""The dense part over ranks: a copy on each, or shards inside hosts and copies over hosts.

Why
    DHEN's layers grow past a rank's memory, and links between hosts are slow. Shards over the
    ranks of a host are gathered over its own links; hosts exchange sums of shards alone.

What it decides
    Under ``layout.zero = 0`` all weights are on each rank, and gradients are summed once a step.
    Under 3 ranks are a mesh of hosts x ranks of a host. ``fully_shard`` divides weights, gradients
    and Adam's moments along the second axis, layer by layer::

        gather    inside a host, before a layer's forward and again before its backward
        scatter   inside a host: each rank gets the sum of the host's gradients of its shard
        across    between ranks of equal place in all hosts: the sum of these sums

    Sums are taken in the order of ranks, then of hosts. To score, ranks gather all weights once,
    since they may have different numbers of samples.

Kept true (tests/multi/recsys/test_models.py)
    Loss and every gradient are those of one process, reruns are equal to the bit, bytes are those
    of ``schedule.tables.traffic.count_dense_bytes``, and checkpoints are those of copies.

Sources
    Hybrid sharding: B. Zhang et al., arXiv:2203.11014, section 3.3; torch 2.13's ``fully_shard``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from equipoise.base.axes import REPLICATE_AXIS, SHARD_AXIS
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.comm.meter import WaitMeter
from equipoise.parallel.zero.exchange import ExchangeGather, ExchangeReduce
from equipoise.schedule.tables.traffic import DENSE_STAGES
from equipoise.spec.layout import Layout
from equipoise.spec.recommend import RecommendSpec


class DensePart:
    """The dense part of a run on one rank, with its optimizer."""

    def __init__(self, spec: RecommendSpec, model: nn.Module, rank: int, ranks: int) -> None:
        """Divide a model that all ranks have drawn alike, if the run says so; all call it together.

        Args:
            spec: The run.
            model: Whole; its weights become shards in place.
            rank: This one.
            ranks: How many there are; alone nothing is divided.
        """
        self.model, self.ranks = model, ranks
        self.meter = WaitMeter()
        """What this rank waits in exchanges of a divided model."""
        self.sent = dict.fromkeys(DENSE_STAGES, 0)
        """Bytes that it has sent in them, by stage."""
        self._parts: list[FSDPModule] = []
        if spec.layout.zero and ranks > 1:
            self._divide(rank, spec.layout.ranks_per_host or ranks)
        self.optimizer = torch.optim.Adam(
            model.parameters(),
            lr=spec.train.lr,
            weight_decay=spec.train.weight_decay,
            foreach=True if self.is_divided else None,  # a call for all shards, not one for each
            fused=None if self.is_divided else True,
        )

    @property
    def is_divided(self) -> bool:
        """Whether weights are shards."""
        return bool(self._parts)

    def _divide(self, rank: int, per_host: int) -> None:
        layout = Layout(dp=self.ranks, zero=3, replicas=self.ranks // per_host)
        mesh = Mesh.join(Ranks(rank, self.ranks, torch.device("cpu")), layout).weights
        is_hybrid = REPLICATE_AXIS in (mesh.mesh_dim_names or ())
        hosts = mesh.get_group(REPLICATE_AXIS) if is_hybrid else None
        for unit in (*units_of(self.model), self.model):
            fully_shard(unit, mesh=mesh[SHARD_AXIS], reshard_after_forward=True)
        gather = ExchangeGather(self.meter, partial(self.count, "gather"))
        scatter = ExchangeReduce(self.meter, partial(self.count, "scatter"))
        self._parts = [each for each in self.model.modules() if isinstance(each, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # Its own order of layers has those of scoring, too, which no backward follows: it would
            # gather one more in the step after.
            part.set_modules_to_backward_prefetch([part])
            part.set_custom_all_gather(gather)
            part.set_custom_reduce_scatter(scatter)
            if hosts is not None:
                part.set_all_reduce_hook(partial(self._sum_over_hosts, hosts=hosts))

    def _sum_over_hosts(self, grad: Tensor, hosts: dist.ProcessGroup) -> None:
        """Sum a shard's gradient, float32 [n], over hosts, in place."""
        whole = nn.functional.pad(grad, (0, -len(grad) % hosts.size()))
        part = whole.new_empty(len(whole) // hosts.size())
        across = partial(self.count, "across")
        ExchangeReduce(self.meter, across)(part, whole, hosts, dist.ReduceOp.SUM)
        ExchangeGather(self.meter, across)(whole, part, hosts)
        grad.copy_(whole[: len(grad)])

    def count(self, stage: str, part: Tensor, group: dist.ProcessGroup) -> None:
        """Count a part that goes to all others of a group."""
        self.sent[stage] += (group.size() - 1) * part.numel() * part.element_size()

    def floats(self) -> Iterator[Tensor]:
        """The weights, or their shards, on this rank."""
        for weight in self.model.parameters():
            yield weight.to_local() if isinstance(weight, DTensor) else weight

    def begin_sums(self) -> Callable[[], None]:
        """Begin to sum copies' gradients over all ranks; those of shards are summed already.

        Returns:
            What waits for the sums, before the optimizer reads them.
        """
        if self.ranks == 1 or self.is_divided:
            return _nothing
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        work = dist.all_reduce(flat, async_op=True)

        def end_sums() -> None:
            work.wait()
            parts = flat.split([each.numel() for each in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))

        return end_sums

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have all weights on each rank inside the block; all ranks enter it together."""
        before = dict(self.sent)
        for part in self._parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for part in self._parts:
                part.set_reshard_after_forward(True, recurse=False)
                part.reshard()
            self.sent = before  # what is counted is a step's

    def state(self) -> dict[str, Any]:
        """Weights and moments, whole, as one process has them; all ranks call it together."""
        state: dict[str, Any] = gather_whole(
            {"dense": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )
        return state


def _nothing() -> None:
    """There is nothing to wait for."""


def units_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are gathered one at a time: its layers, and what is around them."""
    parts: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            parts.extend(child)
        else:
            parts.append(child)
    return [part for part in parts if any(True for _ in part.parameters())]


def unit_shapes(model: nn.Module) -> list[list[Sequence[int]]]:
    """The shapes of each unit's weights, as ``count_dense_bytes`` takes them."""
    return [[tuple(each.shape) for each in unit.parameters()] for unit in units_of(model)]


def gather_whole(value: Any) -> Any:
    """A state with its shards gathered; all ranks call it together, and each gets all of it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, Mapping):
        return {key: gather_whole(each) for key, each in value.items()}
    return value


def take_shards(value: Any, like: Tensor) -> Any:
    """This rank's shard of a whole tensor that is divided as ``like`` is, which has its shape."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
