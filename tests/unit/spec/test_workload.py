"""Lengths: the embedded distributions against their sources, and files read back or refused."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.base.errors import DataError, SpecError
from equipoise.spec.workload import (
    distribution_names,
    draw_lengths,
    listed_lengths,
    read_lengths,
)

MOST = 2**31 - 1
FIX = (
    "Give each document one whole number of tokens, 1 to 2,147,483,647, and leave empty "
    "documents out."
)

# Mean and E[d^2] / E[d] of the documents from which the quantiles were taken [tokens]; a table
# of 17 quantiles is within 9% of them. FlexSP's list of Wikipedia came without its second moment.
MEASURED = {
    "pretrain-128k": (3962, 18_905),
    "prolong": (3052, 11_681),
    "wikipedia": (1014, None),
    "python-stdlib": (4475, 21_863),
}
SOURCES = {
    "pretrain-128k": "DistCA repository, Apache-2.0",
    "prolong": "DistCA repository, Apache-2.0",
    "wikipedia": "FlexSP repository, Apache-2.0",
    "python-stdlib": "Python 3.11 standard library",
}
LEVELS = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99]
LEVELS += [0.995, 0.998, 0.999, 0.9995, 0.9999, 1]


def table_of(name: str) -> tuple[str, np.ndarray, np.ndarray]:
    """First line, quantiles and tokens of an embedded distribution."""
    lines = (resources.files("equipoise.spec") / "lengths" / f"{name}.csv").read_text().splitlines()
    assert lines[1] == "quantile,tokens"
    rows = np.array([[float(cell) for cell in line.split(",")] for line in lines[2:]])
    return lines[0], rows[:, 0], rows[:, 1]


def test_the_distributions_are_these():
    assert distribution_names() == sorted(MEASURED)


@pytest.mark.parametrize("name", MEASURED)
def test_a_distribution_names_its_source_and_its_quantiles_rise(name):
    first, levels, tokens = table_of(name)
    assert first.startswith("# ")
    assert SOURCES[name] in first
    assert levels.tolist() == LEVELS
    assert (np.diff(tokens) >= 0).all()
    assert tokens[0] >= 1
    assert (tokens == np.rint(tokens)).all()


def test_the_numbers_of_the_tables():
    last_rows = {name: table_of(name)[2][[5, 10, -1]].tolist() for name in MEASURED}
    assert last_rows == {  # median, 99th percentile, longest
        "pretrain-128k": [3227, 26070, 124913],
        "prolong": [1914, 16273, 340149],
        "wikipedia": [347, 10921, 1823777],
        "python-stdlib": [1702, 41058, 189252],
    }


@pytest.mark.parametrize("name", MEASURED)
def test_the_moments_are_those_of_the_source(name):
    _, levels, tokens = table_of(name)
    low, high, share = tokens[:-1], tokens[1:], np.diff(levels)
    rise = np.log(np.maximum(high, low * (1 + 1e-12)) / low)
    # Exact moments of a quantile function that is linear in log between the rows.
    mean = (share * (np.maximum(high, low * (1 + 1e-12)) - low) / rise).sum()
    square = (share * (np.maximum(high, low * (1 + 1e-12)) ** 2 - low**2) / (2 * rise)).sum()
    known_mean, known_spread = MEASURED[name]
    assert mean == pytest.approx(known_mean, rel=0.09)
    if known_spread is not None:
        assert square / mean == pytest.approx(known_spread, rel=0.09)
    drawn = draw_lengths(name, 400_000, seed=3).astype(np.float64)
    assert drawn.mean() == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("name", MEASURED)
def test_draws_are_within_the_table_unsorted_and_repeatable(name):
    drawn = draw_lengths(name, 5_000, seed=1)
    _, levels, tokens = table_of(name)
    assert drawn.dtype == np.int64
    assert tokens[0] <= drawn.min()
    assert drawn.max() <= tokens[-1]
    assert np.array_equal(drawn, draw_lengths(name, 5_000, seed=1))
    assert not np.array_equal(drawn, draw_lengths(name, 5_000, seed=2))
    assert abs(np.corrcoef(np.arange(len(drawn)), np.argsort(np.argsort(drawn)))[0, 1]) < 0.05
    for level in (0.25, 0.5, 0.9):
        wanted = tokens[levels == level][0]
        assert np.mean(drawn <= wanted) == pytest.approx(level, abs=0.03)


def test_an_unknown_distribution(message):
    assert message(draw_lengths, "wikipedai", 3) == (
        'No length distribution is called "wikipedai". Nearest: wikipedia. All: pretrain-128k, '
        "prolong, python-stdlib, wikipedia."
    )


@pytest.fixture
def message():
    """The whole text of the DataError that a call raises."""

    def of(call, *args) -> str:
        with pytest.raises(DataError) as caught:
            call(*args)
        return str(caught.value)

    return of


def as_text(lengths: list[int]) -> bytes:
    return "\n".join(map(str, lengths)).encode()


def as_csv(lengths: list[int]) -> bytes:
    rows = [f'{number},"a, {number}",{tokens}\n' for number, tokens in enumerate(lengths)]
    return ("document,name,tokens\n" + "".join(rows)).encode()


def as_slow_csv(lengths: list[int]) -> bytes:
    return as_csv(lengths).replace(b"\n", b"\r\n") + b"# the end\r\n\r\n"


def as_jsonl(lengths: list[int]) -> bytes:
    return "".join(json.dumps({"length": tokens}) + "\n" for tokens in lengths).encode()


def as_parquet(lengths: list[int]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"length": [0] * len(lengths), "tokens": lengths})
    pyarrow.parquet.write_table(table, sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


WRITERS = {
    "a.txt": as_text,
    "a.csv": as_csv,
    "slow.csv": as_slow_csv,
    "a.jsonl": as_jsonl,
    "a.parquet": as_parquet,
}


@given(st.lists(st.integers(1, MOST), min_size=1, max_size=12), st.sampled_from(sorted(WRITERS)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_written_is_read(tmp_path, lengths, name):
    file = tmp_path / name
    file.write_bytes(WRITERS[name](lengths))
    found = read_lengths(file)
    assert found.dtype == np.int64
    assert found.tolist() == lengths


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "3\n1\n4\n"),
        ("a.txt", "3\r\n1\r\n4\r\n"),
        ("a.txt", "\n3\n\n1\n4"),
        ("a.txt", "# lengths\n3\n1\n# more\n4\n"),
        ("a.txt", "\ufeff3\n1\n4\n"),
        ("a.txt", "3.0\n1e0\n 4 \n"),
        ("a.csv", "tokens\n3\n1\n4\n"),
        ("a.csv", "# of a tool\n\ntokens\n3\n1\n4\n"),
        ("a.csv", "length, tokens\n9, 3\n9, 1\n9, 4\n"),
        ("a.csv", "\ufefflength,other\n3,x\n1,y\n4,z\n"),
        ("a.csv", ",tokens\n0,3.0\n1,1.0\n2,4.0\n"),
        ("a.tsv", "name\ttokens\na,b\t3\nc\t1\nd\t4\n"),
        ("a.csv", 'text,tokens\n"two\nlines",3\nb,1\nc,4\n'),
        ("a.csv", 'text,tokens\n"a, ""b""",3\nc"d,1\n"",4\n'),
        ("a.csv", "text,tokens\na,3\n#b,7\nc,1\nd,4\n"),
        ("a.jsonl", "3\n1\n4\n"),
        ("a.jsonl", '3\n"1"\n4.0\n'),
        ("a.jsonl", '{"length": 9, "tokens": 3}\n{"length": 1}\n\n{"tokens": "4"}'),
        ("a.jsonl", '{"tokens": 3, "text": "a\u2028b"}\n1\n4\n'),
    ],
)
def test_ways_to_write_3_1_4(tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content.encode())
    assert read_lengths(file).tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", "3\n0\n4\n", f":2  '0' is not a document length. {FIX}"),
        ("a.txt", "3\n-2\n4\n", f":2  '-2' is not a document length. {FIX}"),
        ("a.txt", "nan\n3\n", f":1  'nan' is not a document length. {FIX}"),
        ("a.txt", "3\n\n1.5\n", f":3  '1.5' is not a document length. {FIX}"),
        ("a.txt", "inf\n", f":1  'inf' is not a document length. {FIX}"),
        ("a.txt", "3\nthree\n", f":2  'three' is not a document length. {FIX}"),
        ("a.txt", "3\n2147483648\n", f":2  '2147483648' is not a document length. {FIX}"),
        (
            "a.txt",
            "3\n18446744073709551617\n",
            f":2  '18446744073709551617' is not a document length. {FIX}",
        ),
        (
            "a.txt",
            "3\n0\n4\n-1\nx\n",
            f":2  '0' is not a document length, and neither are 2 after it. {FIX}",
        ),
        (
            "a.jsonl",
            '{"tokens": 3}\n{"tokens": [5, 200000]}\n{"tokens": [7]}\n',
            f":2  a list is not a document length, and neither are 1 after it. {FIX}",
        ),
        ("a.csv", "id,tokens\n7,3\n8,\n", f":3  an empty cell is not a document length. {FIX}"),
        ("a.csv", "id,tokens\n7,3\n8\n", f":3  an empty cell is not a document length. {FIX}"),
        ("a.csv", "id,tokens\n7,3\n8,0\n", f":3  '0' is not a document length. {FIX}"),
        ("a.csv", "id,tokens\n7,3\n8,2.5\n", f":3  '2.5' is not a document length. {FIX}"),
        ("a.csv", "# x\ntokens\n3\n-7\n", f":4  '-7' is not a document length. {FIX}"),
        (
            "a.csv",
            "id,n_tokens,text\n7,3,x\n",
            ":1  no column is called tokens or length. Nearest: n_tokens. All: id, n_tokens, "
            "text. Call the one with the lengths tokens.",
        ),
        (
            "a.csv",
            f"\n{','.join('abcdefghijklmn')}\n",
            ":2  no column is called tokens or length. Nearest: e. All: a, b, c, d, e, f, g, h, "
            "i, j, k, l and 2 more. Call the one with the lengths tokens.",
        ),
        (
            "a.csv",
            "0,512\n1,17\n",
            ":1  2 columns, and no header says which holds the lengths. Put a first line there "
            "that calls it tokens.",
        ),
        (
            "a.csv",
            'tokens,name\n3,"a\n1,b\n4,c\n',
            ":2  is not CSV: a quote is not closed. Correct the line.",
        ),
        (
            "a.csv",
            'tokens,name\n3,"a\n1,b"c\n4,d\n',
            ":2  is not CSV: a cell goes on behind its closing quote. Correct the line.",
        ),
        (
            "a.csv",
            'tokens,"name\n3,a\n',
            ":1  is not CSV: a quote is not closed. Correct the line.",
        ),
        (
            "a.csv",
            "tokens\n1,500\n",
            ":2  2 cells under 1 column. Write one for each, and numbers without commas.",
        ),
        (
            "a.csv",
            "name,tokens\na,300\nb,1,500\n",
            ":3  3 cells under 2 columns. Write one for each, and numbers without commas.",
        ),
        (
            "a.csv",
            "tokens,name\n300,a\n500\n",
            ":3  1 cell under 2 columns. Write one for each, and numbers without commas.",
        ),
        ("a.csv", "tokens,tokens\n3,4\n", ":1  has two columns called tokens. Rename one."),
        ("a.jsonl", '3\n{"tokens": null}\n', f":2  'null' is not a document length. {FIX}"),
        ("a.jsonl", '3\n{"tokens": NaN}\n', f":2  'NaN' is not a document length. {FIX}"),
        ("a.jsonl", '{"tokens": true}\n', f":1  'True' is not a document length. {FIX}"),
        ("a.jsonl", "3\n[4]\n", f":2  a list is not a document length. {FIX}"),
        ("a.jsonl", '3\n{"tokens": 4\n', f":2  '{{\"tokens\": 4' is not a document length. {FIX}"),
        ("a.jsonl", f"3\n1{'0' * 400}\n", f":2  '1{'0' * 39}' is not a document length. {FIX}"),
        (
            "a.jsonl",
            '3\n{"n_tokens": 4}\n',
            ":2  no key is called tokens or length. Nearest: n_tokens. All: n_tokens. Call the "
            "one with the lengths tokens.",
        ),
        (
            "a.jsonl",
            "{}\n",
            ":1  no key is called tokens or length. Call the one with the lengths tokens.",
        ),
        ("a.txt", "", " holds no document lengths. Give one whole number per line."),
        ("a.txt", "\n# none\n", " holds no document lengths. Give one whole number per line."),
        ("a.csv", "tokens\n", " holds no document lengths. Give one whole number per line."),
        ("a.csv", "id,tokens\n", " holds no document lengths. Give one whole number per line."),
        ("a.jsonl", "\n", " holds no document lengths. Give one whole number per line."),
        (
            "a.csv",
            f"text,tokens\n{'x' * 140_000},0\n",
            " cannot be read as text (field larger than field limit (131072)). Give CSV, JSON "
            "lines, Parquet, or one whole number per line.",
        ),
    ],
)
def test_refused_rows(tmp_path, message, name, content, text):
    file = tmp_path / name
    file.write_bytes(content.encode())
    assert message(read_lengths, file) == f"{file}{text}"


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            {"tokens": [3, 0, -1]},
            f" row 2  '0' is not a document length, and neither are 1 after it. {FIX}",
        ),
        ({"tokens": [3.0, float("nan")]}, f" row 2  'nan' is not a document length. {FIX}"),
        ({"tokens": [3.5]}, f" row 1  '3.5' is not a document length. {FIX}"),
        ({"tokens": [3, None]}, f" row 2  an empty cell is not a document length. {FIX}"),
        ({"tokens": [2**40]}, f" row 1  '1099511627776' is not a document length. {FIX}"),
        ({"tokens": ["3"]}, "  column tokens is of type string. Cast it to int64."),
        (
            {"id": [1], "token_count": [3]},
            "  no column is called tokens or length. Nearest: token_count. All: id, token_count. "
            "Call the one with the lengths tokens.",
        ),
        (
            {"tokens": pyarrow.array([], pyarrow.int64())},
            " holds no document lengths. Give one whole number per line.",
        ),
    ],
)
def test_refused_parquet(tmp_path, message, columns, text):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    assert message(read_lengths, file) == f"{file}{text}"


