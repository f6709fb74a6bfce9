"""How a module's weights may be split over ranks, as the module itself declares it.

Why
    Which dim of a weight is split follows from what the module computes with it, so the module
    says it, by the name of a mesh axis; whoever has ranks applies it. A weight of which nobody
    has said anything must not be split, nor left whole, by guesswork.

What it decides
    ``Split`` is one dim in even runs, ``Copied`` the whole weight on every rank. Each rank's
    gradient of a copied weight is a part of a sum, because its ranks hold different tokens, or
    different heads.

Kept true (tests/unit/nn/test_declare.py, tests/multi/parallel/test_tensor.py)
    Every weight of a decoder is declared once; gradients of copied weights are summed.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from equipoise.base.axes import TENSOR_AXIS
from equipoise.base.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Split:
    """A dim of a weight in runs of equal length, the last one shorter where it must be."""

    dim: int
    parts: int | None = None
    """Runs that must stay whole (heads); copied instead where ranks do not divide them."""
    axis: str = TENSOR_AXIS


@dataclass(frozen=True, slots=True)
class Copied:
    """The whole weight on every rank; gradients are summed over the axis."""

    axis: str = TENSOR_AXIS


Placement = Split | Copied


@runtime_checkable
class Declares(Protocol):
    """A module that says how its weights are split."""

    def declare(self) -> dict[str, Placement]:
        """Placement of each weight, by its name within the module."""


def declared(module: nn.Module) -> dict[str, Placement]:
    """Placement of every weight, by its full name.

    Raises:
        LayoutError: a weight is declared by no module.
    """
    found: dict[str, Placement] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, Declares):
            stem = f"{prefix}." if prefix else ""
            found |= {stem + name: placement for name, placement in part.declare().items()}
    names = [name for name, _ in module.named_parameters()]
    missing = [name for name in names if name not in found]
    if missing:
        raise LayoutError(
            f"{len(missing)} of {len(names)} weights have no declared placement, the first is "
            f"{missing[0]}. Name them in declare() of the module that computes with them, or set "
            f"layout.tp = 1."
        )
    return {name: found[name] for name in names}


def local(weight: Tensor) -> Tensor:
    """This rank's share of a weight, as a plain tensor that autograd follows.

    Args:
        weight: Plain, or gathered over data-parallel ranks and split over others.

    Returns:
        The share; its gradient is the share's where the weight is split, and one part of a sum
        where it is copied.
    """
    if not isinstance(weight, DTensor):
        return weight
    names = weight.device_mesh.mesh_dim_names or ()
    gradients = [
        # What data-parallel ranks have is summed by whoever gathered the weight.
        Partial() if name == TENSOR_AXIS and isinstance(place, Replicate) else place
        for name, place in zip(names, weight.placements, strict=True)
    ]
    share: Tensor = weight.to_local(grad_placements=gradients)
    return share
