"""Rows of few bits: within a level, unbiased where drawn, still where rounded to nearest."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import NonFiniteError
from equipoise.numerics.rows import ROW_FORMATS, draw_uniform, pack_rows, row_bytes, unpack_rows

LEVELS = {"int8": 255, "int4": 15, "int2": 3}


@given(
    st.lists(st.floats(-6e4, 6e4, width=32), min_size=1, max_size=9),
    st.sampled_from(ROW_FORMATS),
    st.booleans(),
)
def test_errors_are_within_a_level(row: list[float], form: str, is_drawn: bool) -> None:
    rows = torch.tensor([row, row[::-1]])
    draws = draw_uniform(3, torch.tensor([4, 9]), len(row)) if is_drawn else None
    packed = pack_rows(rows, form, draws)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, row_bytes(len(row), form))
    back = unpack_rows(packed, len(row), form)
    span = max(row) - min(row)
    # fp16 offsets and scales are off by 2**-10 of themselves, outward.
    most = max(abs(each) for each in row)
    level = span / LEVELS[form] + (2.0**-9 * most + 6e-8 if form != "int8" else 1e-5 * most)
    assert (back - rows).abs().max() <= (1 if is_drawn else 0.51) * level + 1e-30


@pytest.mark.parametrize("form", ROW_FORMATS)
def test_rounding_by_draws_is_unbiased_and_to_nearest_is_not(form: str) -> None:
    """100,000 roundings of each number of a row: their mean within 4 deviations of it."""
    count = 100_000
    row = torch.tensor([0.0, 0.1234, 0.777, 0.31, 1.0])
    rows = row.repeat(count, 1)
    drawn = unpack_rows(pack_rows(rows, form, draw_uniform(7, torch.arange(count), 5)), 5, form)
    deviation = drawn.double().std(dim=0) / count**0.5
    error = (drawn.double().mean(dim=0) - row.double()).abs()
    assert (error <= 4 * deviation + 1e-7).all(), (error, deviation)
    near = unpack_rows(pack_rows(rows[:1], form), 5, form)[0]
    assert (near - row).abs().max() > (4 * deviation + 1e-7).max()


@pytest.mark.parametrize("form", ROW_FORMATS)
def test_small_updates_add_up_by_draws_and_not_to_nearest(form: str) -> None:
    """100 updates of 0.3 levels are 30 levels; int2, which has 3, gets updates both ways."""
    level, steps = 1 / LEVELS[form], 100 if form == "int8" else 9
    start = torch.tensor([[0.0, level * (LEVELS[form] // 3), 1.0]]).repeat(4000, 1)
    moved = {}
    for kind in ("near", "drawn"):
        rows = start.clone()
        for step in range(steps):
            rows[:, 1] += 0.3 * level
            draws = draw_uniform(step, torch.arange(4000), 3) if kind == "drawn" else None
            rows = unpack_rows(pack_rows(rows, form, draws), 3, form)
        moved[kind] = float((rows - start)[:, 1].mean()) / level
    expected = 0.3 * steps if form != "int2" else None
    assert abs(moved["near"]) < 0.02
    if expected is not None:
        assert moved["drawn"] == pytest.approx(expected, rel=0.06)
    else:
        assert moved["drawn"] > 1.0


def test_draws_are_a_function_of_key_row_and_column() -> None:
    rows = torch.arange(1000)
    draws = draw_uniform(5, rows, 8)
    assert torch.equal(draws[[7, 3], :4], draw_uniform(5, torch.tensor([7, 3]), 4))
    assert not torch.equal(draws, draw_uniform(6, rows, 8))
    assert draws.min() >= 0 and draws.max() < 1
    assert float(draws.mean()) == pytest.approx(0.5, abs=4 * 12**-0.5 / 8000**0.5)
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 4 / 1000**0.5


def test_constant_rows_come_back_and_wild_ones_are_refused() -> None:
    for form in ROW_FORMATS:
        rows = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
        assert torch.equal(unpack_rows(pack_rows(rows, form), 2, form), rows)
        assert pack_rows(torch.empty(0, 2), form).shape == (0, row_bytes(2, form))
        with pytest.raises(
            NonFiniteError,
            match=rf"^Row 1 of 2 to pack as {form} spans nan to nan, which its scale cannot hold\. "
            r"Lower the tables' learning rate\.$",
        ):
            pack_rows(torch.tensor([[0.0, 1.0], [0.0, float("nan")]]), form)
    with pytest.raises(NonFiniteError, match="spans 0 to 2e"):
        pack_rows(torch.tensor([[0.0, 2e6]]), "int4")
