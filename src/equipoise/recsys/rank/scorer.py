"""Scores in tiles of a fixed number of rows, so that a score depends on its own sample alone.

Why
    A matrix product of few rows takes another kernel than one of many, and its sums round
    differently. A request of 3 candidates would then be scored otherwise than a batch of 8,192.

What it decides
    The dense part always computes ``TILE`` rows; the last tile is filled up with zeros. Rows of an
    inner dim that is not a multiple of 16 floats begin at other alignments, which kernels sum
    differently, so such products are filled up with zeros as well. Whoever scores does so here: a
    run that evaluates itself, a server, a tool that measures what few bits cost. So they agree to
    the bit, whatever is scored beside a sample.

Kept true (tests/unit/recsys/rank/test_scorer.py, tests/multi/recsys/test_ahead.py)
    A sample's logit is the same alone, in any batch and at any place in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.rank.pooling import PooledTable

TILE = 64
_ALIGNED = 16
"""Floats of 64 bytes, the widest registers."""


class _AlignedProducts(TorchFunctionMode):
    """Fills the inner dim of matrix products up to a multiple of ``_ALIGNED`` with zeros."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func in (nn.functional.linear, torch.bmm) and (fill := -args[0].shape[-1] % _ALIGNED):
            first, second, *rest = args
            inner = (0, fill) if func is nn.functional.linear else (0, 0, 0, fill)
            args = (nn.functional.pad(first, (0, fill)), nn.functional.pad(second, inner), *rest)
        return func(*args, **(kwargs or {}))


def score_tiles(dense: nn.Module, pooled: Tensor, numbers: Tensor) -> Tensor:
    """Logits of samples, float32 [B].

    Args:
        dense: Of a recommender.
        pooled: The tables' output, float32 [B, widths].
        numbers: float32 [B, numbers].
    """
    parts = []
    for begin in range(0, len(pooled), TILE):
        own, count = pooled[begin : begin + TILE], min(TILE, len(pooled) - begin)
        some = numbers[begin : begin + TILE]
        if count < TILE:
            own, some = (nn.functional.pad(each, (0, 0, 0, TILE - count)) for each in (own, some))
        with _AlignedProducts():
            parts.append(dense(own.contiguous(), some.contiguous())[:count])
    return torch.cat(parts) if parts else pooled.new_zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """Tables and a dense part in one process."""

    tables: Sequence[PooledTable]
    dense: nn.Module

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights."""
        tensors = [*self.dense.parameters(), *self.dense.buffers()]
        return sum(each.held_bytes for each in self.tables) + sum(
            each.numel() * each.element_size() for each in tensors
        )

    @torch.inference_mode()
    def score(self, batch: KeyedJagged, numbers: Tensor) -> Tensor:
        """Logits of samples, float32 [B].

        Args:
            batch: A feature for each table.
            numbers: float32 [B, numbers].
        """
        return score_tiles(self.dense, self.pool(batch), numbers)

    @torch.inference_mode()
    def pool(self, batch: KeyedJagged) -> Tensor:
        """All tables side by side, float32 [B, widths]."""
        pooled = [each.pool(*batch.bags(each.table.name)) for each in self.tables]
        return torch.cat(pooled, dim=1)
