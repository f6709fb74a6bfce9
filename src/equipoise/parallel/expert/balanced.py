"""Expert parallelism that obeys an ``ExpertSchedule``: rows go to places, not to owners.

Why
    Under ``exchange`` the rank of a popular expert computes while all others wait.

What it decides
    Each micro-batch of a layer, in this order:

    1. Ranks exchange how many rows each has for each expert, and each writes the schedule from
       these counts (``balance.expert``), a function of them alone.
    2. They compare digests of what they wrote, 8 bytes from each, before anything moves by it.
    3. Rows, sorted by expert, are dealt to the places of their expert by quota and travel.
    4. Each rank computes rows of its own experts with the weights that it has, then rows of
       copies with weights that it fetches (``copies``).
    5. Outputs go back the same way, into the order in which rows came.

    Policies that plan from earlier loads get those of the last step, summed over all ranks; they
    are not part of a checkpoint, so the first step of a run, and of one that resumes, has none.

Kept true (tests/multi/parallel/test_balanced.py)
    Loss, every gradient and one step of SGD equal one rank's, in fp32 and fp64, for every policy
    and every kind of workload; reruns are bitwise the same; ranks whose plans differ are refused
    before a byte moves; bytes sent are those of the schedule.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.balance.expert.policies import plan_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.comm.meet import name_ranks
from equipoise.nn.moe.layer import Experts
from equipoise.nn.moe.matmul import expert_swiglu
from equipoise.parallel.expert.copies import CopyTraffic, copied_swiglu
from equipoise.parallel.expert.exchange import (
    ExpertExchange,
    permute_rows,
    sort_arrivals,
    sparse_layers,
)
from equipoise.schedule.expert.schedule import COUNT_BYTES, ExpertSchedule
from equipoise.spec.run.layout import ExpertsSpec

PLANNED = 5
"""Numbers of ``PlannedLoads``."""

_DIGITS = 15
"""Hexadecimal digits of a digest that fit in int64."""


@dataclass(slots=True, eq=False)
class PlannedLoads:
    """What schedules did since the last step, of the micro-batches that had a backward."""

    before: int = 0
    """Rows of the fullest rank without copies, times ranks, summed."""
    after: int = 0
    """Rows of the fullest rank, times ranks, summed."""
    rows: int = 0
    """All rows."""
    copies: int = 0
    copied_bytes: int = 0
    """Weights to copies and gradients back, over all ranks."""

    def add(self, schedule: ExpertSchedule, expert_bytes: int) -> None:
        """Count a micro-batch; ``expert_bytes`` are of one expert's weights."""
        ranks = schedule.ranks
        self.before += ranks * int(schedule.computed_by_owners.max())
        self.after += ranks * int(schedule.computed.max())
        self.rows += int(schedule.rows.sum())
        self.copies += schedule.copies
        self.copied_bytes += int(schedule.copy_bytes(1, element_bytes=expert_bytes).sum())


