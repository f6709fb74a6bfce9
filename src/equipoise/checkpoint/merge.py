"""Merge the weights of several checkpoints of one model: their mean, or a point between two.

What it decides
    Sums are made in float64 and rounded once to the dtype in which the first has the weight, so
    the mean of equal weights is bitwise that weight, and order does not matter. Whole numbers,
    such as counters, must be equal: a mean of them means nothing.

Kept true (tests/unit/checkpoint/test_merge.py)
    Models that differ in a name, a shape or a whole number are refused, and so are numbers that are
    not finite, before or after; nothing is merged in part.

Sources
    Model soups: arXiv:2203.05482.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from equipoise.base.errors import CheckpointError


class Merger:
    """A weighted sum of models, added one at a time: one of them is in memory beside the sum."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._first = ""
        self._shares: list[float] = []

    def add(self, name: str, weights: Mapping[str, Tensor], share: float) -> None:
        """Add a model.

        Args:
            name: What it is called, for messages.
            weights: Its weights by name, on the CPU.
            share: Its share of the sum; shares must add up to 1.

        Raises:
            CheckpointError: it is not the same model as the first, or has a number that is not
                finite.
        """
        for key, weight in weights.items():
            if weight.is_floating_point() and not torch.isfinite(weight).all():
                raise CheckpointError(
                    f"{key} of {name} has numbers that are not finite, and so would what is merged "
                    f"from it. Give an older checkpoint of that run."
                )
        if not self._first:
            self._first = name
            self._dtypes = {key: weight.dtype for key, weight in weights.items()}
            self._sums = {
                key: weight.double() * share if weight.is_floating_point() else weight.clone()
                for key, weight in weights.items()
            }
        else:
            self._require_same(name, weights)
            for key, weight in weights.items():
                if weight.is_floating_point():
                    self._sums[key].add_(weight.double(), alpha=share)
        self._shares.append(share)

    def merged(self) -> dict[str, Tensor]:
        """The sum, each weight in the dtype that the first model has it in.

        Raises:
            ValueError: the shares do not add up to 1.
            CheckpointError: a sum is larger than the first model's dtype can hold.
        """
        if not math.isclose(math.fsum(self._shares), 1.0, abs_tol=1e-9):
            raise ValueError(f"The shares {self._shares} add up to {math.fsum(self._shares):g}.")
        merged = {key: each.to(self._dtypes[key]) for key, each in self._sums.items()}
        for key, each in merged.items():
            if each.is_floating_point() and not torch.isfinite(each).all():
                dtype = str(each.dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{key} has merged numbers up to {self._sums[key].abs().max():g}, more than "
                    f"{dtype} holds, in which {self._first} has it. Name a model first that has it "
                    f"in float32."
                )
        return merged

    def _require_same(self, name: str, weights: Mapping[str, Tensor]) -> None:
        for one, other, has, lacks in (
            (self._sums, weights, self._first, name),
            (weights, self._sums, name, self._first),
        ):
            if missing := [key for key in one if key not in other]:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise CheckpointError(
                    f"{has} has the weight {missing[0]}{more}, which {lacks} does not have. Merge "
                    f"checkpoints of one model."
                )
        for key, weight in weights.items():
            first = self._sums[key]
            if weight.shape != first.shape:
                raise CheckpointError(
                    f"{key} has the shape {list(first.shape)} in {self._first} and "
                    f"{list(weight.shape)} in {name}. Merge checkpoints of one model."
                )
            is_real = weight.is_floating_point()
            if is_real != first.is_floating_point():
                whole = name if first.is_floating_point() else self._first
                raise CheckpointError(
                    f"{key} holds whole numbers in {whole} alone. Merge checkpoints of one model."
                )
            if not (is_real or torch.equal(weight, first)):
                raise CheckpointError(
                    f"{key} holds whole numbers that differ between {self._first} and {name}, and "
                    f"a mean of them means nothing. Merge checkpoints of one model."
                )
