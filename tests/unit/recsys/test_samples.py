"""Samples from columns: split by time, vocabularies of training alone, bad values refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.base.errors import DataError
from equipoise.recsys.samples import column_numbers, make_samples, read_columns, require_scores
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
    # Users u4, u3, u2 trained; u1 and u0 are row 0.
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


def test_files_are_read_alike(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "x.csv").write_text("user,genres,age\na,x y,3\nb,,4\n")
    table = {"user": ["a", "b"], "genres": [["x", "y"], []], "age": [3, 4]}
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    one, other = read_columns(tmp_path / "x.csv"), read_columns(tmp_path / "x.parquet")
    assert {k: v.astype(str).tolist() for k, v in one.items()} == {
        k: v.astype(str).tolist() for k, v in other.items()
    }
    (tmp_path / "bad.csv").write_text("a,b\n1\n")
    with pytest.raises(DataError, match=r"bad.csv:2  1 values under 2 columns. Write one for each"):
        read_columns(tmp_path / "bad.csv")
    (tmp_path / "none.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="holds no rows below its line of column names"):
        read_columns(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"No such file: .*gone.csv. Set data.path to a Parquet"):
        read_columns(tmp_path / "gone.csv")
    few = {name: values[:1] for name, values in columns().items()}
    with pytest.raises(DataError, match="has 1 rows, too few for training, validation and test"):
        make_samples(few, SPEC, "x.csv")


TORN = {
    "UTF-16": (
        "user,age\na,3\n".encode("utf-16"),
        "{file} cannot be read: it is not UTF-8 text: line 1. Set data.path to a Parquet, CSV or "
        "TSV file.",
    ),
    "a long value": (
        b"user,age\n" + b"a" * 200_000 + b",3\n",
        "x.csv:2  is not CSV: field larger than field limit (131072). Correct the line.",
    ),
    "two alike": (b"user,age,user\na,3,b\n", 'x.csv has two columns "user". Rename one.'),
}


@pytest.mark.parametrize("case", TORN)
def test_files_that_nobody_means(case: str, tmp_path: Path) -> None:
    data, message = TORN[case]
    file = tmp_path / "x.csv"
    file.write_bytes(data)
    with pytest.raises(DataError) as error:
        read_columns(file)
    assert str(error.value) == message.format(file=file)


def test_a_null_leaves_other_ids_what_they_are(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    ids = [None, *(2**60 + at for at in range(9))]
    table = {
        "user": ids,
        "genres": [[1, None], None, *[[2]] * 8],
        "word": [None, *[b"\xc3\xa4"] * 9],
        "is_new": [None, *[True] * 9],
        "age": [None, *map(float, range(9))],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    read = {k: v.astype(str).tolist() for k, v in read_columns(tmp_path / "x.parquet").items()}
    assert read["user"] == ["nan", *map(str, ids[1:])]
    assert read["genres"] == ["1 nan", "nan", *["2"] * 8]
    assert read["word"] == ["nan", *["ä"] * 9]
    assert read["is_new"] == ["nan", *["True"] * 9]
    assert read["age"] == ["nan", *map(str, map(float, range(9)))]
    given = read_columns(tmp_path / "x.parquet")
    coding = make_samples(
        given | {"rating": np.arange(10)}, replace(SPEC, time="", numbers=()), "x.parquet"
    ).coding
    assert list(coding.words["user"]) == [*map(str, ids[1:6]), "nan"]
    with pytest.raises(DataError, match="column user: 1 of 10 rows are NaN or beyond float32"):
        column_numbers(given, "user", "x.parquet")
    parquet.write_table(pyarrow.table({"user": [b"a", b"\xff"]}), tmp_path / "y.parquet")
    with pytest.raises(DataError) as error:
        read_columns(tmp_path / "y.parquet")
    assert str(error.value) == (
        'y.parquet, column "user", row 2: the bytes are not UTF-8 text. Write them as hexadecimal '
        "digits, or leave the column out."
    )


def test_a_constant_of_training_is_not_magnified_later() -> None:
    given = columns(200)
    given["age"] = np.where(given["t"].astype(float) < 190, 0.1, 0.2)
    samples = make_samples(given, SPEC, "x.csv")
    assert samples.numbers[:120].tolist() == [[0.0]] * 120
    assert float(np.abs(samples.numbers).max()) == pytest.approx(0.1)


def test_a_mark_of_byte_order_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("\ufeffuser,age\na,3\n")
    assert list(read_columns(tmp_path / "x.csv")) == ["user", "age"]


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


def test_no_samples_are_a_batch_whose_bytes_can_be_viewed() -> None:
    jagged, numbers, labels = make_samples(columns(), SPEC, "x.csv").batch(np.array([], np.int64))
    lengths, ids = jagged.bags("user")
    assert (len(lengths), len(ids), len(numbers), len(labels)) == (0, 0, 0, 0)
    assert len(lengths.contiguous().view(torch.uint8)) == 0


def test_integers_on_both_sides_of_2_to_the_63_stay_apart(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    ids = [1, *range(2**63 - 2, 2**63 + 3), 2**64 - 1]
    table = {"user": pyarrow.array(ids, pyarrow.uint64())}
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    read = read_columns(tmp_path / "x.parquet")["user"]
    assert read.astype(str).tolist() == [str(each) for each in ids]
