"""A shard's rows in a slow tier, with the worthy ones as fp32 in a cache.

Why
    Most updates go to few rows. Those that stay in fp32 lose nothing to rounding, and a file is not
    read for them; all the others take an eighth of the memory, or none.

What it decides
    A step reads its distinct rows: from their slots, or from the tier. Its update is applied to
    them in fp32; then they want a slot, and those that leave or pass by are written to the tier.
    Deciding after the update, on the rows of the global batch, keeps copies on several ranks
    equal, needs no locks, and lets an evaluation read without moving anything. Rows that no cache
    has room for are read and updated exactly as without one.

Kept true (tests/unit/recsys/cache/test_held.py, tests/multi/recsys/test_precision.py)
    Equal to a dictionary that does the same row by row; with fp32 behind, equal to no cache at all,
    to the bit; a resumed run equals one that was not interrupted.

Sources
    arXiv:2010.11305.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.recsys.optimizer import SparseStep, update_rows
from equipoise.schedule.tiers.cache import SetCache

_CACHE = "cache-"
_VALUES = "cache-values"


class RowTier(Protocol):
    """Where rows lie that have no slot."""

    width: int

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it takes."""

    def read(self, at: Tensor) -> Tensor:
        """Rows at some places, float32 [n, width]."""

    def write(self, at: Tensor, values: Tensor, step: int) -> None:
        """Rows to some places."""

    def arrays(self) -> dict[str, np.ndarray]:
        """All rows, as a checkpoint holds them."""

    def take(self, own: Ints, theirs: Ints, arrays: Mapping[str, np.ndarray]) -> None:
        """Take what ``arrays`` gave of the places ``theirs`` to ``own``."""


class CachedRows:
    """A tier and the slots before it."""

    def __init__(
        self,
        tier: RowTier,
        cache: SetCache,
        device: torch.device,
        state: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """An empty cache before a tier.

        Args:
            tier: Where all rows lie at first.
            cache: Decides which get slots.
            device: Where slots lie.
            state: Which floats of a tier's row are the optimizer's, first and one past the last,
                behind those of the weights; none unless given.
        """
        self.tier, self.cache = tier, cache
        self.state_columns = dict(state or {})
        self.width = min((begin for begin, _ in self.state_columns.values()), default=tier.width)
        self.values = torch.zeros((cache.slots, tier.width), device=device)
        self.reads = self.hits = 0
        """Distinct rows that training steps read, and how many lay in slots."""
        self._staged: tuple[Tensor, Tensor] | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of memory: the tier's, the slots' and their tags'."""
        return self.tier.held_bytes + 4 * self.values.numel() + self.cache.held_bytes

    def read(self, rows: Tensor, *, is_training: bool = False) -> Tensor:
        """The weights of distinct ascending rows, float32 [n, width]."""
        return self._records(rows, is_training=is_training)[:, : self.width]

    def _records(self, rows: Tensor, *, is_training: bool) -> Tensor:
        slots = torch.from_numpy(self.cache.find(rows.cpu().numpy())).to(rows.device)
        is_in = slots >= 0
        values = self.values.new_empty((len(rows), self.tier.width))
        values[is_in] = self.values[slots[is_in]]
        values[~is_in] = self.tier.read(rows[~is_in])
        if is_training:
            self.reads += len(rows)
            self.hits += int(is_in.sum())
            self._staged = rows, values
        return values

    def apply(
        self,
        step: SparseStep,
        state: dict[str, Tensor],
        rows: Tensor,
        grad: Tensor,
        *,
        number: int,
        squares: Tensor | None,
    ) -> None:
        """Apply one gradient to each of some distinct ascending rows, then deal out slots.

        Arguments are those of ``update_rows``.
        """
        staged = self._staged
        if staged is not None and torch.equal(staged[0], rows):
            values = staged[1]
        else:
            values = self._records(rows, is_training=False)
        self._staged = None
        part = {name: every[rows] for name, every in state.items()}
        for name, (begin, end) in self.state_columns.items():
            own = values[:, begin:end]
            part[name] = own[:, 0] if step.name == "row-wise-adagrad" else own
        places, weight = torch.arange(len(rows), device=rows.device), values[:, : self.width]
        update_rows(step, weight, part, places, grad, number=number, squares=squares)
        for name, every in state.items():
            every[rows] = part[name]
        self.write(rows, values, number)

    def write(self, rows: Tensor, values: Tensor, step: int) -> None:
        """New values of distinct ascending rows: to slots, or past them."""
        admission = self.cache.admit(rows.cpu().numpy())
        device = rows.device
        if len(admission.leaving):
            leaving = torch.from_numpy(admission.leaving).to(device)
            self.tier.write(leaving, self.values[torch.from_numpy(admission.left)], step)
        slots = torch.from_numpy(admission.slots).to(device)
        is_in = slots >= 0
        self.values[slots[is_in]] = values[is_in]
        if not bool(is_in.all()):
            self.tier.write(rows[~is_in], values[~is_in], step)

    def flush(self, step: int) -> None:
        """Write rows in slots to the tier, where they differ; they stay in their slots."""
        at = np.flatnonzero(self.cache.dirty.reshape(-1) & (self.cache.tags.reshape(-1) >= 0))
        rows = torch.from_numpy(self.cache.tags.reshape(-1)[at].astype(np.int64))
        self.tier.write(rows.to(self.values.device), self.values[torch.from_numpy(at)], step)
        self.cache.dirty[:] = False

    def arrays(self) -> dict[str, np.ndarray]:
        """The tier's rows, slots and tags, as a checkpoint holds them."""
        parts = {f"{_CACHE}{name}": part for name, part in self.cache.arrays().items()}
        return self.tier.arrays() | parts | {_VALUES: self.values.cpu().numpy()}

    def take(
        self, own: Ints, theirs: Ints, arrays: Mapping[str, np.ndarray], *, is_same: bool
    ) -> None:
        """Take rows that ``arrays`` gave.

        Args:
            own: Places of rows here.
            theirs: Their places there.
            arrays: What that shard's ``arrays`` gave.
            is_same: Whether it had the very rows of this one: its slots are then taken as they
                are. Else rows that lay in slots are written to the tier.
        """
        self.tier.take(own, theirs, arrays)
        parts = {
            name.removeprefix(_CACHE): part
            for name, part in arrays.items()
            if name.startswith(_CACHE) and name != _VALUES
        }
        values = torch.from_numpy(arrays[_VALUES])
        if is_same and values.shape == self.values.shape and self.cache.restore(parts):
            self.values.copy_(values)
            return
        tags = parts["tags"].reshape(-1).astype(np.int64)
        _, mine, slots = np.intersect1d(theirs, tags, assume_unique=False, return_indices=True)
        at = torch.from_numpy(own[mine]).to(self.values.device)
        self.tier.write(at, values[torch.from_numpy(slots)].to(self.values.device), 0)
