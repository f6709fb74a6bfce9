"""Samples from columns: bags of ids, numbers and labels, split by time.

Why
    A random split shows a model its users' future: on ML-100K that alone is worth 0.075 of AUC.

What it decides
    Rows are sorted by time and cut into training, validation and test. Vocabularies, means and
    deviations come from the training part alone. A value that it does not have is left out of its
    bag: no row was ever trained for it, and an untrained one is noise. Ranks share each global
    batch in order, so that no number of ranks changes it.

Kept true (tests/unit/recsys/test_samples.py)
    No training row is later than a test row; missing columns, NaN and labels that are not
    numbers are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import DataError
from equipoise.base.nearest import nearest
from equipoise.base.read import user_path
from equipoise.base.shown import counted, listed, shown
from equipoise.numerics.sparse import compiled, take_bags
from equipoise.recsys.columns import (
    ML_100K,
    column_numbers,
    read_columns,
    read_ml_100k,
    require_values,
    time_order,
)
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.rank.coding import Coding, NumberScale, words_of
from equipoise.recsys.sessions.order import find_sessions, shuffle_sessions
from equipoise.spec.recommend import ColumnsSpec

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Samples:
    """All samples in order of time; F features, N numbers."""

    keys: tuple[str, ...]
    rows: tuple[int, ...]
    """Rows of each feature's table: its vocabulary, behind row 0, which nobody looks up."""
    offsets: tuple[Ints, ...]
    """For each feature, where each sample's bag begins; int64 [samples + 1]."""
    ids: tuple[Ints, ...]
    """The rows of all bags; 0 for what training did not have, which batches leave out."""
    numbers: np.ndarray
    """float32 [samples, N], mean 0 and deviation 1 in training."""
    labels: np.ndarray
    """float32 [samples], 0 or 1."""
    edges: tuple[int, ...]
    """Where the splits begin and end: 0, train, train + validation, all."""
    sessions: Ints | None = None
    """The session of each sample, int64 [samples]; None unless the data names them."""
    coding: Coding = field(default_factory=Coding)
    """How columns became ids and numbers."""

    def bounds(self, split: str) -> tuple[int, int]:
        """First and one past the last sample of a split."""
        at = SPLITS.index(split)
        return self.edges[at], self.edges[at + 1]

    def digest(self) -> str:
        """A digest of what steps read of them: ids, numbers, labels, splits and sessions."""
        held = xxhash.xxh64(repr(self.edges).encode())
        sessions = () if self.sessions is None else (self.sessions,)
        for part in (self.labels, self.numbers, *self.ids, *self.offsets, *sessions):
            held.update(np.ascontiguousarray(part).tobytes())
        return held.hexdigest()

    def order(self, source: np.random.Generator, shuffle: str) -> Ints:
        """An epoch's order of the training samples, by ``samples`` or by ``sessions``."""
        train = self.edges[1]
        if shuffle == "sessions" and self.sessions is not None:
            return shuffle_sessions(self.sessions[:train], source)
        return source.permutation(train)

    def batch(self, index: Ints) -> tuple[KeyedJagged, Tensor, Tensor]:
        """Some samples: bags, numbers float32 [B, N] and labels float32 [B]."""
        numbers, labels = self.numbers[index], self.labels[index]  # refuses what is not there
        take = compiled(take_bags)
        both = [take(*each, index) for each in zip(self.offsets, self.ids, strict=True)]
        lengths, values = zip(*both, strict=True)
        # torch cannot view the bytes of a stack of no samples, whose strides NumPy says are 0.
        flat = torch.from_numpy(np.concatenate(lengths)).view(len(self.keys), len(index))
        jagged = KeyedJagged(self.keys, flat, torch.from_numpy(np.concatenate(values)))
        return jagged, torch.from_numpy(numbers), torch.from_numpy(labels)

    def row_counts(self, split: str = "train") -> dict[str, Ints]:
        """Lookups of each row by the samples of a split."""
        begin, end = self.bounds(split)
        return {
            key: np.bincount(ids[offsets[begin] : offsets[end]], minlength=rows).astype(np.int64)
            for key, rows, offsets, ids in zip(
                self.keys, self.rows, self.offsets, self.ids, strict=True
            )
        }

    def ids_per_sample(self) -> dict[str, float]:
        """Mean ids of each feature in training."""
        end = self.edges[1]
        return {
            key: float(offsets[end]) / end
            for key, offsets in zip(self.keys, self.offsets, strict=True)
        }


def read_samples(spec: ColumnsSpec, base: Path) -> Samples:
    """The samples that a run's data section describes.

    Raises:
        DataError: a file or a column is missing, or a value is wrong.
    """
    if spec.source == ML_100K:
        columns, label = read_ml_100k(), "ml-100k"
    else:
        path = base / user_path(spec.path)
        columns, label = read_columns(path), path.name
    return make_samples(columns, spec, label)


