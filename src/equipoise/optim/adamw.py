"""AdamW with weight decay on matrices only, and gradient clipping that is right on any mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from equipoise.spec.run.spec import TrainSpec


class UpdateTurns(Protocol):
    """Weights that are in memory in turns."""

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Call ``step`` again and again, each time with gradients of what is in memory alone."""


class TurnsAdamW(torch.optim.AdamW):
    """AdamW of weights that are in memory in turns."""

    turns: UpdateTurns

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every weight."""
        self.turns.update(self, partial(super().step, closure))


def make_adamw(
    module: nn.Module, train: TrainSpec, turns: UpdateTurns | None = None
) -> torch.optim.AdamW:
    """Fused AdamW of what is trained; weight decay on matrices, none on norms and biases.

    Args:
        module: Whose weights.
        train: Its settings.
        turns: When weights are in memory, if they are not always.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if turns is None else TurnsAdamW
    optimizer = kind(
        [group for group in groups if group["params"]] or groups[:1],  # a stage may train nothing
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )
    if turns is not None and isinstance(optimizer, TurnsAdamW):
        optimizer.turns = turns
    return optimizer


def _square_sum(gradients: list[Tensor]) -> Tensor:
    squares = torch.stack(torch._foreach_norm(gradients)).double().square_()
    return squares.sum()


def global_norm(
    module: nn.Module,
    *,
    counted: Callable[[str], bool] = bool,
    stages: dist.ProcessGroup | None = None,
) -> Tensor:
    """Euclidean norm of all gradients, over every rank, float64 scalar.

    Gradients are grouped by how they are split; a group's squares are summed over exactly
    the mesh axes that split it, so replicas are counted once and shards all. Every rank of a mesh
    takes part, also where the sum does not count.

    Args:
        module: This rank's weights, or those of its stages.
        counted: Whether a weight of this name counts here; it may count on another stage instead.
        stages: The ranks that hold the other stages of a pipeline.
    """
    groups: dict[tuple[DeviceMesh, tuple[bool, ...], bool], list[DTensor]] = {}
    total: Tensor | None = None
    plain = []
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        counts = counted(name)
        if isinstance(gradient, DTensor):
            split = tuple(isinstance(place, Shard) for place in gradient.placements)
            groups.setdefault((gradient.device_mesh, split, counts), []).append(gradient)
        elif counts:
            plain.append(gradient)
    if plain:
        total = _square_sum(plain)
    for (_, split, counts), gradients in groups.items():
        squares = _square_sum([gradient.to_local() for gradient in gradients])
        mesh = gradients[0].device_mesh
        for dim, is_split in enumerate(split):
            if is_split and mesh.size(dim) > 1:
                dist.all_reduce(squares, group=mesh.get_group(dim))
        if counts:
            total = squares if total is None else total + squares
    if total is None and stages is not None:  # none of this stage's weights is trained
        total = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
    if total is None:
        raise ValueError("No parameter has a gradient: run a backward before clipping.")
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt_()


def clip(module: nn.Module, norm: float, largest: float) -> None:
    """Scale all gradients by ``min(1, largest / norm)``."""
    scale = min(1.0, largest / (norm + 1e-6))
    if scale == 1.0:
        return
    local = [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for parameter in module.parameters()
        if (gradient := parameter.grad) is not None
    ]
    if local:  # a stage may train nothing
        torch._foreach_mul_(local, scale)