def test_parquet_with_the_column_twice(tmp_path, message):
    file = tmp_path / "a.parquet"
    table = pyarrow.table([pyarrow.array([3]), pyarrow.array([4])], names=["tokens", "tokens"])
    pyarrow.parquet.write_table(table, file)
    assert message(read_lengths, file) == f"{file}  has two columns called tokens. Rename one."


def test_parquet_of_whole_floats_and_small_integers(tmp_path):
    for kind in (pyarrow.float64(), pyarrow.int16(), pyarrow.uint64()):
        file = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"tokens": pyarrow.array([3, 1], kind)}), file)
        assert read_lengths(file).tolist() == [3, 1]


def test_a_torn_parquet_file(tmp_path, message):
    file = tmp_path / "a.parquet"
    file.write_bytes(as_parquet([3, 1, 4])[:60])
    told = message(read_lengths, file)
    assert told.startswith(f"{file} is not a whole Parquet file (")
    assert told.endswith("). Write it again.")


def test_no_such_file_and_no_such_text(tmp_path, message):
    file = tmp_path / "none.csv"
    assert message(read_lengths, file) == (
        f"No lengths file or distribution is called {file}. Distributions: "
        "pretrain-128k, prolong, python-stdlib, wikipedia."
    )
    assert message(read_lengths, tmp_path) == (
        f"{tmp_path} cannot be read as text (is a directory). Give CSV, JSON lines, Parquet, or "
        "one whole number per line."
    )
    file.write_bytes(b"3\n\xff\xfe\n")
    assert message(read_lengths, file) == (
        f"{file} cannot be read as text (a text in it is not UTF-8). Give CSV, JSON lines, "
        "Parquet, or one whole number per line."
    )