@dataclass(slots=True, eq=False)
class BalancedExchange:
    """Sends rows to the places of their experts, and their outputs back."""

    base: ExpertExchange
    """The ranks that share experts, and how rows move between them."""
    wish: ExpertsSpec
    seen: Ints | None = None
    """Loads of the last step, int64 [X]."""
    planned: PlannedLoads = field(default_factory=PlannedLoads)

    def __call__(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> Tensor:
        """Outputs [R, D]; rows are sorted by expert, ``counts_X`` rows each."""
        schedule = self.plan(self._gather(counts_X).numpy(force=True))
        self._agree(schedule, x_RD.device)
        rank, sent = self.base.peers.rank, schedule.sent
        way = [sent[rank].tolist(), sent[:, rank].tolist()]
        order = torch.from_numpy(deal_rows(schedule, rank)).to(x_RD.device)
        arrived = self.base.send(permute_rows(x_RD, order), *way)
        y_SD = self._compute(schedule, arrived, experts)
        back = self.base.send(y_SD, *reversed(way))
        return permute_rows(back, torch.argsort(order))

    def take(self) -> tuple[int, ...]:
        """What schedules did since this was last called, in the order of ``PlannedLoads``."""
        taken, self.planned = self.planned, PlannedLoads()
        return taken.before, taken.after, taken.rows, taken.copies, taken.copied_bytes

    def plan(self, rows: Ints) -> ExpertSchedule:
        """The schedule of a micro-batch, from every rank's rows for each expert [ranks, X]."""
        wish = self.wish
        request = ExpertRequest(rows, slots=wish.slots, least_rows=wish.least_rows, seen=self.seen)
        return plan_experts(wish.policy, request)

    def _compute(self, schedule: ExpertSchedule, arrived: Tensor, experts: Experts) -> Tensor:
        """Outputs of rows that lie by source and then by expert, in the same order."""
        rank = self.base.peers.rank
        mine = schedule.places[:, 1] == rank
        quotas, is_copy = schedule.quotas[:, mine], schedule.is_copy[mine]
        # Own experts first, all of them, and then copies; sources send them by expert.
        local = schedule.places[mine, 0] - int(np.searchsorted(schedule.owners, rank))
        own = self.base.experts[rank]
        slot = np.where(is_copy, own + np.cumsum(is_copy) - 1, local)
        here = np.zeros((schedule.ranks, own + int(is_copy.sum())), dtype=np.int64)
        here[:, slot] = quotas
        by_expert = torch.from_numpy(np.ascontiguousarray(quotas)).to(arrived.device)
        order = sort_arrivals(by_expert, len(arrived))
        # Runs of places in the order of experts, into the order of slots.
        totals = quotas.sum(axis=0)
        starts = np.cumsum(totals) - totals
        runs = [np.arange(starts[at], starts[at] + totals[at]) for at in np.argsort(slot)]
        into = torch.from_numpy(np.concatenate([*runs, np.zeros(0, np.int64)]).astype(np.int64))
        order = order[into.to(order.device)]
        counts = torch.from_numpy(here.sum(axis=0)).to(arrived.device)
        traffic = CopyTraffic.of(schedule, rank, self.base.move) if schedule.copies else None

        def products(
            rows: Tensor, counts_P: Tensor, gate: Tensor, up: Tensor, down: Tensor
        ) -> Tensor:
            expert_bytes = 3 * gate[:1].numel() * gate.element_size()
            rows = _counted(rows, self, schedule, expert_bytes)
            ends = counts_P.cumsum(0).to(torch.int32)
            if traffic is None:
                return expert_swiglu(rows, ends, gate, up, down)
            split = int(here[:, :own].sum())
            few, more = rows.split([split, len(rows) - split])
            y_own = expert_swiglu(few, ends[:own], gate, up, down)
            ends_copies = (counts_P[own:].cumsum(0)).to(torch.int32)
            y_copies = copied_swiglu(more, ends_copies, gate, up, down, traffic)
            return torch.cat((y_own, y_copies))

        y = experts(permute_rows(arrived, order), counts, products)
        return permute_rows(y, torch.argsort(order))

    def _gather(self, counts_X: Tensor) -> Tensor:
        """Every rank's rows for each expert, int64 [ranks, X]."""
        peers, out = self.base.peers, counts_X.new_empty(self.base.peers.count, len(counts_X))
        if peers.count == 1:
            return counts_X[None]
        dist.all_gather_single(out.view(-1), counts_X.contiguous(), group=peers.group)
        self._ledger(COUNT_BYTES * len(counts_X))
        return out

    def _agree(self, schedule: ExpertSchedule, device: torch.device) -> None:
        """Refuse to move by plans that differ.

        Raises:
            LayoutError: on every rank; names those that differ from the first.
        """
        peers = self.base.peers
        if peers.count == 1:
            return
        mine = torch.tensor([int(schedule.digest[:_DIGITS], 16)], device=device)
        every = mine.new_empty(peers.count)
        dist.all_gather_single(every, mine, group=peers.group)
        self._ledger(COUNT_BYTES)
        digests = every.tolist()
        if differing := [rank for rank, each in enumerate(digests) if each != digests[0]]:
            named = name_ranks([peers.ranks[rank] for rank in differing])
            raise LayoutError(
                f"{named[0].upper()}{named[1:]} planned experts otherwise than rank "
                f"{peers.ranks[0]}, from the same counts of {int(schedule.rows.sum())} rows. "
                f"Nothing was sent by it. Give every machine the same version of equipoise and of "
                f"NumPy."
            )

    def _ledger(self, row_bytes: int) -> None:
        """Count what an exchange of all ranks sends to each other one."""
        for peer in range(self.base.peers.count):
            if peer != self.base.peers.rank:
                self.base.ledger.sent_bytes[peer] += row_bytes
                self.base.ledger.sent_messages[peer] += 1
                self.base.ledger.received_bytes[peer] += row_bytes


def deal_rows(schedule: ExpertSchedule, rank: int) -> Ints:
    """The order in which a rank's rows, sorted by expert, leave: by rank, then by expert.

    >>> from equipoise.schedule.expert.schedule import schedule_experts
    >>> deal_rows(schedule_experts([[1, 2], [3, 0]]), 0).tolist()
    [0, 1, 2]
    """
    quotas = schedule.quotas[rank]
    starts = np.cumsum(quotas) - quotas  # places are ascending by expert, as rows are
    by_rank = np.lexsort((schedule.places[:, 0], schedule.places[:, 1]))
    runs = [np.arange(starts[at], starts[at] + quotas[at]) for at in by_rank.tolist()]
    return np.concatenate([np.zeros(0, dtype=np.int64), *runs]).astype(np.int64)


def balance_experts(module: nn.Module, wish: ExpertsSpec) -> None:
    """Let the layers that ``spread_experts`` has spread obey a policy's schedules.

    Raises:
        LayoutError: ranks also share the hidden units of each expert; or the policy does not take
            this number of experts or slots.
    """
    if wish.policy == "fixed":
        return
    for layer in sparse_layers(module):
        base = layer.exchange
        if not isinstance(base, ExpertExchange):
            continue
        if base.split is not None:
            raise LayoutError(
                f'experts.policy = "{wish.policy}" copies whole experts, but etp = '
                f"{base.split.peers.count} ranks share the hidden units of each. Set layout.etp = "
                f'1 or experts.policy = "fixed".'
            )
        balanced = BalancedExchange(base, wish)
        balanced.plan(np.zeros((base.peers.count, sum(base.experts)), dtype=np.int64))
        layer.exchange = balanced


def balanced_exchanges(module: nn.Module) -> list[BalancedExchange]:
    """Those of a module's layers that obey schedules, in order."""
    exchanges = [layer.exchange for layer in sparse_layers(module)]
    return [each for each in exchanges if isinstance(each, BalancedExchange)]


class _Counted(torch.autograd.Function):
    """Return rows unchanged; the backward counts the schedule."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        exchange: BalancedExchange,
        schedule: ExpertSchedule,
        expert_bytes: int,
    ) -> Tensor:
        ctx.counted = exchange, schedule, expert_bytes
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exchange, schedule, expert_bytes = ctx.counted
        exchange.planned.add(schedule, expert_bytes)
        return grads[0], None, None, None


def _counted(
    rows: Tensor, exchange: BalancedExchange, schedule: ExpertSchedule, expert_bytes: int
) -> Tensor:
    out: Tensor = _Counted.apply(rows, exchange, schedule, expert_bytes)  # type: ignore[no-untyped-call]
    return out
