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
from equipoise.base.arrays import Flags, Ints
from equipoise.base.digest import digest
from equipoise.nn.moe.layer import ExchangeSteps, Experts
from equipoise.nn.shuffle import permute_rows
from equipoise.parallel.expert.balanced import BalancedExchange
from equipoise.parallel.expert.copies import SharedTraffic, copied_swiglu
from equipoise.parallel.expert.exchange import sort_arrivals
from equipoise.parallel.expert.parted import deal_parts, run_parts
from equipoise.parallel.expert.planned import counted
from equipoise.parallel.expert.sharing import Sharing, WholeTraffic
from equipoise.parallel.expert.split import ExpertSplit
from equipoise.parallel.overlap.parts import part_rows
from equipoise.schedule.expert.schedule import ExpertSchedule, schedule_experts

_LAST = 1024
"""Forward passes whose sharings are remembered."""


@dataclass(slots=True, eq=False)
class SwitchedExchange(BalancedExchange):
    """Sends rows to experts, or weights to rows, or some of both."""

    split: ExpertSplit = field(kw_only=True)
    """The ranks that share hidden units."""
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
        owned = schedule_experts(every[self.split.peers.rank])
        choice = PolicyChoice(dataclasses.replace(owned, remakes=True), {})  # of units
        parts = self._choose_shared(sharing, every, x_RD)
        if parts > 1:
            yield
            y_RD = self._share_parts(sharing, choice, every, x_RD, experts, parts)
            yield
            return y_RD
        out, back = self._ways(owned)
        arrival = _ArrivedRows.of(sharing, every, owned.owners == self.base.peers.rank, x_RD.device)
        left = out.start(x_RD)
        yield
        rows = sharing.gather(out.finish(left), arrival.sizes)

        def products(
            rows: Tensor, _counts: Tensor, gate: Tensor, up: Tensor, down: Tensor
        ) -> Tensor:
            rows = self._counted(rows, choice, gate)
            return copied_swiglu(rows, arrival.ends_X, gate, up, down, sharing)

        y = experts(permute_rows(rows, arrival.order), arrival.ends_X, products)
        y_SD = sharing.sum_back(permute_rows(y, torch.argsort(arrival.order)), arrival.sizes)
        left = back.start(y_SD)
        yield
        return back.finish(left)

    def _share_parts(
        self,
        sharing: Sharing,
        choice: PolicyChoice,
        every: Ints,
        x_RD: Tensor,
        experts: Experts,
        parts: int,
    ) -> Tensor:
        """As ``_share``, one part of every rank's rows of each expert at a time."""
        here = choice.schedule.owners == self.base.peers.rank
        tables = part_rows(every, parts)
        owned = [schedule_experts(table[self.split.peers.rank]) for table in tables]
        arrivals = [_ArrivedRows.of(sharing, table, here, x_RD.device) for table in tables]
        out, back = zip(*map(self._ways, owned), strict=True)
        leaving = tables[:, self.split.peers.rank, self.base.peers.rank]
        order = torch.from_numpy(deal_parts(leaving)).to(x_RD.device)

        def products(
            rows: Tensor, _counts: Tensor, gate: Tensor, up: Tensor, down: Tensor
        ) -> Tensor:
            rows, shared = self._counted(rows, choice, gate), SharedTraffic(sharing, parts)

            def part(k: int, arrived: Tensor) -> Tensor:
                mine = arrivals[k]
                rows = permute_rows(sharing.gather(arrived, mine.sizes), mine.order)
                y = copied_swiglu(rows, mine.ends_X, gate, up, down, shared)
                return sharing.sum_back(permute_rows(y, torch.argsort(mine.order)), mine.sizes)

            split = permute_rows(rows, order).split(leaving.sum(axis=1).tolist())
            return run_parts(split, out, back, part)

        y_RD = experts(x_RD, arrivals[0].ends_X, products)
        return permute_rows(y_RD, torch.argsort(order))

    def _choose_shared(self, sharing: Sharing, every: Ints, x_RD: Tensor) -> int:
        """Parts, for the rank that computes the most, the same on every rank."""
        owned = [schedule_experts(rows) for rows in every]
        leaving = max(int((each.sent.sum(1) - each.sent.diagonal()).max()) for each in owned)
        if not leaving:
            return 1
        width, r = x_RD.shape[1], sharing.r
        computed = np.stack([each.computed for each in owned])
        rows = int(computed.reshape(-1, r, computed.shape[1]).sum(axis=1).max())
        flop = 6.0 * rows * width * self.ffn / r
        return self.sites.choose(flop=flop, moved_bytes=2.0 * leaving * width * x_RD.element_size())

    def _counted(self, rows: Tensor, choice: PolicyChoice, gate: Tensor) -> Tensor:
        moved, is_trained = self.copied_bytes(choice.schedule, gate), gate.requires_grad
        return counted(rows, self.planned, choice, moved, is_trained=is_trained)


@dataclass(frozen=True, slots=True, eq=False)
class _ArrivedRows:
    """Rows of a run of ranks at one of them."""

    sizes: list[int]
    """Rows of each member of the run."""
    order: Tensor
    """By expert, from the order by member, source and expert."""
    ends_X: Tensor
    """Where the rows of each expert here end, int32."""

    @classmethod
    def of(cls, sharing: Sharing, every: Ints, here: Flags, device: torch.device) -> "_ArrivedRows":
        """Rows for the experts here, of each rank's rows for each expert, int64 [etp, ep, X]."""
        table = every[sharing.members.start : sharing.members.stop, :, here]
        sizes = table.sum(axis=(1, 2)).tolist()
        here_NX = torch.from_numpy(np.ascontiguousarray(table.reshape(-1, table.shape[2])))
        here_NX = here_NX.to(device)
        order = sort_arrivals(here_NX, sum(sizes))
        return cls(sizes, order, here_NX.sum(0).cumsum(0).to(torch.int32))
