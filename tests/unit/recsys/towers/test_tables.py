"""Tables in towers in one process: what they refuse."""

import pytest

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
    assert refused(loss.backward) == "No forward has come before this backward. Call it first."
