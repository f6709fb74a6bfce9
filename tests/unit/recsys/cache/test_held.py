"""Rows behind a cache equal a dictionary that does the same; bytes are those of the formula."""

import numpy as np
import pytest
import torch

from equipoise.base.errors import LayoutError, SpecError
from equipoise.numerics.rows import pack_rows, row_bytes, unpack_rows
from equipoise.recsys.cache.packed import TablePrecision
from equipoise.recsys.optimizer import SparseStep, update_rows
from equipoise.recsys.shard import TableShard, make_shard
from equipoise.schedule.tables.placement import TablePlacement
from equipoise.schedule.tiers.cache import CACHE_POLICIES
from equipoise.spec.tables.table import TableSpec

CPU = torch.device("cpu")
STEP = SparseStep("row-wise-adagrad", lr=0.3)


def shard_of(rows: int, width: int, precision: TablePrecision | None) -> TableShard:
    placement = TablePlacement(TableSpec("t", rows, width), "table", (0,))
    return make_shard(placement, 0, STEP, 1, CPU, precision)


def drawn(step: int, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    some = torch.unique(torch.randint(0, rows, (9,), generator=source))
    return some, torch.randn(len(some), width, generator=source)


@pytest.mark.parametrize("policy", CACHE_POLICIES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_equal_to_rows_one_by_one(policy: str, share: float) -> None:
    """Rows in slots are fp32; all others are rounded each time that they are written."""
    rows, width = 40, 6
    shard = shard_of(rows, width, TablePrecision("int4", "nearest", share, policy))
    plain = shard_of(rows, width, None)
    slow = pack_rows(plain.weight, "int4")
    fast: dict[int, torch.Tensor] = {}
    state = {"sum": torch.zeros(rows)}
    held = shard.held
    assert held is not None
    held.cache.expect([drawn(step, rows, width)[0].numpy() for step in range(25)], 0)

    def row_of(row: int) -> torch.Tensor:
        return fast[row] if row in fast else unpack_rows(slow[row : row + 1], width, "int4")[0]

    for step in range(25):
        some, grad = drawn(step, rows, width)
        want = torch.stack([row_of(row) for row in some.tolist()])
        assert torch.equal(held.read(some, is_training=True), want), step
        shard.apply(STEP, some, grad, number=step + 1)
        part = {"sum": state["sum"][some]}
        update_rows(STEP, want, part, torch.arange(len(some)), grad, number=step + 1)
        state["sum"][some] = part["sum"]
        tags = set(held.cache.tags.reshape(-1).tolist())
        for row in list(fast):
            if row not in tags:
                slow[row : row + 1] = pack_rows(fast.pop(row).unsqueeze(0), "int4")
        for row, value in zip(some.tolist(), want, strict=True):
            if row in tags:
                fast[row] = value.clone()
            else:  # a batch of more rows than its sets have ways passes by, and is exact
                slow[row : row + 1] = pack_rows(value.unsqueeze(0), "int4")
    assert held.reads > held.hits >= (0 if share else held.hits)
    assert (held.hits > 0) == (share > 0)


def test_a_row_that_is_only_read_never_changes() -> None:
    shard = shard_of(50, 5, TablePrecision("int2", "stochastic", 0.2))
    assert shard.held is not None
    every = torch.arange(50)
    first = shard.held.read(every)
    for _ in range(5):
        shard.pool(every, torch.tensor([50]), is_training=True)
    assert torch.equal(shard.held.read(every), first)


@pytest.mark.parametrize(
    ("form", "share", "width", "least"),
    [("int8", 0.05, 64, 3.0), ("int8", 0.05, 128, 3.1), ("int4", 0.01, 128, 7.0)],
)
def test_bytes_are_the_formula_and_nothing_else_is_kept(
    form: str, share: float, width: int, least: float
) -> None:
    rows = 12_800
    shard = shard_of(rows, width, TablePrecision(form, "stochastic", share))
    held = shard.held
    assert held is not None
    some = torch.arange(0, rows, 3)
    held.read(some, is_training=True)
    shard.apply(STEP, some, torch.ones(len(some), width), number=1)
    slots = int(share * rows * 4 * width / (4 * width + 9)) // 32 * 32
    assert held.held_bytes == rows * row_bytes(width, form) + slots * (4 * width + 9)
    assert 4 * rows * width / held.held_bytes >= least
    # Tensors and arrays that the shard leads to: no fp32 shadow among them.
    stack: list[object] = [held]
    total = 0
    while stack:
        each = stack.pop()
        if isinstance(each, torch.Tensor):
            total += each.untyped_storage().nbytes()
        elif isinstance(each, np.ndarray):
            total += each.nbytes
        elif isinstance(each, tuple):
            stack += each
        elif type(each).__module__.startswith("equipoise"):
            stack += vars(each).values()
    assert total == held.held_bytes


def test_bytes_fall_by_the_promised_factor_however_many_rows_there_are() -> None:
    """Tags count as the cache's: beside it, int4 with 1% was 6.99 times smaller."""
    for form, share, width, least in (("int8", 0.05, 64, 3.0), ("int4", 0.01, 128, 7.0)):
        precision = TablePrecision(form, cache_share=share)
        for rows in (320, 12_800, 1_000_000, 1 << 30):
            slots = precision.slots(rows, width)
            held = rows * row_bytes(width, form) + slots * (4 * width + 9)
            assert rows * 4 * width / held >= least
            assert slots >= int(0.95 * share * rows)


def test_what_rounding_costs_is_in_the_order_of_what_it_keeps() -> None:
    """The same gradients, most of them of few rows: fp32 < drawn with a cache < drawn < nearest."""
    rows, width, sgd = 320, 16, SparseStep("sgd", lr=0.02)
    source = np.random.default_rng(0)
    steps = [np.unique((rows * source.random(24) ** 4).astype(np.int64)) for _ in range(100)]
    drift = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * 0.02

    def off(precision: TablePrecision) -> float:
        shard, plain = shard_of(rows, width, precision), shard_of(rows, width, None)
        for number, each in enumerate(steps, start=1):
            some = torch.from_numpy(each)
            for side in (shard, plain):
                side.apply(sgd, some, drift[some], number=number)
        assert shard.held is not None
        return float((shard.held.read(torch.arange(rows)) - plain.weight).square().mean().sqrt())

    cached = off(TablePrecision("int4", "stochastic", 0.2, "lfu"))
    drawn = off(TablePrecision("int4", "stochastic", 0.0))
    nearest = off(TablePrecision("int4", "nearest", 0.0))
    assert 0 < cached < 0.9 * drawn < 0.9 * nearest


def test_draws_depend_on_the_row_of_the_table_not_on_its_shard() -> None:
    table = TableSpec("t", 20, 4)
    whole = shard_of(20, 4, TablePrecision("int4", "stochastic", 0.0))
    for buckets in ("contiguous", "modulo"):
        placement = TablePlacement(table, "row", (0, 1), buckets)
        precision = TablePrecision("int4", "stochastic", 0.0)
        parts = [make_shard(placement, each, STEP, 1, CPU, precision) for each in (0, 1)]
        for part in parts:
            rows = torch.from_numpy(part.rows)
            at = torch.arange(len(rows))
            values = torch.linspace(-1, 1, 80).view(20, 4)
            whole.held.tier.write(torch.arange(20), values, 7)
            part.held.tier.write(at, values[rows], 7)
            assert torch.equal(part.held.read(at), whole.held.read(rows))


def test_what_is_wrong_is_one_sentence() -> None:
    with pytest.raises(SpecError, match=r"^A cache of 2 of a table cannot be\. Give 0 to 1\.$"):
        TablePrecision("int4", "stochastic", 2.0)
    placement = TablePlacement(TableSpec("t", 4, 4), "column", (0, 1))
    with pytest.raises(
        LayoutError,
        match=r"^Table t is divided by columns, and its rows of int8 have one scale each\. Divide "
        r"it by rows\.$",
    ):
        make_shard(placement, 0, STEP, 1, CPU, TablePrecision())
