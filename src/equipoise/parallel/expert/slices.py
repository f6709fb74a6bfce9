"""One sparse layer's slice on one rank: a buffer of weights, one of moments, and views of both.

What it decides
    How a slice lies in a buffer: gates of all its experts, then up, then down projections, with
    room for as many experts as the longest slice has, so that slices of all ranks are alike. A
    parameter is a view of the buffer, contiguous, and its name, shape and place are those of ZeRO
    3. A buffer may have no memory; whoever uses it sees to that.

Kept true (tests/multi/parallel/test_expert_tiers.py)
    Loss and gradients equal one rank's, also where ranks have experts in uneven numbers, or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from equipoise.base.errors import LayoutError
from equipoise.comm.mesh import Peers
from equipoise.nn.moe.layer import Experts
from equipoise.nn.tensor import part_of

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight, beside the number of its steps."""

_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSlice:
    """A layer's slice, and what there is to know of its peers'."""

    experts: Experts
    longest: int
    """Experts that a slice has room for."""
    counts: tuple[int, ...]
    """Experts of each rank's slice."""
    own: int
    """Which of them is this rank's."""
    shapes: tuple[tuple[int, int], ...]
    """Rows and columns of an expert's gate, up and down projection."""
    weights: Tensor
    moments: Tensor
    """``exp_avg`` of all weights, then ``exp_avg_sq``."""

    @classmethod
    def of(
        cls,
        experts: Experts,
        longest: int,
        peers: Peers,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
    ) -> "ExpertSlice":
        """Cut this rank's slice out of weights that are alike on all peers, and leave it to them.

        Args:
            experts: Weights [x, ...]; X of all ranks is in their shape.
            longest: Experts of the longest slice of any rank.
            peers: The ranks with slices of the same experts.
            mesh: Of the parameters that stay.
            placements: On it.

        Raises:
            LayoutError: they are not trained.
        """
        matrices = [getattr(experts, name) for name in _MATRICES]
        wholes = [each.weight.detach() for each in matrices]
        if not all(each.weight.requires_grad for each in matrices):
            raise LayoutError(
                "experts.memory_mib holds experts that are trained, and train.freeze leaves them "
                "as they are. Remove one of them."
            )
        here = [_local(each) for each in wholes]
        parts = [part_of(len(here[0]), ranks=peers.count, rank=at) for at in range(peers.count)]
        shapes = tuple((each.shape[1], each.shape[2]) for each in here)
        elements = longest * sum(rows * columns for rows, columns in shapes)
        made = cls(
            experts,
            longest,
            tuple(map(len, parts)),
            peers.rank,
            shapes,
            torch.zeros(elements, dtype=here[0].dtype),
            torch.zeros(2 * elements, dtype=here[0].dtype),
        )
        mine = parts[peers.rank]
        views = made.split(made.weights, made.counts[made.own])
        for matrix, view, local, whole in zip(matrices, views, here, wholes, strict=True):
            view.copy_(local[mine.start : mine.stop])
            placed = _place(view, whole, mesh, placements)
            matrix.weight = nn.Parameter(placed)
            matrix.weight._spec = placed._spec
        return made

    @property
    def parameters(self) -> list[Any]:
        """Gates, up and down projections of this rank's slice: DTensors."""
        return [getattr(self.experts, name).weight for name in _MATRICES]

    def split(self, flat: Tensor, count: int) -> tuple[Tensor, ...]:
        """Gates [x, F, D], up [x, F, D] and down [x, D, F] of a slice's first experts."""
        parts = flat.split([self.longest * rows * columns for rows, columns in self.shapes])
        return tuple(
            part.view(self.longest, rows, columns)[:count]
            for part, (rows, columns) in zip(parts, self.shapes, strict=True)
        )

    def fuse(self, gradients: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Gradients of all slices in one buffer, [ranks, elements]."""
        fused = self.weights.new_zeros(len(self.counts), len(self.weights))
        for flat, count, grads in zip(fused, self.counts, gradients, strict=True):
            for view, grad in zip(self.split(flat, count), grads, strict=True):
                view.copy_(grad)
        return fused

    def add_gradient(self, flat: Tensor) -> None:
        """Add the sums of this rank's slice to what its parameters have."""
        for weight, view in zip(
            self.parameters, self.split(flat, self.counts[self.own]), strict=True
        ):
            if weight.grad is None:
                weight.grad = _place(view, weight, weight.device_mesh, weight.placements)
            else:
                weight.grad.to_local().add_(view)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Let AdamW's moments be views of the buffer; zeros where it has none yet."""
        if not isinstance(optimizer, torch.optim.Adam):
            return
        for name, flat in zip(MOMENTS, self.moments.chunk(2), strict=True):
            views = self.split(flat, self.counts[self.own])
            for weight, view in zip(self.parameters, views, strict=True):
                state = optimizer.state[weight]
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
                if (known := state.get(name)) is None:
                    view.zero_()
                elif known.to_local().data_ptr() != view.data_ptr():
                    view.copy_(known.to_local())
                else:
                    continue
                state[name] = _place(view, weight, weight.device_mesh, weight.placements)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(
    view: Tensor, whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """A view as this rank's part of a tensor that is shaped as ``whole``."""
    placed: DTensor = DTensor.from_local(
        view, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return placed
