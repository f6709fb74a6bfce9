"""Samples from columns: split by time, vocabularies of training alone, bad values refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.base.errors import DataError
from equipoise.recsys.columns import read_columns
from equipoise.recsys.samples import make_samples, require_scores
from equipoise.spec.recommend import ColumnsSpec

SPEC = ColumnsSpec(
    path="x.csv", label="rating", positive_from=4.0, time="t", ids=("user",), bags=("genres",),
    numbers=("age",), train_share=0.6,
)  # fmt: skip


def columns(rows: int = 10) -> dict[str, np.ndarray]:
    return {
        "user": np.array([f"u{i // 2}" for i in range(rows)]),
        "genres": np.array([" ".join(["x", "y", "z"][: i % 4]) for i in range(rows)]),
        "age": np.arange(rows).astype(str),
        "rating": np.array([str(1 + i % 5) for i in range(rows)]),
        "t": np.arange(rows)[::-1].astype(str),
    }


def test_training_is_the_past() -> None:
    samples = make_samples(columns(), SPEC, "x.csv")
    assert samples.edges == (0, 6, 8, 10)
    assert samples.labels.tolist() == [float(1 + i % 5 >= 4) for i in range(10)][::-1]
    # Users u4, u3, u2 trained; u1 and u0 are 0.
    assert samples.rows[0] == 4
    assert samples.ids[0].tolist() == [3, 3, 2, 2, 1, 1, 0, 0, 0, 0]
    assert samples.numbers[:6].mean() == pytest.approx(0, abs=1e-6)
    assert samples.numbers[:6].std() == pytest.approx(1, abs=1e-6)


def test_batches_hold_the_bags_of_their_samples() -> None:
    samples = make_samples(columns(), SPEC, "x.csv")
    jagged, numbers, labels = samples.batch(np.array([2, 0, 9]))
    assert jagged.keys == ("user", "genres")
    lengths, ids = jagged.bags("genres")
    assert lengths.tolist() == [3, 1, 0]
    assert len(set(ids.tolist()[:3])) == 3
    assert numbers.shape == (3, 1)
    assert labels.shape == (3,)
    assert samples.row_counts()["user"].tolist() == [0, 2, 2, 2]


def test_values_that_training_lacks_are_left_out_of_bags() -> None:
    """They looked up a row that no step had trained."""
    given = columns() | {"genres": np.array([*["x new", "new", "new x y"], *["x y"] * 7])}
    samples = make_samples(given, SPEC, "x.csv")
    index = np.array([0, 9, 7, 8])
    jagged, _, _ = samples.batch(index)
    assert [each.tolist() for each in jagged.bags("user")] == [[1, 0, 0, 0], [3]]
    assert [each.tolist() for each in jagged.bags("genres")] == [[2, 1, 2, 0], [1, 2, 1, 1, 2]]
    rows = {"user": ["u4", "u0", "u1", "u0"], "genres": given["genres"][9 - index].tolist()}
    coded = samples.coding.code({"age": 3}, rows)
    assert coded.jagged.lengths.equal(jagged.lengths) and coded.jagged.values.equal(jagged.values)
    assert (coded.unknown, samples.row_counts("test")["genres"].tolist()) == (6, [2, 1, 0])


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "age",
            ["nan", *"123456789"],
            "x.csv, column age: 1 of 10 rows are NaN or beyond float32, the first is row 1. Fill "
            "them or leave these rows out.",
        ),
        (
            "age",
            ["1e308", *"123456789"],
            "x.csv, column age: 1 of 10 rows are NaN or beyond float32, the first is row 1. Fill "
            "them or leave these rows out.",
        ),
        (
            "age",
            ["1", "old", *"12345678"],
            'x.csv, column age, row 2: "old" is not a number. Fix it, or list the column under '
            "data.ids.",
        ),
        (
            "age",
            ["1e60", *["1", "3"] * 4, "1"],
            "x.csv, column age: 1 of 10 rows are NaN or beyond float32, the first is row 1. Fill "
            "them or leave these rows out.",
        ),
        (
            "age",
            ["1e20", *["1e-20", "3e-20"] * 4, "1e-20"],
            "x.csv, column age, row 1: 1e+20 is too far from training, whose mean is 2e-20 and "
            "deviation 1e-20, for float32. Fix it, or leave the row out.",
        ),
        (
            None,
            [],
            'x.csv has no column "age" among its 4 (user, genres, rating, t). Nearest: "user".',
        ),
    ],
)
def test_bad_columns_are_refused(name: str | None, values: list[str], message: str) -> None:
    given = columns()
    if name is None:
        del given["age"]
    else:
        given[name] = np.array(values)
    with pytest.raises(DataError) as error:
        make_samples(given, SPEC, "x.csv")
    said = str(error.value)
    assert said == message or (name is None and said.startswith(message.split("Nearest")[0]))


def test_too_few_rows_are_refused() -> None:
    few = {name: values[:1] for name, values in columns().items()}
    with pytest.raises(DataError, match="has 1 row, too few for training, validation and test"):
        make_samples(few, SPEC, "x.csv")


def test_a_constant_of_training_is_not_magnified_later() -> None:
    given = columns(200)
    given["age"] = np.where(given["t"].astype(float) < 190, 0.1, 0.2)
    samples = make_samples(given, SPEC, "x.csv")
    assert samples.numbers[:120].tolist() == [[0.0]] * 120
    assert float(np.abs(samples.numbers).max()) == pytest.approx(0.1)


def test_a_split_of_one_class_is_refused_before_training() -> None:
    given = columns()
    given["rating"] = np.where(np.argsort(np.argsort(given["t"].astype(float))) < 5, 5, 1)
    samples = make_samples(given, SPEC, "x.csv")
    begin, end = samples.bounds("validation")
    with pytest.raises(DataError) as error:
        require_scores(samples)
    assert str(error.value) == (
        f"All {end - begin} samples of the validation split have the label 0, so nothing can be "
        "ranked. Give more rows, lower data.train_share, or set data.positive_from between the "
        "labels."
    )
    given["rating"] = np.where(given["t"].astype(int) < 6, 1, np.arange(10) % 2 * 4)
    with pytest.raises(DataError) as error:
        require_scores(make_samples(given, SPEC, "x.csv"))
    assert str(error.value) == (
        "All 6 samples of the train split have the label 0, so nothing can be learned. Give more "
        "rows, raise data.train_share, or set data.positive_from between the labels."
    )


def test_no_samples_are_a_batch_whose_bytes_can_be_viewed() -> None:
    jagged, numbers, labels = make_samples(columns(), SPEC, "x.csv").batch(np.array([], np.int64))
    lengths, ids = jagged.bags("user")
    assert (len(lengths), len(ids), len(numbers), len(labels)) == (0, 0, 0, 0)
    assert len(lengths.contiguous().view(torch.uint8)) == 0


def test_a_missing_id_leaves_the_others_whole(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    ids = [None, *(2**60 + at for at in range(9))]
    parquet.write_table(pyarrow.table({"user": ids}), tmp_path / "x.parquet")
    given = columns() | read_columns(tmp_path / "x.parquet")
    words = make_samples(given, replace(SPEC, time=""), "x.parquet").coding.words
    assert list(words["user"]) == [*map(str, ids[1:6]), "nan"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "x.csv has no columns. Give it those that [data] names."),
        (
            columns() | {"rating": np.array(["good"] * 10)},
            'x.csv, column rating, row 1: "good" is not a number. Write labels as numbers, 1 for '
            "positive and 0 for negative.",
        ),
    ],
)
def test_what_samples_need_is_said(given: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(DataError) as error:
        make_samples(given, SPEC, "x.csv")
    assert str(error.value) == message


def test_a_session_of_nobody_is_refused() -> None:
    given = columns() | {"visit": np.array([np.nan] * 10, dtype=object)}
    with pytest.raises(DataError, match="the column of sessions: 10 of 10 rows are empty"):
        make_samples(given, replace(SPEC, session="visit"), "x.csv")
