"""The bridge: what arrives is what was sent, bytes as planned, and plans that differ are named."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger
from equipoise.comm.turns import play_ranks
from equipoise.parallel.modality.executor import carry, carry_back
from equipoise.parallel.modality.program import require_one_bridge
from equipoise.schedule.modality.bridge import BridgePlan, Readers, plan_bridge


def _plan(seed: int, ranks: int, items: int, round_rows: int) -> BridgePlan:
    draw = np.random.default_rng(seed)
    rows = draw.integers(1, 9, items)
    item = np.repeat(np.arange(items), rows)
    item_row = np.concatenate([np.arange(n) for n in rows]) if items else item
    rank, turn = draw.integers(0, ranks, len(item)), draw.integers(0, 3, len(item))
    readers = Readers(item, item_row, rank, turn, draw.permutation(len(item)))
    owner = draw.integers(0, ranks, items)
    return plan_bridge(readers, owner, rows, ranks=ranks, round_rows=round_rows)


def _there_and_back(
    ranks: Ranks, plan: BridgePlan
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Rows that name themselves: what a rank reads, what comes back, and bytes by peer."""
    ledger, readers = Ledger(ranks.world), plan.readers
    mine = np.flatnonzero(plan.owner[readers.item] == ranks.rank)
    names = torch.from_numpy(np.stack((readers.item[mine], readers.item_row[mine]), 1)).double()
    arrived = carry(names, plan, ranks.rank, ledger)
    back = carry_back(2 * arrived, plan, ranks.rank, ledger)
    return arrived, back - 2 * names, ledger.sent_bytes, ledger.received_bytes


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 9), st.integers(1, 6))
def test_rows_arrive_where_they_are_read_and_gradients_return(
    seed: int, ranks: int, items: int, round_rows: int
) -> None:
    plan = _plan(seed, ranks, items, round_rows)
    outcomes = play_ranks(ranks, _there_and_back, plan)
    counted = plan.bytes(2, element_bytes=8)
    for rank, (arrived, lost, sent_bytes, received_bytes) in enumerate(outcomes):
        here = plan.readers.rank == rank
        expected = np.stack((plan.readers.item[here], plan.readers.item_row[here]), 1)
        assert (arrived.numpy() == expected).all()
        assert not lost.any()
        assert sent_bytes.tolist() == counted[rank].tolist()
        assert received_bytes.tolist() == counted[:, rank].tolist()


def _require(ranks: Ranks, plan: BridgePlan, odd_rank: int) -> str:
    if ranks.rank == odd_rank:
        plan = dataclasses.replace(plan, owner=(plan.owner + 1) % plan.ranks)
    try:
        require_one_bridge(plan, 7, ranks)
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("odd_rank", "name"), [(2, "Rank 2"), (0, "Ranks 1, 2"), (9, "")])
def test_ranks_that_dealt_otherwise_are_named_on_every_rank(odd_rank: int, name: str) -> None:
    said = play_ranks(3, _require, _plan(0, 3, 4, 8), odd_rank)
    expected = (
        f"{name} dealt the images and sound of step 7 otherwise than rank 0. Nothing was sent or "
        "changed by it. Give every machine the same corpus and the same version of equipoise and "
        "of NumPy."
    )
    assert said == [expected if name else ""] * 3
