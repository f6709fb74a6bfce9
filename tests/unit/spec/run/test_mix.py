"""Tables of [[data.mix]]: as they are written, and every wrong one refused at its line."""

from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.run.load import read_run, render, template
from equipoise.spec.run.mix import MixRow

TEXT = """[data]
source = "jsonl"

[[data.mix]]
path = "a.jsonl"
weight = 3

[[data.mix]]
source = "parquet"
path = "b"
field = "payload.text"
"""
ROWS = (MixRow("a.jsonl", 3.0), MixRow("b", 1.0, "parquet", "payload.text"))


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_tables_are_read_and_written_back(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, TEXT))
    assert run.spec.data.mix == ROWS
    assert run.origins["data.mix"] == "run.toml:4"
    for text in (render(run), template(run)):
        again = read_run(write(tmp_path, text))
        assert (again.spec.data, again.digest) == (run.spec.data, run.digest)
    flag = '[{path = "a.jsonl", weight = 3}]'
    assert read_run(None, [("data.source", "jsonl"), ("data.mix", flag)]).spec.data.mix == ROWS[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data.mix = 3", 'needs tables, as in [[data.mix]] or [{path = "a.jsonl", weight = 2}].'),
        ("data.mix = [3]", 'needs tables, as in [[data.mix]] or [{path = "a.jsonl", weight = 2}].'),
        (
            'data.mix = [{path = "a", wieght = 2}]',
            'source 1: "wieght": no such key. Nearest: weight',
        ),
        (
            'data.mix = [{path = "a", weight = 0}]',
            "source 1: weight = 0 is not a share; give a number above 0.",
        ),
        (
            'data.mix = [{path = "a", weight = inf}]',
            "source 1: weight = Infinity is not a share; give a number above 0.",
        ),
        ("data.mix = [{path = 1}]", "source 1: path needs text, got 1."),
        (
            'data.mix = [{path = "a", source = "json"}]',
            'source 1: source = "json" is not one of "python-stdlib", "python-functions", "text", '
            '"jsonl", "parquet", "datasets". Nearest: "jsonl".',
        ),
        (
            'data.mix = [{path = "a"}]',
            'source 1: path = "a" is given, but its source "python-stdlib" reads no path. Set its '
            "source.",
        ),
        (
            'data.mix = [{source = "text"}]',
            'source 1: "text" reads a path, which is missing. Set its path.',
        ),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_run(write(tmp_path, text))
    assert str(caught.value) == f"run.toml:1  data.mix: {message}"


def test_a_mixture_beside_a_path(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read_run(
            write(tmp_path, f'data.path = "c"\n{TEXT[7:]}'.replace('source = "jsonl"\n', "", 1))
        )
    assert str(caught.value) == (
        'run.toml:1  data.path: "c" is given, but so are 2 sources in data.mix. Put it into a '
        "[[data.mix]] table of its own, or remove data.mix."
    )
