"""Rows of a shard in 8, 4 or 2 bits.

Kept true (tests/unit/recsys/cache/test_held.py)
    The storage is uint8 and has the bytes of the formula; draws depend on no layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.numerics.rows import RowFormat, draw_uniform, pack_rows, row_bytes, unpack_rows
from equipoise.schedule.tiers.cache import SLOT_BYTES, CachePolicy

Rounding = Literal["stochastic", "nearest"]


@dataclass(frozen=True, slots=True)
class TablePrecision:
    """How the rows of all tables are kept."""

    form: RowFormat = "int8"
    rounding: Rounding = "stochastic"
    cache_share: float = 0.05
    """Bytes of the fp32 cache, tags included, of those of the shard's rows in fp32."""
    policy: CachePolicy = "lru"

    def __post_init__(self) -> None:
        if not 0 <= self.cache_share <= 1:
            raise SpecError(f"A cache of {self.cache_share:g} of a table cannot be. Give 0 to 1.")

    def slots(self, rows: int, width: int) -> int:
        """Slots of a shard's cache, before they are dealt to whole sets.

        >>> TablePrecision("int4", cache_share=0.01).slots(10_000, 128)
        98
        """
        return int(self.cache_share * rows * 4 * width / (4 * width + SLOT_BYTES))


class PackedRows:
    """The rows themselves; all that is read is what was rounded."""

    def __init__(
        self,
        count: int,
        width: int,
        form: RowFormat,
        rounding: Rounding,
        key: str,
        name_rows: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """Rows of zeros.

        Args:
            count: How many rows lie here.
            width: Columns.
            form: The format.
            rounding: What ``write`` does with remainders.
            key: Of the seed and the table: draws are a function of it, the step and the row.
            name_rows: Which rows of the table lie at some places, int64 [n] of int64 [n].
            device: Where they lie.
        """
        self.width, self.form, self.name_rows = width, form, name_rows
        self.rounding, self.key = rounding, key
        self.data = torch.zeros((count, row_bytes(width, form)), dtype=torch.uint8, device=device)

    @property
    def held_bytes(self) -> int:
        """Bytes of all rows."""
        return self.data.numel()

    def read(self, at: Tensor) -> Tensor:
        """Rows at some places, float32 [n, width]."""
        return unpack_rows(self.data[at], self.width, self.form)

    def write(self, at: Tensor, values: Tensor, step: int) -> None:
        """Round rows into their places; ``step`` numbers the draws."""
        draws = None
        if self.rounding == "stochastic":
            key = xxhash.xxh64_intdigest(f"{self.key}:{step}".encode())
            draws = draw_uniform(key, self.name_rows(at), self.width)
        self.data[at] = pack_rows(values, self.form, draws)

    def arrays(self) -> dict[str, np.ndarray]:
        """Packed rows, as a checkpoint holds them."""
        return {"packed": self.data.cpu().numpy()}

    def take(self, own: Ints, theirs: Ints, arrays: Mapping[str, np.ndarray]) -> None:
        """Take what ``arrays`` gave of the places ``theirs`` to ``own``."""
        self.data[torch.from_numpy(own)] = torch.from_numpy(arrays["packed"][theirs])

    def fill(self, begin: int, values: Tensor) -> None:
        """First values of consecutive places, rounded to nearest."""
        self.data[begin : begin + len(values)] = pack_rows(values, self.form)
