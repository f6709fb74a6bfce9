"""Expressions: kinds before they run, the unknown while they do, and nothing that runs code."""

import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.fault.runbook.expression import GuideError, parse_expression

TABLE = {0: 1.0, 1: 3.0, 2: 2.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7.0),
        ("-(4 / 8)", -0.5),
        ("2 * MiB", 2.0 * 2**20),
        ("max(busy) - min(busy)", 2.0),
        ("argmax(busy)", 1),
        ("busy[argmin(busy)]", 1.0),
        ("median(without(busy, 1))", 1.5),
        ("count(ranks)", 2.0),
        ("first(ranks)", 7),
        ("7 in ranks and not (8 in ranks)", True),
        ("'Out' in said or 1 > 2", True),
        ("lower(said) == 'out of memory'", True),
        ("1 < 2 < 3", True),
        ("1 < 3 < 2", False),
        ("sum(busy * 2)", 12.0),
        ("max(busy - busy)", 0.0),
        ("abs(1 - 3)", 2.0),
    ],
)
def test_values(text: str, value: Any) -> None:
    names = {"busy": TABLE, "ranks": [7, 9], "said": "Out of memory"}
    assert parse_expression(text).value(names) == value


@pytest.mark.parametrize(
    "text",
    [
        "missing > 1", "not (missing > 1)", "missing + 1", "max(empty)", "1 / 0", "busy[5]",
        "missing in ranks", "first(nobody)", "argmax(empty)", "missing > 1 or 1 > 2",
        "missing > 1 and 1 < 2", "1 < missing < 3", "1e308 * 1e308",
    ],
)  # fmt: skip
def test_what_is_computed_from_the_unknown_is_unknown(text: str) -> None:
    names = {"missing": None, "empty": {}, "busy": TABLE, "ranks": [1], "nobody": []}
    assert parse_expression(text).value(names) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("missing > 1 or 1 < 2", True),
        ("missing > 1 and 1 > 2", False),
        ("known(missing)", False),
        ("5 < 3 < missing", False),
    ],
)
def test_the_other_side_may_settle_what_is_unknown(text: str, value: bool) -> None:
    assert parse_expression(text).value({"missing": None}) is value


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "__import__('os')",
            "There is no function __import__. Nearest: first. All: max, min, sum, mean, median, "
            "argmax, argmin, without, count, first, lower, abs, known.",
        ),
        (
            "a.b",
            "A guide's expressions have no attribute; they have numbers, names, texts, + - * /, "
            "comparisons, in, and, or, not, table[key] and functions.",
        ),
        ("a = 1", "`a = 1` cannot be read as an expression. Compare with ==."),
        ("a >", "`a >` cannot be read as an expression."),
        ("max(a, b)", "max takes 1 values, not 2."),
        (
            "(a)(1)",
            "There is no function a. Nearest: max. All: max, min, sum, mean, median, argmax, "
            "argmin, without, count, first, lower, abs, known.",
        ),
        ("max(a)(1)", "Functions are called by their name, with values alone."),
        ("None", "`None` is neither a number nor a text."),
        ("1" * 401, "This expression has 401 characters and may have 400. Give parts of it names "
         "of their own."),
    ],
)  # fmt: skip
def test_what_no_guide_may_hold_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(GuideError) as refusal:
        parse_expression(text)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bsy > 1", "Nothing has set `bsy` here. Nearest: busy."),
        ("busy > 1", "A table of numbers cannot be compared with a number here."),
        ("said + 1", "A text cannot be added, multiplied or divided."),
        ("said > 'a'", "A text cannot be compared with a text here."),
        ("max(said)", "max takes a table of numbers, and `said` is a text."),
        ("not 1", "`1` is a number; not takes a condition."),
        ("1 in said", "`in` looks for a text in a text, or for a value in a list; not for a number "
         "in a text."),
        ("said[1]", "`said` is a text, not a table."),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together_are_refused_before_anything_runs(
    text: str, sentence: str
) -> None:
    with pytest.raises(GuideError) as refusal:
        parse_expression(text).kind({"busy": "numbers", "said": "text"})
    assert str(refusal.value) == sentence


finite = st.floats(-1e6, 1e6)


@given(table=st.dictionaries(st.integers(0, 9), finite, min_size=1), key=st.integers(0, 9))
def test_functions_are_python_s_of_the_same_numbers(table: dict[int, float], key: int) -> None:
    def value(text: str) -> Any:
        return parse_expression(text).value({"t": table, "k": key})

    assert value("max(t)") == max(table.values())
    assert value("mean(t)") == statistics.fmean(table.values())
    assert value("median(t)") == statistics.median(table.values())
    assert table[value("argmin(t)")] == min(table.values())
    assert value("without(t, k)") == {at: each for at, each in table.items() if at != key}
    assert math.isclose(value("sum(t - t)"), 0.0)


leaf = st.sampled_from(["a", "b", "t", "s", "1", "'x'", "u"])
grown = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "/", "<", "==", "in", "and"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        st.tuples(st.sampled_from(["max", "known", "lower", "argmin"]), inner).map(
            lambda parts: f"{parts[0]}({parts[1]})"
        ),
    ),
    max_leaves=8,
)


@given(text=grown, unknown=st.booleans())
def test_whatever_compiles_computes(text: str, unknown: bool) -> None:
    kinds: dict[str, Any] = {"a": "number", "b": "number", "t": "numbers", "s": "text", "u": "any"}
    try:
        expression = parse_expression(text)
        expression.kind(kinds)
    except GuideError:
        return
    names = {"a": 1.0, "b": 0.0, "t": {0: 1.0}, "s": "x", "u": [1]}
    expression.value({} if unknown else names)


@given(text=st.text(max_size=60))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        parse_expression(text).value({})
    except GuideError as error:
        assert str(error)
