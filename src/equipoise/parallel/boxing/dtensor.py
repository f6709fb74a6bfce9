"""Refuse what torch's DTensor computes wrongly and without a word.

Why
    torch 2.13 takes ``cumsum``, ``cumprod`` and ``logcumsumexp`` along a split dim that is counted
    from the end, as in ``cumsum(-1)``, for one that is not split: each rank scans its own run, and
    the result claims to be right. With the same dim counted from 0 it gathers first and is right.
    Dims that are not split are not concerned, nor is ``cummax``.

What it decides
    Within ``refuse_wrong_scans()`` such a call is refused before anything is computed. Nothing in
    this package scans a DTensor; it is for modules that do.

Kept true (tests/multi/parallel/test_boxing.py)
    Of these scans, along every dim of DTensors split along every dim, those that torch gets wrong
    are refused and all others are right. When torch mends it, that test says so.

Sources
    A differential test on 2 gloo ranks, torch 2.13.0.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from equipoise.base.errors import LayoutError

_SCANS: dict[Callable[..., Any], str] = {
    function: name
    for name in ("cumsum", "cumprod", "logcumsumexp")
    for owner in (torch, torch.Tensor)
    for function in (getattr(owner, name),)
}


class _RefuseWrongScans(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if func in _SCANS:
            tensor = args[0] if args else named.get("input")
            dim = args[1] if len(args) > 1 else named.get("dim")
            if isinstance(tensor, DTensor) and isinstance(dim, int):
                _require(tensor, dim, _SCANS[func])
        return func(*args, **named)


def refuse_wrong_scans() -> TorchFunctionMode:
    """A context in which scans that DTensor would get wrong raise ``LayoutError``."""
    return _RefuseWrongScans()


def _require(tensor: DTensor, dim: int, name: str) -> None:
    """Refuse a scan whose dim is counted from the end and split."""
    axes = [
        axis
        for axis, each in enumerate(tensor.placements)
        if dim < 0 and getattr(each, "dim", None) == dim % tensor.ndim  # also strided shards
    ]
    if axes:
        raise LayoutError(
            f"{name}(dim={dim}) of a DTensor of {list(tensor.shape)} whose dim {dim % tensor.ndim} "
            f"is split over mesh axis {axes[0]}: torch {torch.__version__.partition('+')[0]} would "
            f"scan each rank's part alone. Write dim={dim % tensor.ndim}, which gathers it first."
        )
