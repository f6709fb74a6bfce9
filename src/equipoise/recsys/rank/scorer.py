"""Scores in tiles of a fixed number of rows, so that a score depends on its own sample alone.

Why
    A matrix product of few rows takes another kernel than one of many, and its sums round
    differently. A request of 3 candidates would then be scored otherwise than a batch of 8,192.

What it decides
    The dense part and modules of towers always compute ``TILE`` rows; the last tile is filled up
    with zeros. Rows of an inner dim that is not a multiple of 16 floats begin at other alignments,
    which kernels sum differently, so such products are filled up with zeros as well. Whoever scores
    does so here: a run that evaluates itself, a server, a tool that measures what few bits cost. So
    they agree to the bit, whatever is scored beside a sample.

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
from equipoise.recsys.wire import decode, encode
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tables.traffic import Wire

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


def run_tiles(module: nn.Module, *inputs: Tensor) -> Tensor:
    """What a module makes of samples, ``TILE`` at a time.

    Args:
        module: The dense part, or a tower's module.
        inputs: What it reads, float32 [B, ...] each.
    """
    samples, parts = len(inputs[0]), []
    for begin in range(0, max(1, samples), TILE):
        own = [each[begin : begin + TILE] for each in inputs]
        count = len(own[0])
        if count < TILE:
            own = [torch.cat((e, e.new_zeros(TILE - count, *e.shape[1:]))) for e in own]
        with _AlignedProducts():
            parts.append(module(*(each.contiguous() for each in own))[:count])
    return torch.cat(parts)


@dataclass(frozen=True, slots=True, eq=False)
class ServedTowers:
    """The modules of all towers in one process."""

    plan: TablePlan
    """Which tables they read, and in what order the dense part reads their vectors."""
    modules: Sequence[nn.Module]
    wire: Wire
    """How vectors travelled to the samples' ranks."""

    def condense(self, pooled: Mapping[str, Tensor]) -> Tensor:
        """What leaves all towers, float32 [B, vectors x width], of pooled rows by table."""
        left = []
        for tower, module in zip(self.plan.towers, self.modules, strict=True):
            entered = torch.stack([pooled[name] for name in tower.tables], dim=1)
            rows = run_tiles(module, entered).flatten(0, 1)
            sent = decode(encode(rows, self.wire), tower.width, self.wire)
            left.append(sent.view(-1, tower.vectors, tower.width))
        return torch.cat(left, dim=1)[:, self.plan.vector_order].flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """Tables, towers if there are any, and a dense part in one process."""

    tables: Sequence[PooledTable]
    dense: nn.Module
    towers: ServedTowers | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights."""
        modules = [self.dense, *([] if self.towers is None else self.towers.modules)]
        tensors = [t for each in modules for t in (*each.parameters(), *each.buffers())]
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
        return run_tiles(self.dense, self.pool(batch), numbers)

    @torch.inference_mode()
    def pool(self, batch: KeyedJagged) -> Tensor:
        """All tables side by side, or what towers make of them, float32 [B, widths]."""
        pooled = {each.table.name: each.pool(*batch.bags(each.table.name)) for each in self.tables}
        if self.towers is None:
            return torch.cat([*pooled.values()], dim=1)
        return self.towers.condense(pooled)
