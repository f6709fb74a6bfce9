"""Tables in towers in one process: what they refuse."""

import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.sessions.inverse import share_rows
from equipoise.recsys.towers.tables import TowerTables
from support.recsys import towers

NARROW = towers.MODULES["narrow"]


def refused(call) -> str:
    with pytest.raises(LayoutError) as error:
        call()
    return str(error.value)


def test_what_towers_cannot_do_is_refused() -> None:
    alone = TableExchange(alone=True)
    flat = towers.plan(1, 1, None)
    assert refused(lambda: TowerTables(flat, alone, towers.STEP, NARROW)) == (
        "The plan has no towers. Train ShardedTables, or plan towers."
    )
    tables = towers.make(towers.plan(1, 1, NARROW), alone, NARROW)
    batch = towers.batch(0, 0)
    shared = share_rows(batch, [("user", "item")])
    assert refused(lambda: tables(shared)) == (
        "Towers condense each sample's own rows, and this batch holds rows that samples share. "
        "Give each sample its own."
    )
    loss = tables(batch).sum()
    loss.backward(retain_graph=True)
    out_of_turn = (
        "This is not the first backward of the towers' last forward, and they keep what that one "
        "needs. Call forward and backward in turns."
    )
    assert refused(loss.backward) == out_of_turn
    tables.step()
    first, _ = tables(batch).sum(), tables(towers.batch(1, 0))
    assert refused(first.backward) == out_of_turn


def test_scoring_between_a_forward_and_its_backward_changes_nothing() -> None:
    alone = TableExchange(alone=True)
    weights = []
    for scores in (False, True):
        tables = towers.make(towers.plan(1, 1, NARROW), alone, NARROW)
        out = tables(towers.batch(0, 0))
        if scores:
            with torch.no_grad():
                tables(towers.batch(1, 0))
        out.square().sum().backward()
        tables.step()
        weights.append([shard.weight.clone() for shard in tables.shards])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
