"""Functions of ranks in tests that no number of an fp64 step passes through a narrower dtype."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equipoise.comm.group import Ranks
from equipoise.train.check.case import Case, Verdict
from equipoise.train.check.prove import check_cases
from equipoise.train.check.sample import References

_WIDENS = torch.ops.aten._to_copy.default


class NarrowWatch(TorchDispatchMode):
    """Notes operations on fp64 and a narrower dtype, and the shapes of what is widened to fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: set[str] = set()
        self.widened: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back with the plain tensors inside
        kwargs = kwargs or {}
        read = set(_dtypes((args, kwargs)))
        out = func(*args, **kwargs)
        wrote = set(_dtypes(out))
        narrow = {each for each in read | wrote if each.itemsize < torch.float64.itemsize}
        if not narrow or torch.float64 not in read | wrote:
            return out
        if func is _WIDENS and wrote == {torch.float64}:
            self.widened.add(tuple(out.shape))
        else:
            self.mixed.add(f"{func}: {sorted(map(str, read))} to {sorted(map(str, wrote))}")
        return out


def _dtypes(values: Any) -> Iterator[torch.dtype]:
    leaves = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return (each.dtype for each in leaves if each.is_floating_point() and each.numel())


def watch(ranks: Ranks, cases: list[Case]) -> list[tuple[Verdict, NarrowWatch]]:
    """Each case against one rank, and what this rank did to dtypes in both."""
    outcomes, references = [], References()
    for case in cases:
        references.decoder(case)  # whose first weights are drawn in fp32
        with NarrowWatch() as narrow:
            (verdict,) = check_cases(ranks, [case], references=references)
        outcomes.append((verdict, narrow))
    return outcomes
