"""Published steps, as the benches read and score them: what must not fool them."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.cost.step.request import Residuals
from equipoise.cost.step.work import published_flop

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benches of this checkout, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.published import dispatch as published_dispatch
    from bench.published import intervals as published_intervals
    from bench.published import memory as memory_published
    from bench.published import price as published_price
    from bench.published import rows as published_rows
    from bench.published import throughput as published_throughput

    yield {
        "rows": published_rows,
        "price": published_price,
        "dispatch": published_dispatch,
        "intervals": published_intervals,
        "memory": memory_published,
        "throughput": published_throughput,
    }
    for name in [each for each in sys.modules if each == "bench" or each.startswith("bench.")]:
        del sys.modules[name]


@pytest.mark.long
def test_a_source_is_not_in_the_fit_that_it_is_scored_with(bench: Any) -> None:
    """Steps of one source twice as long: its own residuals stay, those of the others move."""
    rows, price = bench["rows"], bench["price"]
    every = [*list(rows.sc21_table1())[:3], *rows.megatron_2020(), *rows.seqpar_table5()]
    plain, scored, before = price.leave_one_out(every)
    slow = [
        dataclasses.replace(row, step_s=2 * row.step_s) if row.source == "Megatron 2020" else row
        for row in every
    ]
    _, _, after = price.leave_one_out(slow)
    assert after["Megatron 2020"] == before["Megatron 2020"]
    assert after["SC21 table 1"] != before["SC21 table 1"]
    for each in scored:
        assert each.options.residuals == before[each.row.source][False]
    assert all(each.options.residuals.products == 1.0 for each in plain)


def test_rates_become_seconds_by_the_rule_of_their_source(bench: Any) -> None:
    """Hardware FLOP with full recomputation are a forward of all layers more than model FLOP."""
    rows = bench["rows"]
    model = rows.gpt(128, 25_600, 160, 51_200)
    windows = np.array([2048] * 3072)
    model_flop = published_flop(model, windows)
    head = 6.0 * model.hidden * model.vocab * 2048 * 3072
    again = (model_flop - head) / 3
    assert rows.megatron_flop(model, 3072, 2048) == pytest.approx(model_flop + again, rel=1e-3)
    # arXiv:2104.04473, table 1: 502 PFLOP/s of 3,072 devices.
    row = next(each for each in rows.sc21_table1() if each.name == "1T")
    assert rows.megatron_flop(row.model, 3072, 2048) / row.step_s == pytest.approx(502e15, rel=5e-3)


def test_rows_that_contradict_themselves_are_told(bench: Any) -> None:
    faults = bench["throughput"].disagreements()
    assert faults[0] == ("v24.11.1 grok1-314b-proxy2L BF16: 8 ranks of 8, 256 sequences of 1024")
    assert len(faults) == 6


def test_no_published_row_is_said_to_fit_where_it_did_not(bench: Any) -> None:
    rows, false_fits = bench["memory"].peaks()
    assert len(rows) > 60
    assert false_fits == []


def test_an_interval_knows_nothing_of_the_source_that_it_is_scored_on(bench: Any) -> None:
    rows, price, intervals = bench["rows"], bench["price"], bench["intervals"]
    every = [*list(rows.sc21_table1())[:3], *rows.megatron_2020(), *rows.seqpar_table5()]
    slow = [
        dataclasses.replace(row, step_s=2 * row.step_s) if row.source == "Megatron 2020" else row
        for row in every
    ]
    plain, other = (price.price_rows(each, [Residuals()] * len(each)) for each in (every, slow))
    known, moved = (intervals.learn(each, "Megatron 2020") for each in (plain, other))
    assert (known[0].tolist(), known[1]) == (moved[0].tolist(), moved[1])
    assert intervals.learn(plain, None)[1] != intervals.learn(other, None)[1]


def test_a_width_holds_its_share_of_errors(bench: Any) -> None:
    errors = np.linspace(0.0, 1.0, 101)
    assert bench["intervals"].width_of(errors, np.ones(101)) == pytest.approx(0.8)
    # One source of many rows counts as much as one of few.
    many = np.concatenate((np.full(90, 0.1), np.full(10, 2.0)))
    weights = np.concatenate((np.full(90, 1 / 90), np.full(10, 1 / 10)))
    assert bench["intervals"].width_of(many, weights) == 2.0


def test_dispatch_of_code_that_nothing_was_fitted_to(bench: Any) -> None:
    dispatch = bench["dispatch"]
    for (device, on), table in dispatch.UCCL.items():
        errors = [abs(row["error"]) for row in dispatch.beside(device, table)]
        assert (max(errors) < 0.1) == (on != "EFA")
