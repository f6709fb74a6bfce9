"""Batches of ids: for each feature and sample a bag of any length.

Why
    Lengths, not offsets, go over the wire: a slice of lengths means the same wherever it stands,
    and offsets are rebuilt by one cumulative sum::

        feature "genre", 3 samples      lengths   2 0 1
        [4, 1] [] [7]                   values    4 1 7

Kept true (tests/multi/recsys/test_tables.py, tests/unit/recsys/test_jagged.py)
    Ids beyond their table, negative ids and lengths that do not add up are refused by name.

Sources
    The wire format: Neo, arXiv:2104.05158; torchrec's KeyedJaggedTensor.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from equipoise.base.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class KeyedJagged:
    """F features of B samples."""

    keys: tuple[str, ...]
    lengths: Tensor
    """Ids of each bag, int32 [F, B]."""
    values: Tensor
    """All ids, feature by feature and sample by sample, int64 [sum of lengths]."""

    _ends: tuple[int, ...] = field(init=False, repr=False)
    """Where each feature's ids end."""

    def __post_init__(self) -> None:
        if self.lengths.ndim != 2 or len(self.lengths) != len(self.keys):
            raise DataError(
                f"Lengths of {len(self.keys)} features must have a row for each, and have shape "
                f"{list(self.lengths.shape)}."
            )
        kinds = self.lengths.dtype, self.values.dtype
        if kinds != (torch.int32, torch.int64):
            raise DataError(
                f"Lengths must be torch.int32 and ids torch.int64; they are {kinds[0]} and "
                f"{kinds[1]}. Convert them with Tensor.to()."
            )
        if len(set(self.keys)) < len(self.keys):
            doubled = next(key for key in self.keys if self.keys.count(key) > 1)
            raise DataError(f"Two features have the key {doubled}. Rename one.")
        if self.values.ndim != 1:
            raise DataError(
                f"Ids of all bags lie end to end, in one dim, and have shape "
                f"{list(self.values.shape)}. Flatten them."
            )
        ends = tuple(itertools.accumulate(self.lengths.sum(dim=1).tolist()))
        object.__setattr__(self, "_ends", ends)
        total = ends[-1] if ends else 0
        if (self.lengths < 0).any() or total != len(self.values):
            raise DataError(
                f"Lengths add up to {total:,} and there are {len(self.values):,} ids. Lengths "
                "must not be negative, and must add up to the number of ids."
            )

    @classmethod
    def from_bags(cls, bags: Mapping[str, Sequence[Sequence[int]]]) -> "KeyedJagged":
        """From lists: for each feature, for each sample, its ids.

        Raises:
            DataError: there is no feature, an id is not a whole number or beyond 64 bits, or
                features have different numbers of samples.

        >>> KeyedJagged.from_bags({"genre": [[4, 1], [], [7]]}).lengths.tolist()
        [[2, 0, 1]]
        """
        if not bags:
            raise DataError("A batch needs a feature, and has none. Give each table its bags.")
        lengths = [[len(bag) for bag in rows] for rows in bags.values()]
        if len({len(row) for row in lengths}) > 1:
            counts = ", ".join(f"{key} {len(rows)}" for key, rows in bags.items())
            raise DataError(f"Features have bags for different numbers of samples: {counts}.")
        values = [_whole(key, each) for key, rows in bags.items() for bag in rows for each in bag]
        return cls(
            tuple(bags),
            torch.tensor(lengths, dtype=torch.int32).reshape(len(bags), len(lengths[0])),
            torch.tensor(values, dtype=torch.int64),
        )

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.lengths.shape[1]

    @property
    def group_rows(self) -> list[int]:
        """Rows of each group of features; here all features have one for each sample."""
        return [self.samples]

    def group_of(self, key: str) -> int:
        """Which group a feature belongs to."""
        del key
        return 0

    def expand(self, key: str, rows: Tensor) -> Tensor:
        """What each sample gets of a feature's rows [rows of its group, W]."""
        del key
        return rows

    def fold(self, key: str, grads: Tensor) -> Tensor:
        """The gradient of a feature's rows, from those of the samples [B, W]."""
        del key
        return grads

    def bags(self, key: str) -> tuple[Tensor, Tensor]:
        """One feature's lengths, int32 [B], and ids, int64.

        Raises:
            DataError: there is no such feature.
        """
        if key not in self.keys:
            raise DataError(
                f"The batch has no feature {key}; it has {', '.join(self.keys)}. Add it, or drop "
                "its table."
            )
        index = self.keys.index(key)
        begin = self._ends[index - 1] if index else 0
        return self.lengths[index], self.values[begin : self._ends[index]]

    def select(self, begin: int, end: int) -> "KeyedJagged":
        """The samples ``begin:end``.

        Raises:
            DataError: there are no such samples.
        """
        if not 0 <= begin <= end <= self.samples:
            raise DataError(
                f"Samples {begin:,} to {end:,} are not in a batch of {self.samples:,}. Give a "
                "range from 0 on."
            )
        offsets = torch.nn.functional.pad(self.lengths.flatten().cumsum(0), (1, 0)).tolist()
        count = self.samples
        parts = [
            self.values[offsets[index * count + begin] : offsets[index * count + end]]
            for index in range(len(self.keys))
        ]
        values = torch.cat(parts) if parts else self.values
        return KeyedJagged(self.keys, self.lengths[:, begin:end].contiguous(), values)


def require_ids(key: str, lengths: Tensor, values: Tensor, rows: int) -> None:
    """Refuse ids that no row of a table has.

    Raises:
        DataError: names the feature, the sample and the id.
    """
    if not len(values) or (int(values.min()) >= 0 and int(values.max()) < rows):
        return
    at = int(torch.nonzero((values < 0) | (values >= rows))[0])
    sample = int(torch.searchsorted(lengths.cumsum(0), at, right=True))
    bad = int(values[at])
    what = "is negative" if bad < 0 else f"is beyond its table of {rows:,} rows"
    fix = "Ids begin at 0." if bad < 0 else f"Map it to one of 0 to {rows - 1:,}."
    raise DataError(f"Feature {key}: id {bad:,} of sample {sample:,} {what}. {fix}")


def _whole(key: str, number: SupportsIndex) -> int:
    """An id as an integer of 64 bits; torch would cut a fraction off."""
    try:
        whole = index(number)
    except TypeError:
        raise DataError(
            f"Feature {key}: id {number!r} is not a whole number. Map values to rows first."
        ) from None
    if not -(1 << 63) <= whole < 1 << 63:
        raise DataError(
            f"Feature {key}: an id of {whole.bit_length():,} bits exceeds int64, which has 63 and "
            "a sign. Map values to rows first."
        )
    return whole
