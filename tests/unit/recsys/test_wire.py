"""Rows come back from the wire within the bound of their format."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import NonFiniteError
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.wire import MOST_ERROR, decode, encode, gradient_gain
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.schedule.tables.traffic import WIRES, wire_bytes
from equipoise.spec.tables.table import TableSpec


@given(st.integers(0, 9), st.integers(1, 17), st.sampled_from(WIRES), st.integers(0, 99))
def test_what_comes_back_is_within_the_bound(rows: int, width: int, wire: str, seed: int) -> None:
    source = np.random.default_rng(seed)
    values = torch.from_numpy(source.standard_normal((rows, width)).astype(np.float32) * 3)
    data = encode(values, wire)
    assert data.dtype == torch.uint8
    assert len(data) == rows * wire_bytes(width, wire)
    back = decode(data, width, wire)
    scale = values.abs().amax(1, keepdim=True) if wire == "int8" else values.abs()
    assert ((back - values).abs() <= MOST_ERROR[wire] * scale * 1.0001).all()
    if wire == "bf16":
        assert torch.equal(back, values.bfloat16().float())


def test_what_a_format_cannot_hold_is_refused() -> None:
    with pytest.raises(NonFiniteError) as error:
        encode(torch.tensor([[70_000.0]]), "fp16")
    assert str(error.value) == (
        "A pooled row, or a sample's gradient of one, has 70000, which fp16 cannot carry (65,504 "
        "at most). Send bf16 or fp32."
    )
    with pytest.raises(NonFiniteError) as error:
        encode(torch.tensor([[torch.nan]]), "int8")
    assert str(error.value) == (
        "A pooled row or its gradient is not a number, which int8 cannot carry. Send fp32 to find "
        "where it comes from."
    )
    assert decode(encode(torch.zeros(2, 3), "int8"), 3, "int8").eq(0).all()


def test_gradients_of_a_mean_over_many_samples_are_within_the_bound() -> None:
    """As they are, all of them are 0 in fp16."""
    samples, table = 1 << 16, TableSpec("user", 16, 2)
    plan = TablePlan((TablePlacement(table, "table", (0,)),), ranks=1)
    batch = KeyedJagged(
        ("user",), torch.ones(1, samples, dtype=torch.int32), torch.arange(samples) % 16
    )
    moved = {}
    for wire in ("fp32", "fp16"):
        alone, step = TableExchange(alone=True), SparseStep("sgd", lr=1.0)
        tables = ShardedTables(plan, alone, step, backward=wire)
        before = tables.shards[0].weight.clone()
        (1e-3 * tables(batch).sum() / samples).backward()
        tables.step()
        moved[wire] = before - tables.shards[0].weight
    assert (moved["fp32"] > 6e-5).all()
    assert ((moved["fp16"] - moved["fp32"]).abs() <= 1e-3 * moved["fp32"]).all()
    assert gradient_gain("int8", [samples]) == gradient_gain("fp16", [0, 0]) == 1.0


def test_numbers_below_fp16_are_off_by_its_least_step() -> None:
    tiny = torch.tensor([[2.0**-14, 3e-6, 4e-8, 1e-8]])
    back = decode(encode(tiny, "fp16"), 4, "fp16")
    assert ((back - tiny).abs() <= 2.0**-25).all() and back[0, 3] == 0
