"""Samples from columns: bags of ids, numbers and labels, split by time.

Why
    A random split shows a model its users' future: on ML-100K that alone is worth 0.075 of AUC.

What it decides
    Rows are sorted by time and cut into training, validation and test. Vocabularies, means and
    deviations come from the training part alone; a value that it does not have is row 0 of its
    table. Ranks share each global batch in order, so that no number of ranks changes it.

Kept true (tests/unit/recsys/test_samples.py)
    No training row is later than a test row; missing columns, NaN and labels that are not
    numbers are refused.
"""

import csv
import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import DataError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_text, reason
from equipoise.base.shown import listed, shown
from equipoise.data.columns import open_parquet
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.rank.coding import Coding, NumberScale, text_of
from equipoise.recsys.sessions.order import find_sessions, shuffle_sessions
from equipoise.spec.recommend import ColumnsSpec

ML_100K = "ml-100k"
SPLITS = ("train", "validation", "test")
Columns = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Samples:
    """All samples in order of time; F features, N numbers."""

    keys: tuple[str, ...]
    rows: tuple[int, ...]
    """Rows of each feature's table: its vocabulary, and row 0 for what training did not have."""
    offsets: tuple[Ints, ...]
    """For each feature, where each sample's bag begins; int64 [samples + 1]."""
    ids: tuple[Ints, ...]
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

    def order(self, source: np.random.Generator, shuffle: str) -> Ints:
        """An epoch's order of the training samples, by ``samples`` or by ``sessions``."""
        train = self.edges[1]
        if shuffle == "sessions" and self.sessions is not None:
            return shuffle_sessions(self.sessions[:train], source)
        return source.permutation(train)

    def batch(self, index: Ints) -> tuple[KeyedJagged, Tensor, Tensor]:
        """Some samples: bags, numbers float32 [B, N] and labels float32 [B]."""
        lengths, values = [], []
        for offsets, ids in zip(self.offsets, self.ids, strict=True):
            begin = offsets[index]
            count = offsets[index + 1] - begin
            ends = np.cumsum(count)
            within = np.arange(int(count.sum())) - np.repeat(ends - count, count)
            lengths.append(count.astype(np.int32))
            values.append(ids[np.repeat(begin, count) + within])
        # torch cannot view the bytes of a stack of no samples, whose strides NumPy says are 0.
        flat = torch.from_numpy(np.concatenate(lengths)).view(len(self.keys), len(index))
        jagged = KeyedJagged(self.keys, flat, torch.from_numpy(np.concatenate(values)))
        numbers, labels = self.numbers[index], self.labels[index]
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
        path = base / Path(spec.path).expanduser()
        columns, label = read_columns(path), path.name
    return make_samples(columns, spec, label)


def make_samples(columns: Mapping[str, np.ndarray], spec: ColumnsSpec, label: str) -> Samples:
    """Samples of columns that were read; ``label`` names them in messages."""
    features = (*spec.ids, *spec.bags)
    wanted = [*features, *spec.numbers, spec.label]
    wanted += [name for name in (spec.time, spec.session) if name]
    for name in wanted:
        if name not in columns:
            raise DataError(
                f'{label} has no column "{name}" among its {len(columns)} '
                f'({listed(columns)}). Nearest: "{nearest(name, list(columns))}".'
            )
    stamps = column_numbers(columns, spec.time, label) if spec.time else None
    count = len(columns[spec.label])
    order = np.arange(count) if stamps is None else np.argsort(stamps, kind="stable")
    train = int(count * spec.train_share)
    held = train + (count - train) // 2
    if not 0 < train < held < count:
        raise DataError(
            f"{label} has {count:,} rows, too few for training, validation and test. Give more."
        )
    labels = (column_numbers(columns, spec.label, label)[order] >= spec.positive_from).astype(
        np.float32
    )
    offsets, ids, rows = [], [], []
    words: dict[str, list[str]] = {}
    for name in features:
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
        scaled, bad = scale.apply(column)
        if bad is not None:
            raise DataError(
                f"{label}, column {name}, row {bad + 1:,}: {column[bad]:g} is too far from "
                f"training, whose mean is {scale.mean:g} and deviation {scale.deviation:g}, for "
                "float32. Fix it, or leave the row out."
            )
        numbers[:, at] = scaled[order]
    sessions = None
    if spec.session:
        times = None if stamps is None else stamps[order]
        sessions = find_sessions(columns[spec.session][order], times, spec.session_gap, label)
    return Samples(
        tuple(features),
        tuple(rows),
        tuple(offsets),
        tuple(ids),
        numbers,
        labels,
        (0, train, held, count),
        sessions,
        Coding(spec.ids, spec.bags, words, scales),
    )


def require_scores(samples: Samples) -> None:
    """Refuse held-out samples of one class, before anything is trained.

    Raises:
        DataError: names the split and its label.
    """
    for split in SPLITS[1:]:
        begin, end = samples.bounds(split)
        positives = int(samples.labels[begin:end].sum())
        if positives in (0, end - begin):
            raise DataError(
                f"All {end - begin:,} samples of the {split} split have the label "
                f"{int(positives > 0)}, so nothing can be ranked. Give more rows, lower "
                "data.train_share, or set data.positive_from between the labels."
            )


def _split(values: np.ndarray, *, is_bag: bool) -> tuple[Ints, np.ndarray]:
    """Where each sample's bag begins, and all values; an empty value is an empty bag."""
    if not is_bag:
        return np.arange(len(values) + 1), values.astype(str)
    bags = [str(value).split() for value in values.tolist()]
    lengths = np.array([len(bag) for bag in bags], dtype=np.int64)
    return np.concatenate(([0], np.cumsum(lengths))), np.array(
        [each for bag in bags for each in bag], dtype=str
    )


