"""Bags by feature: slices are what lists say, and ids that no row has are refused."""

import pytest
import torch

from equipoise.base.errors import DataError, LayoutError, SpecError
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.optimizer import SparseStep
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.spec.tables.table import TableSpec

BAGS = {"genre": [[4, 1], [], [2]], "user": [[0], [0], [3]]}


def make(ranks: int = 1) -> ShardedTables:
    tables = (TableSpec("genre", 5, 3), TableSpec("user", 4, 2, pooling="mean"))
    placements = tuple(TablePlacement(table, "table", (0,)) for table in tables)
    return ShardedTables(TablePlan(placements, ranks), TableExchange(alone=True), SparseStep())


def test_bags_and_slices() -> None:
    batch = KeyedJagged.from_bags(BAGS)
    assert batch.samples == 3
    assert [each.tolist() for each in batch.bags("user")] == [[1, 1, 1], [0, 0, 3]]
    part = batch.select(1, 3)
    assert [each.tolist() for each in part.bags("genre")] == [[0, 1], [2]]
    assert part.values.tolist() == [2, 0, 3]


def test_outputs_stand_in_the_order_of_the_tables() -> None:
    """Not in the order of the batch's keys."""
    tables = make()
    out = tables(KeyedJagged.from_bags({key: BAGS[key] for key in ("user", "genre")}))
    genre, user = (shard.weight for shard in tables.shards)
    assert torch.allclose(out[:, :3], torch.stack((genre[4] + genre[1], 0 * genre[0], genre[2])))
    assert torch.allclose(out[:, 3:], torch.stack((user[0], user[0], user[3])))


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        (
            {**BAGS, "user": [[0], [4], [1]]},
            "Feature user: id 4 of sample 1 is beyond its table of 4 rows. Map it to one of 0 to "
            "3.",
        ),
        (
            {**BAGS, "genre": [[0], [], [3, -2]]},
            "Feature genre: id -2 of sample 2 is negative. Ids begin at 0.",
        ),
        (
            {"genre": BAGS["genre"]},
            "The batch has no feature user; it has genre. Add it, or drop its table.",
        ),
    ],
)
def test_ids_that_no_row_has_are_refused(bags: dict[str, list[list[int]]], message: str) -> None:
    with pytest.raises(DataError) as error:
        make()(KeyedJagged.from_bags(bags))
    assert str(error.value) == message


def test_batches_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(DataError, match="Lengths add up to 3 and there are 2 ids"):
        KeyedJagged(("a",), torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="different numbers of samples: a 1, b 2"):
        KeyedJagged.from_bags({"a": [[1]], "b": [[1], [2]]})
    with pytest.raises(DataError, match="must have a row for each, and have shape"):
        KeyedJagged(("a",), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(0).long())
    with pytest.raises(DataError, match=r"^Feature a: id 1.5 is not a whole number\. Map"):
        KeyedJagged.from_bags({"a": [[1], [1.5]]})
    with pytest.raises(DataError) as error:
        KeyedJagged.from_bags({"a": [[2**63]]})
    assert str(error.value) == (
        "Feature a: an id of 64 bits exceeds int64, which has 63 and a sign. Map values to rows "
        "first."
    )
    with pytest.raises(DataError, match=r"^A batch needs a feature, and has none\. Give each"):
        KeyedJagged.from_bags({})
    with pytest.raises(DataError, match=r"in one dim, and have shape \[2, 1\]\. Flatten them"):
        KeyedJagged(("a",), torch.tensor([[1, 1]], dtype=torch.int32), torch.zeros(2, 1).long())
    lengths, ids = torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0])
    for given, kinds in (
        ((lengths, ids.long()), "torch.int64 and torch.int64"),
        ((lengths.int(), ids), "torch.int32 and torch.float32"),
    ):
        with pytest.raises(DataError) as error:
            KeyedJagged(("a",), *given)
        assert str(error.value) == (
            f"Lengths must be torch.int32 and ids torch.int64; they are {kinds}. Convert them with "
            "Tensor.to()."
        )
    with pytest.raises(DataError, match=r"^Two features have the key a\. Rename one\.$"):
        KeyedJagged(("a", "a"), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(0).long())


def test_steps_out_of_turn_are_refused() -> None:
    tables, batch = make(), KeyedJagged.from_bags(BAGS)
    with pytest.raises(LayoutError, match="The tables have no gradient to apply"):
        tables.step()
    tables(batch).sum().backward()
    with pytest.raises(LayoutError, match="a gradient that no step has applied"):
        tables(batch)
    with torch.no_grad():
        tables(batch)
    tables.step()
    before = tables.shards[1].weight.clone()
    both = tables(batch).sum() + tables(batch.select(0, 1)).sum()
    with pytest.raises(LayoutError) as error:
        both.backward()
    assert str(error.value) == (
        "The tables have the gradient of another backward, and one more would replace it. Look up "
        "all samples of a step in one forward, and call step() after its backward."
    )
    assert torch.equal(tables.shards[1].weight, before)
    with pytest.raises(LayoutError, match=r"planned for 2 ranks; 1 joined\. Plan them for 1\."):
        make(2)


def test_samples_beyond_a_batch_are_refused() -> None:
    batch = KeyedJagged.from_bags(BAGS)
    assert batch.select(3, 3).samples == 0
    for begin, end in ((-1, 2), (0, 4), (2, 1)):
        with pytest.raises(DataError) as error:
            batch.select(begin, end)
        assert str(error.value) == (
            f"Samples {begin} to {end} are not in a batch of 3. Give a range from 0 on."
        )


def test_tables_that_cannot_be_made_are_refused() -> None:
    placement = TablePlacement(TableSpec("user", 4, 2), "table", (0,))
    plan, alone = TablePlan((placement,), 1), TableExchange(alone=True)
    for words, said in (
        ({"forward": "fp8"}, '"fp8" is not one of fp32, bf16, fp16, int8.'),
        ({"backward": 3}, "3 is not one of fp32, bf16, fp16, int8."),
        ({"seed": -1}, "A seed of -1 cannot be. Give one from 0 to 2^64 - 1."),
    ):
        with pytest.raises(LayoutError) as error:
            ShardedTables(plan, alone, SparseStep(), **words)
        assert str(error.value) == said
    with pytest.raises(LayoutError) as error:
        TableExchange()
    assert str(error.value) == (
        "No ranks have joined, so there is nobody to exchange with. Start ranks first, or pass "
        "alone=True."
    )
    with pytest.raises(SpecError, match=r"^A table has no name\. Give it one\.$"):
        TableSpec(" ", 4, 2)
