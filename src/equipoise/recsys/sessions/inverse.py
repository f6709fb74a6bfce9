"""Rows that samples share, kept once, with the row of each sample: inverse keyed jagged tensors.

Why
    Samples of one session repeat its user's features. A group of features that change together
    is kept once for each distinct row, and ``inverse`` says which row each sample has::

        user  u1 u1 u1 u2 u2      rows  u1 u2      inverse  0 0 0 1 1

    Lookup and exchange then handle U rows where there were B samples.

What it decides
    Rows are bucketed by a hash and compared in full before they count as equal, so a hash that
    collides costs time and never changes an answer. Distinct rows stand in the order of their first
    appearance. Expanding copies rows, so a forward equals that without groups to the bit; a row's
    gradient is the sum over its samples in their order, which rounds differently in the last place.

Kept true (tests/unit/recsys/sessions/test_inverse.py, tests/multi/recsys/test_sessions.py)
    Expanded, a batch is the one it was built from, also under a hash that collides; forwards are
    equal to the bit; ids and bytes fall by the samples of a distinct row.

Sources
    RecD, arXiv:2211.05239, section 4: IKJTs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.base.errors import DataError
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.optimizer import pool

RowHash = Callable[[Ints, Ints], np.ndarray]
"""Ids of all rows, and where each row's begin, int64 [rows + 1], to uint64 [rows]."""
_ODD, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """The distinct rows of a group of features."""

    bags: KeyedJagged
    """The group's features of U rows."""
    inverse: Tensor | None
    """The row of each sample, int64 [B]; None where each sample has its own."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.bags.samples if self.inverse is None else len(self.inverse)

    def expand(self, rows: Tensor) -> Tensor:
        """Each sample's row, [B, W] of [U, W]."""
        return rows if self.inverse is None else rows[self.inverse]

    def fold(self, grads: Tensor) -> Tensor:
        """Each row's gradient: the sum over its samples in their order, [U, W] of [B, W]."""
        return grads if self.inverse is None else fold_rows(grads, self.inverse, self.bags.samples)


@dataclass(frozen=True, slots=True, eq=False)
class InverseJagged:
    """A batch in groups of features, each with its distinct rows."""

    groups: tuple[SharedRows, ...]

    def __post_init__(self) -> None:
        if len({group.samples for group in self.groups}) != 1:
            counts = ", ".join(str(group.samples) for group in self.groups) or "none"
            raise DataError(f"Groups of one batch have different numbers of samples: {counts}.")

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.groups[0].samples

    @property
    def values(self) -> Tensor:
        """Ids of the first group, to see their device."""
        return self.groups[0].bags.values

    @property
    def group_rows(self) -> list[int]:
        """Distinct rows of each group."""
        return [group.bags.samples for group in self.groups]

    def group_of(self, key: str) -> int:
        """Which group a feature belongs to.

        Raises:
            DataError: there is no such feature.
        """
        for place, group in enumerate(self.groups):
            if key in group.bags.keys:
                return place
        keys = ", ".join(key for group in self.groups for key in group.bags.keys)
        raise DataError(
            f"The batch has no feature {key}; it has {keys}. Add it, or drop its table."
        )

    def bags(self, key: str) -> tuple[Tensor, Tensor]:
        """One feature's lengths, int32 [U], and ids, int64, of its group's distinct rows."""
        return self.groups[self.group_of(key)].bags.bags(key)

    def expand(self, key: str, rows: Tensor) -> Tensor:
        """What each sample gets of a feature's rows, [B, W] of [U, W]."""
        return self.groups[self.group_of(key)].expand(rows)

    def fold(self, key: str, grads: Tensor) -> Tensor:
        """The gradient of a feature's rows, [U, W] of [B, W]."""
        return self.groups[self.group_of(key)].fold(grads)

    def flatten(self) -> KeyedJagged:
        """The batch without groups, in the order of the groups' features."""
        keys, lengths, values = [], [], []
        for group in self.groups:
            for key in group.bags.keys:
                own, ids = group.bags.bags(key)
                index = group.inverse
                index = torch.arange(len(own), device=own.device) if index is None else index
                keys.append(key)
                lengths.append(own[index])
                values.append(_take(own, ids, index))
        return KeyedJagged(tuple(keys), torch.stack(lengths), torch.cat(values))


def share_rows(
    batch: KeyedJagged, groups: Sequence[Sequence[str]], *, row_hash: RowHash | None = None
) -> InverseJagged:
    """Keep the distinct rows of each group once.

    Args:
        batch: B samples.
        groups: Features that change together; those in none keep a row for each sample.
        row_hash: In place of ``hash_rows``.

    Returns:
        The groups in their order, then the other features.

    Raises:
        DataError: a group is empty, or names a feature that the batch does not have, or twice.

    Cost: O(B log B) a group.

    >>> batch = KeyedJagged.from_bags({"user": [[7], [7], [2]], "item": [[1], [3], [1]]})
    >>> shared = share_rows(batch, [["user"]])
    >>> shared.groups[0].inverse.tolist(), shared.bags("user")[1].tolist(), shared.group_rows
    ([0, 0, 1], [7, 2], [2, 3])
    """
    named = [key for group in groups for key in group]
    if not all(groups):
        raise DataError("A group has no feature. Leave it out.")
    for key in named:
        if named.count(key) > 1:
            raise DataError(f"Two groups have the feature {key}. Name it once.")
        batch.bags(key)
    made = []
    for group in groups:
        inverse, first = find_rows(batch, group, row_hash or hash_rows)
        if len(first) == batch.samples:
            made.append(SharedRows(_select(batch, group, None), None))
            continue
        made.append(SharedRows(_select(batch, group, torch.from_numpy(first)), inverse))
    if rest := [key for key in batch.keys if key not in named]:
        made.append(SharedRows(_select(batch, rest, None), None))
    return InverseJagged(tuple(made))


