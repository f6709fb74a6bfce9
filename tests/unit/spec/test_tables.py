"""Tables by name, from files and drawn; what cannot be a table is refused with its line."""

from pathlib import Path

import pytest

from equipoise.base.errors import DataError, SpecError
from equipoise.spec.tables.read import draw_tables, parse_tables, read_tables
from equipoise.spec.tables.table import TableSpec

HEAD = "name,rows,width,ids_per_sample\n"


def test_shipped_tables_name_their_source() -> None:
    tables, origin = read_tables("mlperf-dcnv2")
    assert origin == "mlperf-dcnv2"
    assert len(tables) == 26
    assert sum(table.rows for table in tables) == 204_184_588
    assert sum(table.ids_per_sample for table in tables) == 214
    assert sum(table.rows for table in read_tables("criteo-kaggle")[0]) == 33_762_577


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "tables.csv"
    file.write_text(f"# ours\n{HEAD}user,943,16,1\n\nitem,1682,16,2.5\n")
    assert read_tables(str(file)) == (
        (TableSpec("user", 943, 16, 1.0), TableSpec("item", 1682, 16, 2.5)),
        "tables.csv",
    )


def test_a_mark_of_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"\ufeff{HEAD}user,943,16,1\n")
    assert read_tables(str(tmp_path / "t.csv"))[0] == (TableSpec("user", 943, 16, 1.0),)


def test_a_run_is_no_list_of_tables() -> None:
    with pytest.raises(SpecError) as error:
        read_tables("run.toml")
    assert str(error.value) == (
        "run.toml is not a CSV file of tables. Where a run's tables lie: equipoise plan run.toml"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name,rows\nuser,3\n",
            "t.csv lacks the columns width, ids_per_sample; it has name, rows. Write "
            "name,rows,width,ids_per_sample in its first line.",
        ),
        (
            f"{HEAD}user,many,4,1\n",
            't.csv:2  needs a name, two whole numbers and a number, got "user,many,4,1".',
        ),
        (
            f"{HEAD}user,0,4,1\n",
            "t.csv:2  Table user has 0 rows. Give from 1 to 1,099,511,627,776.",
        ),
        (
            f"{HEAD}user,3,4,nan\n",
            "t.csv:2  Table user has nan ids per sample. Give from 0 to 1,000,000.",
        ),
        (f"{HEAD}user,3,4,1\nuser,5,4,1\n", "t.csv:3  a second table user. Rename one."),
        (
            f"{HEAD}user,1,460,16,1\n",
            "t.csv:2  5 values under 4 columns. Write one for each, numbers without commas.",
        ),
        ("name,rows,width,ids_per_sample,rows\n", 't.csv has two columns "rows". Rename one.'),
        (HEAD, "t.csv lists no table. Give it a line for each."),
        (
            f'{HEAD}user,3,4,1\n"ad,5,4,1\n',
            "t.csv:3  is not CSV: unexpected end of data. Correct the line.",
        ),
        (
            f"{HEAD}{'a' * 200_000},5,4,1\n",
            "t.csv:2  is not CSV: field larger than field limit (131072). Correct the line.",
        ),
        (
            f"{HEAD}{'a' * 100},5,4\n",
            't.csv:2  needs a name, two whole numbers and a number, got "aaaaaaaaaaaaaaaaaaaaaaa...'
            'aaaaaaaaaaaaaaaaaaa,5,4" (106 characters).',
        ),
    ],
)
def test_wrong_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        parse_tables(text, "t.csv")
    assert str(error.value) == message


def test_unknown_names_and_counts_are_refused() -> None:
    with pytest.raises(SpecError) as error:
        read_tables("criteo")
    assert str(error.value) == (
        '"criteo" is neither a file nor one of criteo-kaggle, mlperf-dcnv2, synthetic:N. Nearest: '
        '"criteo-kaggle".'
    )
    with pytest.raises(SpecError) as error:
        read_tables("synthetic:0")
    assert str(error.value) == (
        '"synthetic:0": synthetic needs a count from 1 to 100,000, as in synthetic:1000.'
    )


def test_drawn_tables_are_skewed_and_the_same_everywhere() -> None:
    tables = draw_tables(500)
    traffic = [table.ids_per_sample for table in tables]
    assert max(traffic) > 30 * sorted(traffic)[250]
    assert tables[:20] == draw_tables(20)