def make_samples(columns: Mapping[str, np.ndarray], spec: ColumnsSpec, label: str) -> Samples:
    """Samples of columns that were read; ``label`` names them in messages."""
    features = (*spec.ids, *spec.bags)
    wanted = [*features, *spec.numbers, spec.label]
    wanted += [name for name in (spec.time, spec.session) if name]
    for name in wanted:
        if not columns:
            raise DataError(f"{label} has no columns. Give it those that [data] names.")
        if name not in columns:
            raise DataError(
                f"{label} has no column {shown(name)} among its {len(columns)} "
                f"({listed(columns)}). Nearest: {shown(nearest(name, list(columns)))}."
            )
    count = len(columns[spec.label])
    order, stamps = np.arange(count), None
    if spec.time:
        order, stamps = time_order(columns, spec.time, label)
    train = int(count * spec.train_share)
    held = train + (count - train) // 2
    if not 0 < train < held < count:
        raise DataError(
            f"{label} has {counted(count, 'row')}, too few for training, validation and test. Give "
            "more."
        )
    fix = "Write labels as numbers, 1 for positive and 0 for negative"
    labels = column_numbers(columns, spec.label, label, fix)[order] >= spec.positive_from
    offsets, ids, rows = [], [], []
    words: dict[str, list[str]] = {}
    for name in features:
        require_values(columns[name], name, label, is_bag=name in spec.bags)
        starts, values = _split(columns[name][order], is_bag=name in spec.bags)
        known, inverse = np.unique(values, return_inverse=True)
        seen = np.zeros(len(known), dtype=bool)
        seen[inverse[: starts[train]]] = True
        place = np.where(seen, np.cumsum(seen), 0)
        offsets.append(starts)
        ids.append(place[inverse].astype(np.int64))
        rows.append(int(seen.sum()) + 1)
        words[name] = known[seen].tolist()
    numbers = np.zeros((count, len(spec.numbers)), dtype=np.float32)
    scales: dict[str, NumberScale] = {}
    for at, name in enumerate(spec.numbers):
        column = column_numbers(columns, name, label)
        scale = scales[name] = NumberScale.measure(column[order[:train]])
        numbers[:, at] = scale_column(column, scale, f"{label}, column {name}")[order]
    sessions = None
    if spec.session:
        require_values(columns[spec.session], spec.session, label, is_bag=False)
        times = None if stamps is None else stamps[order]
        sessions = find_sessions(columns[spec.session][order], times, spec.session_gap, label)
    return Samples(
        tuple(features),
        tuple(rows),
        tuple(offsets),
        tuple(ids),
        numbers,
        labels.astype(np.float32),
        (0, train, held, count),
        sessions,
        Coding(spec.ids, spec.bags, words, scales),
    )


def scale_column(column: Floats, scale: NumberScale, where: str) -> Floats:
    """A column of numbers in deviations from training's mean; ``where`` names it in messages.

    Raises:
        DataError: names the first row that float32 cannot hold.
    """
    scaled, bad = scale.apply(column)
    if bad is not None:
        raise DataError(
            f"{where}, row {bad + 1:,}: {column[bad]:g} is too far from training, whose mean is "
            f"{scale.mean:g} and deviation {scale.deviation:g}, for float32. Fix it, or leave the "
            "row out."
        )
    return scaled


def require_scores(samples: Samples) -> None:
    """Refuse splits of one class, before anything is trained.

    Raises:
        DataError: names the split and its label.
    """
    for split in SPLITS:
        begin, end = samples.bounds(split)
        positives = int(samples.labels[begin:end].sum())
        if positives in (0, end - begin):
            is_train = split == "train"
            raise DataError(
                f"All {end - begin:,} samples of the {split} split have the label "
                f"{int(positives > 0)}, so nothing can be {'learned' if is_train else 'ranked'}. "
                f"Give more rows, {'raise' if is_train else 'lower'} data.train_share, or set "
                "data.positive_from between the labels."
            )


def _split(values: np.ndarray, *, is_bag: bool) -> tuple[Ints, np.ndarray]:
    """Where each sample's bag begins, and all values; an empty value is an empty bag."""
    if not is_bag:
        return np.arange(len(values) + 1), values.astype(str)
    bags = [words_of(value) for value in values.tolist()]
    lengths = np.array([len(bag) for bag in bags], dtype=np.int64)
    return np.concatenate(([0], np.cumsum(lengths))), np.array(
        [each for bag in bags for each in bag], dtype=str
    )
