"""Tables in files equal tables in memory, to the bit, and read whole blocks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.base.errors import CheckpointError
from equipoise.memory.blocks import PAGE_BYTES
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.shard import TableShard, make_shard
from equipoise.recsys.tiers.held import TableTiers, file_of, state_columns
from equipoise.schedule.tables.placement import TablePlacement
from equipoise.spec.tables.table import SPARSE_OPTIMIZERS, TableSpec

CPU = torch.device("cpu")
ROWS, WIDTH = 3000, 9


def shard_of(step: SparseStep, width: int, folder: Path | None, slots: int = 0) -> TableShard:
    placement = TablePlacement(TableSpec("t", ROWS, width), "row", (0, 1), "modulo")
    tiers = None if folder is None else TableTiers(folder, {("t", 1): slots}, "lru")
    return make_shard(placement, 1, step, 4, CPU, tiers)


@pytest.mark.parametrize(
    ("optimizer", "width"), [*((name, WIDTH) for name in SPARSE_OPTIMIZERS), ("adagrad", 1)]
)
def test_equal_to_the_table_in_memory(optimizer: str, width: int, tmp_path: Path) -> None:
    """With rows fetched ahead, of which the step before rewrites some, and with none fetched."""
    step = SparseStep(optimizer, lr=0.3)
    plain, filed = shard_of(step, width, None), shard_of(step, width, tmp_path, 64)
    assert filed.held is not None
    file = file_of(filed.held)
    assert file is not None
    source = torch.Generator().manual_seed(0)
    draws = [torch.unique(torch.randint(0, 1500, (80,), generator=source) // 3) for _ in range(12)]
    for number, rows in enumerate(draws):
        lengths = torch.tensor([len(rows)])
        outs = [each.pool(rows, lengths, is_training=True) for each in (plain, filed)]
        assert torch.equal(*outs), number
        if number % 3 and number + 1 < len(draws):
            coming = draws[number + 1].numpy()
            file.fetch(coming[filed.held.cache.find(coming) < 0])
        grad = torch.randn(len(rows), width, generator=source)
        for each in (plain, filed):
            each.apply(step, rows, grad, number=number + 1)
    filed.held.flush(99)
    every = file.read(torch.arange(1500))
    assert torch.equal(every[:, :width], plain.weight)
    for name, (begin, end) in state_columns(step, width).items():
        assert torch.equal(every[:, begin:end], plain.state[name].view(1500, -1))
    assert filed.held.hits > 0
    assert file.file.blocks_read > 0
    assert (tmp_path / "t-1" / "blocks").stat().st_size % PAGE_BYTES == 0
    with pytest.raises(
        CheckpointError,
        match=r"^A file has 1,500 rows of another shard\. Go on with the layout and the tables "
        r"that the run was begun with\.$",
    ):
        file.take(np.arange(3), np.arange(3), {})


def test_records_larger_than_a_page_take_more_pages(tmp_path: Path) -> None:
    placement = TablePlacement(TableSpec("/t", 5, 2000), "table", (0,))
    step = SparseStep("sgd", lr=1.0)
    tiers = TableTiers(tmp_path, {("/t", 0): 0})
    plain = make_shard(placement, 0, step, 4, CPU)
    filed = make_shard(placement, 0, step, 4, CPU, tiers)
    rows, grad = torch.tensor([1, 4]), torch.ones(2, 2000)
    for each in (plain, filed):
        each.apply(step, rows, grad, number=1)
    assert filed.held is not None
    assert torch.equal(filed.held.read(torch.arange(5)), plain.weight)
    # Whatever the table's name, its file is in the rank's folder.
    assert (tmp_path / "%2Ft-0" / "blocks").stat().st_size == 2 * 2 * PAGE_BYTES
