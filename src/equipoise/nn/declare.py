"""How a module declares the ways in which its weights may be split over ranks.

Why
    Which dim of a weight can be split follows from what the module computes with it, so the module
    declares it and ``parallel`` applies it. A weight without a declaration is an error: whether
    to split it must never be a guess.

What it decides
    ``Split`` cuts one dim into even runs; ``Copied`` puts the whole weight on every rank. Ranks
    hold different tokens or heads, so each one's gradient of a copied weight is a partial sum.

Kept true (tests/unit/nn/test_declare.py, tests/multi/parallel/test_tensor.py)
    Every weight of a decoder is declared once; gradients of copied weights are summed.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from equipoise.base.axes import TENSOR_AXIS
from equipoise.base.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Split:
    """One dim of a weight, cut into runs of equal length; the last may be shorter."""

    dim: int
    parts: int | None = None
    """Runs that must stay whole (heads); copied if their number is not a multiple of the ranks."""
    axis: str = TENSOR_AXIS


@dataclass(frozen=True, slots=True)
class Copied:
    """The whole weight on every rank; gradients are summed over the axis."""

    axis: str = TENSOR_AXIS


Placement = Split | Copied


@runtime_checkable
class Declares(Protocol):
    """A module that declares how its weights are split."""

    def declare(self) -> dict[str, Placement]:
        """Placement of each weight, by its name within the module."""


def declared(module: nn.Module) -> dict[str, Placement]:
    """Placement of every weight, by its full name.

    Raises:
        LayoutError: no module declares a weight.
    """
    placements: dict[str, Placement] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, Declares):
            stem = f"{prefix}." if prefix else ""
            placements |= {stem + name: placement for name, placement in part.declare().items()}
    names = [name for name, _ in module.named_parameters()]
    missing = [name for name in names if name not in placements]
    if missing:
        raise LayoutError(
            f"{len(missing)} of {len(names)} weights have no declared placement, {missing[0]} "
            f"first. Add them to declare() of the module that computes with them, or set "
            f"layout.tp = 1."
        )
    return {name: placements[name] for name in names}


def is_plain(weight: Tensor) -> bool:
    """Whether a tensor is torch's own kind; asking for a DTensor imports its library, for 2 s."""
    return type(weight) in (Tensor, nn.Parameter)


def local(weight: Tensor) -> Tensor:
    """This rank's share of a weight, as a plain tensor that autograd follows.

    Args:
        weight: A plain tensor, or one gathered over data-parallel ranks and split over others.

    Returns:
        The share. Its gradient is the share's if the weight is split, and a partial sum if it is
        copied.
    """
    if is_plain(weight):
        return weight
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(weight, DTensor):
        return weight
    names = weight.device_mesh.mesh_dim_names or ()
    gradients = [
        # Whatever gathered the weight sums the gradients of data-parallel ranks.
        Partial() if name == TENSOR_AXIS and isinstance(place, Replicate) else place
        for name, place in zip(names, weight.placements, strict=True)
    ]
    share: Tensor = weight.to_local(grad_placements=gradients)
    return share
