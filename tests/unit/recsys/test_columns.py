"""Files are read alike, digit for digit; what readers would take differently is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.base.errors import DataError
from equipoise.recsys.columns import column_numbers, read_columns, require_values, time_order


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
    with pytest.raises(DataError, match=r"bad.csv:2  1 value under 2 columns. Write one for each"):
        read_columns(tmp_path / "bad.csv")
    (tmp_path / "none.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="holds no rows below its line of column names"):
        read_columns(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"No such file: .*gone.csv. Set data.path to a Parquet"):
        read_columns(tmp_path / "gone.csv")


def test_names_keep_their_colons_but_for_the_types_of_recbole(tmp_path: Path) -> None:
    """In CSV and TSV as in Parquet; cut at its colon, one of two columns was another's name."""
    file = tmp_path / "x.csv"
    file.write_text(
        "price:usd,price:eur,user_id:token,a:b:float_seq,:x,words: token_seq\n1,2,3,4,5,6\n"
    )
    assert list(read_columns(file)) == ["price:usd", "price:eur", "user_id", "a:b", ":x", "words"]
    file.with_suffix(".tsv").write_text("price:usd\tuser_id:token\n1\t2\n")
    assert list(read_columns(file.with_suffix(".tsv"))) == ["price:usd", "user_id"]
    file.write_text("user:token,user:float\n1,2\n")
    with pytest.raises(DataError) as error:
        read_columns(file)
    assert str(error.value) == 'x.csv has two columns "user". Rename one.'


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
    "an open quote": (
        b'user,words\na,"x\ny"\nb,"x\nc,y\nd,z\n',
        "x.csv:4  is not CSV: a quote is not closed. Correct the line.",
    ),
    "text behind a quote": (
        b'user,words\n"a"b,x\n',
        "x.csv:2  is not CSV: a value goes on behind its closing quote. Correct the line.",
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
    with pytest.raises(DataError, match="column user: 1 of 10 rows are NaN or beyond float32"):
        column_numbers(read_columns(tmp_path / "x.parquet"), "user", "x.parquet")
    parquet.write_table(pyarrow.table({"user": [b"a", b"\xff"]}), tmp_path / "y.parquet")
    with pytest.raises(DataError) as error:
        read_columns(tmp_path / "y.parquet")
    assert str(error.value) == (
        'y.parquet, column "user", row 2: the bytes are not UTF-8 text. Write them as hexadecimal '
        "digits, or leave the column out."
    )


def test_a_mark_of_byte_order_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("\ufeffuser,age\na,3\n")
    assert list(read_columns(tmp_path / "x.csv")) == ["user", "age"]


def test_integers_on_both_sides_of_2_to_the_63_stay_apart(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    ids = [1, *range(2**63 - 2, 2**63 + 3), 2**64 - 1]
    table = {"user": pyarrow.array(ids, pyarrow.uint64())}
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    read = read_columns(tmp_path / "x.parquet")["user"]
    assert read.astype(str).tolist() == [str(each) for each in ids]


def write(path: Path, **columns: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_nul_character_would_make_two_ids_one(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("user,age\na,3\na\0,4\n")
    with pytest.raises(DataError) as error:
        read_columns(tmp_path / "x.csv")
    assert str(error.value) == "x.csv:3  has a NUL character. Take it out."
    with pytest.raises(DataError) as error:
        read_columns(write(tmp_path / "x.parquet", user=["a", "a\0"]))
    assert str(error.value) == (
        'x.parquet, column "user", row 2: the text has a NUL character. Take it out, or leave the '
        "column out."
    )


def test_a_time_that_python_lacks_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    far = pyarrow.array([2**61], pyarrow.timestamp("us"))
    with pytest.raises(DataError) as error:
        read_columns(write(tmp_path / "x.parquet", t=far))
    assert str(error.value) == (
        'x.parquet, column "t": Python has no such timestamp[us]. Write numbers or texts, or leave '
        "the column out."
    )


def test_a_damaged_file_is_told_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", user=["a"] * 100)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])
    with pytest.raises(DataError) as error:
        read_columns(path)
    said = str(error.value)
    assert said.startswith(f"{path} is a damaged parquet file: ") and "\n" not in said
    assert said.endswith(". Write the file again or move it out of data.path.")


def test_suffixes_are_read_in_either_case(tmp_path: Path) -> None:
    (tmp_path / "x.CSV").write_text("user,age\na,3\n")
    write(tmp_path / "x.PARQUET", user=["a"], age=["3"])
    read = [read_columns(tmp_path / f"x.{suffix}") for suffix in ("CSV", "PARQUET")]
    assert [{k: v.tolist() for k, v in each.items()} for each in read] == [
        {"user": ["a"], "age": ["3"]}
    ] * 2


def test_a_list_is_not_a_number(tmp_path: Path) -> None:
    """A list of one value used to count as that value, which a server refuses."""
    columns = read_columns(write(tmp_path / "x.parquet", price=[["3"], ["4"]]))
    with pytest.raises(DataError) as error:
        column_numbers(columns, "price", "x.parquet")
    assert str(error.value) == (
        'x.parquet, column "price", row 1: a list, where a sample has one value. List it in '
        "data.bags."
    )


@pytest.mark.parametrize("is_text", [False, True])
def test_times_are_sorted_exactly(is_text: bool) -> None:
    stamps = [1_700_000_000_000_000_000 + at for at in (5, 3, 4, 1, 2)]
    times = np.array([str(each) for each in stamps] if is_text else stamps)
    order, _ = time_order({"t": times}, "t", "x.csv")
    assert order.tolist() == [3, 4, 1, 2, 0]


def test_times_with_a_point_are_sorted_as_numbers() -> None:
    times = np.array(["10", "9.5", "1e1", " 2"])
    order, stamps = time_order({"t": times}, "t", "x.csv")
    assert order.tolist() == [3, 1, 0, 2] and stamps.tolist() == [10.0, 9.5, 10.0, 2.0]
    with pytest.raises(DataError) as error:
        time_order({"t": np.array(["1", "noon"])}, "t", "x.csv")
    assert str(error.value) == (
        'x.csv, column t, row 2: "noon" is not a number. Write times as numbers, such as seconds '
        "since 1970."
    )


@pytest.mark.parametrize(
    ("values", "is_bag", "said"),
    [
        (
            [["a"], ["b", "c"]],
            False,
            "1: a list, where a sample has one value. List it in data.bags",
        ),
        (
            [None, {"a": 1}],
            False,
            "2: an object, where a sample has one value. Write its fields as columns",
        ),
        (
            [None, {"a": 1}],
            True,
            "2: an object, where a sample has texts or numbers. Write its fields as columns",
        ),
        (
            [[["a"], ["b"]]],
            True,
            "1: a list of lists or objects, where a sample has texts or numbers. Write a list of "
            "texts or numbers",
        ),
    ],
)
def test_a_sample_has_one_value(values: list[Any], is_bag: bool, said: str, tmp_path: Path) -> None:
    column = read_columns(write(tmp_path / "x.parquet", user=values))["user"]
    with pytest.raises(DataError) as error:
        require_values(column, "user", "x.parquet", is_bag=is_bag)
    assert str(error.value) == f'x.parquet, column "user", row {said}.'
    if values[0] == ["a"]:
        require_values(column, "user", "x.parquet", is_bag=True)


def test_timestamps_are_seconds_since_1970(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    seconds = [1_700_000_000, 1_600_000_000, 1_700_000_000]
    of = {
        "s": (pyarrow.timestamp("s"), 1),
        "us": (pyarrow.timestamp("us", tz="Europe/Berlin"), 10**6),
        "ms": (pyarrow.timestamp("ms", tz="UTC"), 10**3),
    }
    for name, (kind, unit) in of.items():
        column = pyarrow.array([each * unit for each in seconds], kind)
        read = read_columns(write(tmp_path / "x.parquet", t=column))
        order, stamps = time_order(read, "t", "x.parquet")
        assert (order.tolist(), stamps.tolist()) == ([1, 0, 2], [float(s) for s in seconds]), name
    days = pyarrow.array([3, 1, 2], pyarrow.date32())
    order, stamps = time_order(read_columns(write(tmp_path / "x.parquet", t=days)), "t", "x")
    assert (order.tolist(), stamps.tolist()) == ([1, 2, 0], [259_200.0, 86_400.0, 172_800.0])
    gone = pyarrow.array([1, None], pyarrow.timestamp("us"))
    with pytest.raises(DataError) as error:
        time_order(read_columns(write(tmp_path / "x.parquet", t=gone)), "t", "x.parquet")
    assert str(error.value) == (
        "x.parquet, column t, row 2: there is no time. Fill it, or leave the row out."
    )
