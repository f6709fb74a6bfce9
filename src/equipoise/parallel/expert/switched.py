"""Experts whose hidden units several ranks share, computed in whichever way is cheapest now.

What it decides
    Nothing but the order of events; ``balance.expert.tutel`` chooses the sharing from the rows of
    all ranks that have a part of the layer. Then, as ``balanced``, digests are compared, and rows
    or weights move. Parameters, gradients and optimizer states stay where they are, so one
    micro-batch may be computed in one way and the next in another.

Kept true (tests/multi/parallel/test_tutel.py)
    Loss and every gradient equal one rank's under every sharing; a switch moves no parameter.
"""

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from equipoise.balance.expert.auto import PolicyChoice
from equipoise.balance.expert.price import RowPrices
from equipoise.balance.expert.request import ExpertRequest
from equipoise.balance.expert.tutel import choose_sharing, gather_experts
from equipoise.base.arrays import Ints
from equipoise.base.digest import digest
from equipoise.nn.moe.layer import ExchangeSteps, Experts
from equipoise.nn.shuffle import permute_rows
from equipoise.parallel.expert.balanced import BalancedExchange
from equipoise.parallel.expert.copies import copied_swiglu
from equipoise.parallel.expert.exchange import sort_arrivals
from equipoise.parallel.expert.planned import counted
from equipoise.parallel.expert.sharing import Sharing, WholeTraffic
from equipoise.parallel.expert.split import ExpertSplit
from equipoise.schedule.expert.schedule import ExpertSchedule, schedule_experts

_LAST = 1024
"""Forward passes whose sharings are remembered."""


@dataclass(slots=True, eq=False)
class SwitchedExchange(BalancedExchange):
    """Sends rows to experts, or weights to rows, or some of both."""

    split: ExpertSplit = field(kw_only=True)
    """The ranks that share hidden units."""
    ffn: int = field(kw_only=True)
    """Hidden units of a whole expert."""
    forced: int | None = None
    """A sharing to obey whatever it costs."""
    switches: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST))
    """The sharings of the last forward passes."""

    def steps(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> ExchangeSteps:
        """Outputs [R, D], in steps; rows are sorted by expert, ``counts_X`` rows each."""
        every = self.split.tell(self._gather(counts_X)).numpy(force=True)
        r = self.choose(every)
        named, rows = digest([r, every]), int(every.sum())
        for peers in (self.base.peers, self.split.peers):
            self._agree(named, rows, x_RD.device, peers)
        self.switches.append(r)
        if r == 0:
            mine = every[self.split.peers.rank]
            choice = PolicyChoice(gather_experts(ExpertRequest(mine)), {})
            whole = partial(WholeTraffic, Sharing(self.split.peers, 1, self.ffn))
            return (yield from self._obey(choice, x_RD, experts, whole))
        return (yield from self._share(r, every, x_RD, experts))

    def copied_bytes(self, schedule: ExpertSchedule, gate: Tensor) -> int:
        """As of whole experts, and of the hidden units that come from ranks that share them."""
        r = self.switches[-1]
        units = Sharing(self.split.peers, max(r, 1), self.ffn).fetched_units
        units *= schedule.rows.shape[1]
        row_bytes: int = gate.shape[2] * gate.element_size()
        return int(3 * (schedule.copies * self.ffn + units) * row_bytes)

    def choose(self, every: Ints) -> int:
        """The sharing for each rank's rows for each expert, int64 [etp, ep, X]."""
        if self.forced is not None:
            return self.forced
        return choose_sharing(every, RowPrices.of_width(self.wish.least_rows, self.ffn))

    def _share(self, r: int, every: Ints, x_RD: Tensor, experts: Experts) -> ExchangeSteps:
        """Rows go to the owners of their experts, and from there to the others of a run."""
        sharing = Sharing(self.split.peers, r, self.ffn)
        base, rank = self.base, self.base.peers.rank
        owned = schedule_experts(every[self.split.peers.rank])
        schedule = dataclasses.replace(owned, remakes=True)  # of units
        choice = PolicyChoice(schedule, {})
        sent, received = schedule.sent[rank].tolist(), schedule.sent[:, rank].tolist()
        out, back = base.way(sent, received), base.way(received, sent)
        left = out.start(x_RD)
        yield
        arrived = out.finish(left)
        here = every[sharing.members.start : sharing.members.stop, :, schedule.owners == rank]
        sizes = here.sum(axis=(1, 2)).tolist()
        rows = sharing.gather(arrived, sizes)
        here_NX = torch.from_numpy(np.ascontiguousarray(here.reshape(-1, here.shape[2])))
        here_NX = here_NX.to(rows.device)
        order = sort_arrivals(here_NX, len(rows))

        def products(
            rows: Tensor, counts_X: Tensor, gate: Tensor, up: Tensor, down: Tensor
        ) -> Tensor:
            moved, is_trained = self.copied_bytes(schedule, gate), gate.requires_grad
            rows = counted(rows, self.planned, choice, moved, is_trained=is_trained)
            ends = counts_X.cumsum(0).to(torch.int32)
            return copied_swiglu(rows, ends, gate, up, down, sharing)

        parts = experts(permute_rows(rows, order), here_NX.sum(0), products)
        y_SD = sharing.sum_back(permute_rows(parts, torch.argsort(order)), sizes)
        left = back.start(y_SD)
        yield
        return back.finish(left)