def test_pyarrow_is_loaded_for_parquet_alone(tmp_path):
    text, table = tmp_path / "a.txt", tmp_path / "a.parquet"
    text.write_bytes(as_text([3]))
    table.write_bytes(as_parquet([3]))
    code = (
        "import sys; from pathlib import Path; from equipoise.spec.workload import read_lengths\n"
        "read_lengths(Path(sys.argv[1])); assert 'pyarrow' not in sys.modules\n"
        "sys.modules['pyarrow'] = None\n"
        "try: read_lengths(Path(sys.argv[2]))\n"
        "except ModuleNotFoundError as error: print(error.name)"
    )
    command = [sys.executable, "-c", code, str(text), str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("pyarrow\n", "")


def test_a_million_rows_are_read_whole(tmp_path: Path):
    lengths = draw_lengths("wikipedia", 1_000_000)
    file = tmp_path / "a.csv"
    file.write_bytes(b"tokens\n" + as_text(lengths.tolist()))
    assert np.array_equal(read_lengths(file), lengths)


def test_a_list_is_read_where_a_name_could_stand(tmp_path: Path) -> None:
    assert listed_lengths("3000, 40,1_000,") == (3000, 40, 1000)
    assert listed_lengths("512") == (512,)
    assert listed_lengths("wikipedia") is None
    file = tmp_path / "a,b.csv"
    file.write_text("7\n")
    assert listed_lengths(str(file)) is None


@pytest.mark.parametrize("word", ["0", "x", "-1", "2.5", "2147483648", "9" * 21])
def test_a_word_of_a_list_that_is_not_a_length_is_named(word: str) -> None:
    with pytest.raises(SpecError) as caught:
        listed_lengths(f"300,{word}")
    assert str(caught.value) == (
        f'--lengths 300,{word}: "{word}" is not a length. Give whole numbers of tokens, as in '
        "3000,40,900."
    )
