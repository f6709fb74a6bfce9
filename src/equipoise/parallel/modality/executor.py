"""The bridge at work: rows from the ranks that encode to those that read, and gradients back.

What it decides
    Nothing: every rank knows from the plan how many rows pass between any two in any round, so
    nothing is negotiated. A rank's own rows do not travel.

Kept true (tests/multi/parallel/test_modality.py)
    What arrives is what was sent, in the plan's order; bytes counted equal the plan's, pair by
    pair; ranks without rows take part all the same.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.comm.mail import Ledger
from equipoise.schedule.modality.bridge import BridgePlan


def carry(rows_MD: Tensor, plan: BridgePlan, rank: int, ledger: Ledger) -> Tensor:
    """Send rows to those that read them; every rank calls it.

    Args:
        rows_MD: What this rank sends, its own included, in the order of the plan's readers.
        plan: Equal on all ranks.
        rank: This rank.
        ledger: Counts what passes.

    Returns:
        What this rank reads, by sending rank and then in the order of the plan's readers.
    """
    return _exchange(rows_MD, plan, plan.sent, rank, ledger)


def carry_back(grads_KD: Tensor, plan: BridgePlan, rank: int, ledger: Ledger) -> Tensor:
    """Send gradients of what was read to those that sent it: the way back of ``carry``.

    Args:
        grads_KD: Gradients of what ``carry`` returned.
        plan: As for ``carry``.
        rank: Likewise.
        ledger: Likewise.
    """
    return _exchange(grads_KD, plan, plan.sent.T, rank, ledger)


def _exchange(rows: Tensor, plan: BridgePlan, sent: Ints, rank: int, ledger: Ledger) -> Tensor:
    """All rounds of one direction; rows are by peer, in the peers' order, on both sides."""
    out = rows.new_empty(int(sent[:, rank].sum()), rows.shape[1])
    to, by = sent[rank], sent[:, rank]
    to_at, by_at = np.cumsum(to) - to, np.cumsum(by) - by
    own = slice(int(to_at[rank]), int(to_at[rank] + to[rank]))
    out[int(by_at[rank]) : int(by_at[rank] + by[rank])] = rows[own]
    row_bytes = rows.element_size() * rows.shape[1]
    for number in range(plan.rounds):
        starts, stops = (sent * at // plan.rounds for at in (number, number + 1))
        take, give = (stops - starts)[rank], (stops - starts)[:, rank]
        take[rank] = give[rank] = 0
        parts = [
            rows[int(to_at[peer] + starts[rank, peer]) :][: int(take[peer])]
            for peer in range(plan.ranks)
        ]
        arrived = rows.new_empty(int(give.sum()), rows.shape[1])
        dist.all_to_all_single(arrived, torch.cat(parts), give.tolist(), take.tolist())
        ledger.sent_bytes += take * row_bytes
        ledger.sent_messages += take > 0
        ledger.received_bytes += give * row_bytes
        for peer, part in enumerate(arrived.split(give.tolist())):
            at = int(by_at[peer] + starts[peer, rank])
            out[at : at + len(part)] = part
    return out