def find_rows(batch: KeyedJagged, keys: Sequence[str], row_hash: RowHash) -> tuple[Tensor, Ints]:
    """The distinct row of each sample, int64 [B], and the first sample of each, int64 [U]."""
    parts = [batch.bags(key) for key in keys]
    lengths_BF = torch.stack([own for own, _ in parts], dim=1).cpu().numpy().astype(np.int64)
    # Rows end to end: the lengths of a row, then its ids, so that equal rows are equal spans.
    spans = _row_spans(lengths_BF, [ids.cpu().numpy() for _, ids in parts])
    values, starts = spans
    same = _first_equal(values, starts, row_hash(values, starts))
    first, inverse = np.unique(same, return_inverse=True)
    return torch.from_numpy(inverse.astype(np.int64)).to(batch.values.device), first


def hash_rows(values: Ints, starts: Ints) -> np.ndarray:
    """A 64-bit hash of each row's ids and their order.

    Args:
        values: All rows end to end, int64.
        starts: Where each row begins, int64 [rows + 1].

    Returns:
        uint64 [rows].
    """
    place = np.arange(len(values)) - np.repeat(starts[:-1], np.diff(starts))
    with np.errstate(over="ignore"):
        mixed = (values.astype(np.uint64) + _ODD * (place.astype(np.uint64) + np.uint64(1))) * _MIX
        mixed ^= mixed >> np.uint64(29)
        mixed *= _ODD
        mixed ^= mixed >> np.uint64(32)
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)))
        hashed: np.ndarray = sums[starts[1:]] - sums[starts[:-1]]
    return hashed


def fold_rows(grads: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """The sum of each row's samples in their order, [rows, W] of [B, W]."""
    order = torch.argsort(inverse, stable=True)
    return pool(order, torch.bincount(inverse, minlength=rows), grads.contiguous())


def _first_equal(values: Ints, starts: Ints, hashed: np.ndarray) -> Ints:
    """For each row, the first row that equals it; rows of one hash are compared in full."""
    count = len(starts) - 1
    same = np.full(count, -1, dtype=np.int64)
    left = np.arange(count)
    while len(left):
        _, first, place = np.unique(hashed[left], return_index=True, return_inverse=True)
        candidate = left[first][place]
        equal = _equal_rows(values, starts, left, candidate)
        same[left[equal]] = candidate[equal]
        left = left[~equal]
    return same


def _equal_rows(values: Ints, starts: Ints, rows: Ints, others: Ints) -> np.ndarray:
    """Whether each row equals another, bool [rows]."""
    counts = starts[rows + 1] - starts[rows]
    equal: np.ndarray = counts == starts[others + 1] - starts[others]
    pairs = np.flatnonzero(equal)
    owner = np.repeat(pairs, counts[pairs])
    ends = np.cumsum(counts[pairs])
    within = np.arange(int(counts[pairs].sum())) - np.repeat(ends - counts[pairs], counts[pairs])
    differs = values[starts[rows][owner] + within] != values[starts[others][owner] + within]
    equal[owner[differs]] = False
    return equal


def _row_spans(lengths_BF: Ints, ids: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Each row's lengths and ids as one span: all spans end to end, and where each begins."""
    features = lengths_BF.shape[1]
    starts = np.concatenate(([0], np.cumsum(lengths_BF.sum(axis=1) + features)))
    values = np.empty(int(starts[-1]), dtype=np.int64)
    for feature in range(features):
        values[starts[:-1] + feature] = lengths_BF[:, feature]
    at = starts[:-1] + features
    for feature in range(features):
        own = lengths_BF[:, feature]
        ends = np.cumsum(own)
        within = np.arange(int(own.sum())) - np.repeat(ends - own, own)
        values[np.repeat(at, own) + within] = ids[feature]
        at = at + own
    return values, starts


def _select(batch: KeyedJagged, keys: Sequence[str], rows: Tensor | None) -> KeyedJagged:
    """Some features of some samples; of all without ``rows``."""
    parts = [batch.bags(key) for key in keys]
    if rows is None:
        lengths, values = [own for own, _ in parts], [ids for _, ids in parts]
    else:
        index = rows.to(batch.values.device)
        lengths = [own[index] for own, _ in parts]
        values = [_take(own, ids, index) for own, ids in parts]
    return KeyedJagged(tuple(keys), torch.stack(lengths), torch.cat(values))


def _take(lengths: Tensor, ids: Tensor, index: Tensor) -> Tensor:
    """The ids of some bags, end to end."""
    counts = lengths.to(torch.int64)
    begin = (counts.cumsum(0) - counts)[index]
    own = counts[index]
    within = torch.arange(int(own.sum()), device=ids.device)
    within -= torch.repeat_interleave(own.cumsum(0) - own, own)
    return ids[torch.repeat_interleave(begin, own) + within]
