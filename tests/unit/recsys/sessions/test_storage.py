"""Files with sessions together hold the same samples, in fewer bytes."""

from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import DataError
from equipoise.recsys.columns import read_columns
from equipoise.recsys.sessions.storage import write_sessions


def test_the_same_samples_with_sessions_together(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    user = source.integers(0, 40, 3000)
    columns = {
        "user": user.astype(str),
        "town": np.array([f"town {each * 7919 % 31}" for each in user.tolist()]),
        "t": np.arange(3000),
    }
    count = write_sessions(columns, tmp_path / "a.parquet", session="user", time="t", gap=60.0)
    back = read_columns(tmp_path / "a.parquet")
    by_time = np.argsort(back["t"], kind="stable")
    assert all((back[name][by_time] == columns[name]).all() for name in columns)
    begins = (np.diff(back["t"]) < 0) | (back["user"][1:] != back["user"][:-1])
    begins |= np.diff(back["t"]) > 60
    assert 1 + begins.sum() == count
    # The same rows with a session for each, which leaves them in order of time.
    columns["row"] = np.arange(3000).astype(str)
    write_sessions(columns, tmp_path / "b.parquet", session="row", time="t")
    assert (tmp_path / "a.parquet").stat().st_size < (tmp_path / "b.parquet").stat().st_size
    with pytest.raises(
        DataError,
        match=r'^There is no column "who" among user, town, t, row\. Name one of them\.$',
    ):
        write_sessions(columns, tmp_path / "d.parquet", session="who", time="t")


def test_lists_and_nulls_come_back_as_they_were(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"user": ["b", "a", "b"], "t": [3, 1, 2], "genres": [["Film Noir", "x"], None, []]}
    parquet.write_table(pyarrow.table(table), tmp_path / "given.parquet")
    columns = read_columns(tmp_path / "given.parquet")
    write_sessions(columns, tmp_path / "x.parquet", session="user", time="t")
    written = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    assert written["t"] == [1, 2, 3]
    assert written["genres"] == [None, [], ["Film Noir", "x"]]
    columns["t"] = np.array(["1", "noon", "2"])
    with pytest.raises(DataError, match=r'x\.parquet, column t, row 2: "noon" is not a number\.'):
        write_sessions(columns, tmp_path / "x.parquet", session="user", time="t")