def column_numbers(columns: Mapping[str, np.ndarray], name: str, label: str) -> Floats:
    """A column as finite numbers.

    Raises:
        DataError: names the first row that is not one.
    """
    values = columns[name]
    try:
        numbers = values.astype(np.float64)
    except (TypeError, ValueError):
        at = next(row for row, value in enumerate(values.tolist()) if not _is_number(value))
        raise DataError(
            f'{label}, column {name}, row {at + 1:,}: "{values[at]}" is not a number. Fix it, or '
            "list the column under data.ids."
        ) from None
    bad = np.flatnonzero(~(np.abs(numbers) <= np.finfo(np.float32).max))
    if len(bad):
        raise DataError(
            f"{label}, column {name}: {len(bad):,} of {len(numbers):,} rows are NaN or beyond "
            f"float32, the first is row {int(bad[0]) + 1:,}. Fill them or leave these rows out."
        )
    return numbers


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def read_columns(path: Path) -> Columns:
    """Every column of a Parquet, CSV or TSV file.

    Raises:
        DataError: no such file, not of this kind, or a line has another number of values.
    """
    if not path.is_file():
        raise DataError(f"No such file: {path}. Set data.path to a Parquet, CSV or TSV file.")
    if path.suffix == ".parquet":
        with open_parquet(path) as parquet:
            table = parquet.read()
            _require_distinct(path, table.column_names)
            return {name: _column(path, name, table.column(name)) for name in table.column_names}
    delimiter = "," if path.suffix == ".csv" else "\t"
    try:
        rows = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {reason(error)}. Set data.path to a Parquet, CSV or TSV file."
        ) from None
    body: list[list[str]] = []
    try:
        head = [name.partition(":")[0].strip() for name in next(rows, [])]
        _require_distinct(path, head)
        for row in rows:
            if len(row) != len(head):
                raise DataError(
                    f"{path.name}:{rows.line_num}  {len(row)} values under {len(head)} columns. "
                    "Write one for each."
                )
            body.append(row)
    except csv.Error as error:
        raise DataError(
            f"{path.name}:{rows.line_num}  is not CSV: {error}. Correct the line."
        ) from None
    if not body:
        raise DataError(f"{path} holds no rows below its line of column names. Give it some.")
    return {name: np.array([row[at] for row in body]) for at, name in enumerate(head)}


def _require_distinct(path: Path, names: Sequence[str]) -> None:
    """Refuse a name of two columns: nothing says which of them a key means."""
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise DataError(f"{path.name} has two columns {shown(doubled[0])}. Rename one.")


def _column(path: Path, name: str, column: Any) -> np.ndarray:
    """A column of Parquet: numbers as they are, all else as the texts that requests have.

    NumPy has no integer that is missing: one null would make all ids of a column floats, in which
    neighbours above 2^53 are one. So would integers below and from 2^63 on in one column.
    """
    values = column.to_pylist()
    if all(isinstance(value, int) for value in values):
        is_beyond = max(values, default=0) > np.iinfo(np.int64).max
        return np.array(values, dtype=np.uint64 if is_beyond else None)
    if all(value is None or isinstance(value, float) for value in values):
        return np.array([np.nan if value is None else value for value in values])
    cells = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        try:
            cells[row] = _cell(value)
        except UnicodeDecodeError:
            raise DataError(
                f"{path.name}, column {shown(name)}, row {row + 1:,}: the bytes are not UTF-8 "
                "text. Write them as hexadecimal digits, or leave the column out."
            ) from None
    return cells if any(value is None for value in values) else np.array(cells.tolist())


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(text_of(_cell(each)) for each in value)
    return np.nan if value is None else value.decode() if isinstance(value, bytes) else value


def read_ml_100k() -> Columns:
    """MovieLens 100K as the recbole wheel holds it, users and items joined to ratings.

    Raises:
        DataError: recbole is not installed.
    """
    spec = importlib.util.find_spec("recbole")
    places: Sequence[str] = [] if spec is None else list(spec.submodule_search_locations or ())
    folder = Path(places[0]) / "dataset_example" / ML_100K if places else Path()
    if not places or not folder.is_dir():
        raise DataError(
            "ML-100K is read from the package recbole, which is not installed. Run: pip install "
            "--no-deps recbole==1.2.1"
        )
    ratings = _atomic(folder / "ml-100k.inter")
    columns = dict(ratings)
    for file, key in (("ml-100k.user", "user_id"), ("ml-100k.item", "item_id")):
        other = _atomic(folder / file)
        place = {value: row for row, value in enumerate(other[key].tolist())}
        index = np.array([place[value] for value in ratings[key].tolist()])
        columns |= {name: values[index] for name, values in other.items() if name != key}
    stamps = columns["timestamp"].astype(np.float64)
    years = columns["release_year"]
    known = np.char.isdigit(years)
    columns["year"] = np.where(known, years, "1995").astype(np.float64)
    columns["hour"] = (stamps // 3600 % 24).astype(np.int64)
    columns["zip3"] = np.array([code[:3] for code in columns["zip_code"].tolist()])
    columns["age5"] = columns["age"].astype(np.int64) // 5
    columns["genres"] = columns.pop("class")
    return columns


def _atomic(path: Path) -> Columns:
    """A file of recbole: tab-separated, typed column names, no quotes."""
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    head = [name.partition(":")[0] for name in lines[0].split("\t")]
    body = [line.split("\t") for line in lines[1:]]
    return {name: np.array([row[at] for row in body]) for at, name in enumerate(head)}
