"""Columns of requests become what training made of them; what is wrong is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.base.errors import DataError
from equipoise.recsys.columns import read_columns
from equipoise.recsys.rank.coding import Coding, NumberScale, read_coding, write_coding
from equipoise.recsys.samples import make_samples
from equipoise.spec.recommend import ColumnsSpec
from support.recsys.clicks import write_clicks
from support.recsys.rankers import small_ranker

COLUMNS = ColumnsSpec(
    label="click",
    time="t",
    ids=("user", "ad"),
    bags=("words",),
    numbers=("price",),
    train_share=0.05,
)


def test_rows_of_a_file_are_its_samples_to_the_bit(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    file = read_columns(tmp_path / "clicks.csv")
    samples = make_samples(file, COLUMNS, "clicks.csv")
    write_coding(tmp_path, samples.coding)
    coding = read_coding(tmp_path)
    assert coding.names == ("user", "ad", "words", "price")
    order = np.argsort(file["t"].astype(float), kind="stable")
    rows: dict[str, list[Any]] = {n: file[n][order].tolist() for n in ("user", "ad", "words")}
    rows["price"] = file["price"][order].astype(float).tolist()
    coded = coding.code({}, rows)
    jagged, numbers, _ = samples.batch(np.arange(len(order)))
    assert torch.equal(coded.jagged.lengths, jagged.lengths)
    assert torch.equal(coded.jagged.values, jagged.values)
    assert torch.equal(coded.numbers, numbers)
    assert coded.unknown == sum(int((ids == 0).sum()) for ids in samples.ids) > 0
    assert int(jagged.values.min()) > 0


def test_a_value_of_a_list_may_have_blanks(tmp_path: Path) -> None:
    """["Film Noir"] was read as ["Film", "Noir"]."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tags: list[Any] = [["Film Noir", "x"], ["Film", "Noir", " "], [], ["Film Noir"], ["x"]] * 4
    table = {"tags": tags, "click": [0, 1] * 10}
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    columns = read_columns(tmp_path / "x.parquet")
    samples = make_samples(columns, ColumnsSpec(label="click", bags=("tags",)), "x.parquet")
    assert samples.coding.words["tags"] == ["Film", "Film Noir", "Noir", "x"]
    jagged, _, _ = samples.batch(np.arange(5))
    assert jagged.lengths.tolist() == [[2, 2, 0, 1, 1]]
    coded = samples.coding.code({}, {"tags": tags[:5]})
    assert torch.equal(coded.jagged.values, jagged.values)
    read = samples.coding.code({}, {"tags": columns["tags"][:5].tolist()})
    assert torch.equal(read.jagged.values, jagged.values)
    assert samples.coding.code({"tags": "Film Noir"}, {}).jagged.values.tolist() == [1, 3]


def test_a_value_is_its_text_and_a_context_stands_for_every_candidate() -> None:
    coding = small_ranker().coding
    coded = coding.code({"user": "u3", "price": 3}, {"ad": [4, "4", None], "words": [[], "", "x"]})
    assert coded.jagged.lengths.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert coded.jagged.values.tolist() == [4, 4, 4, 5, 5]
    assert (coded.numbers.tolist(), coded.unknown) == ([[2.0]] * 3, 2)


GOOD: dict[str, Any] = {"ad": [1, 2], "words": ["red", "blue"], "price": [1, 2]}
BAD = [
    (
        {"user": "u1", "usr": 2},
        GOOD,
        'The model has no column "usr" among its 4 (user, ad, words, price). Nearest: "user".',
    ),
    (
        {},
        GOOD,
        'The column "user" is missing. Give it in context, or in candidates with a value for each.',
    ),
    (
        {"user": "u1", "ad": 1},
        GOOD,
        'The column "ad" is both in context and in candidates. Give it once.',
    ),
    (
        {"user": "u1"},
        GOOD | {"price": [1]},
        "Columns of candidates have different lengths: ad 2, words 2, price 1.",
    ),
    (
        {"user": ["u1"]},
        GOOD,
        'The column "user" has one value a sample, and a list or object at place 0. Give a text or '
        "a number.",
    ),
    (
        {"user": "u1"},
        GOOD | {"words": ["red", [["blue"]]]},
        'The column "words" has a list of values a sample, and something else at place 1. Give a '
        "list of texts or numbers.",
    ),
    (
        {"user": "u1"},
        GOOD | {"price": [1, "2"]},
        'The column "price" has numbers, and "2" at place 1. Give a number.',
    ),
    (
        {"user": "u1"},
        GOOD | {"price": [1, float("nan")]},
        'The column "price" has a number at place 1 that is NaN or beyond float32. Give another.',
    ),
]


def test_a_number_far_from_training_is_refused() -> None:
    coding = Coding(numbers={"price": NumberScale(1.0, 2.0**-30)})
    assert coding.code({}, {"price": [1, 2]}).numbers.tolist() == [[0.0], [2.0**30]]
    with pytest.raises(DataError) as caught:
        coding.code({}, {"price": [1, 1e30]})
    assert str(caught.value) == (
        'The column "price" has 1e+30 at place 1: training\'s mean is 1 and its deviation '
        "9.31323e-10, so float32 cannot hold it. Give a number nearer to training's."
    )


@pytest.mark.parametrize(("context", "candidates", "words"), BAD)
def test_what_is_wrong_is_one_sentence(
    context: dict[str, Any], candidates: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError) as caught:
        small_ranker().coding.code(context, candidates)
    assert str(caught.value) == words
