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

    With ``sites`` of several parts, 3 to 5 happen part by part: each part has as many of a place's
    rows as the others, or one more, and weights of copies are fetched once for all.

    Policies that plan from earlier loads get those of the last step, summed over all ranks
    (``expert.loads``); the first step of a run has none.

Kept true (tests/multi/parallel/test_balanced.py, tests/multi/parallel/test_overlap.py)
    Loss, every gradient and one step of SGD equal one rank's, in fp32 and fp64, for every policy
    and every kind of workload; reruns are bitwise the same; ranks whose plans differ are refused
    before a byte moves; bytes sent are those of the schedule.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.balance.expert.auto import PolicyChoice, trial_of
from equipoise.balance.expert.policies import (
    AUTO,
    EXPERT_POLICIES,
    choose_experts,
    plan_experts,
)
from equipoise.balance.expert.request import ExpertRequest
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.comm.meet import name_ranks
from equipoise.comm.mesh import Peers
from equipoise.nn.moe.layer import ExchangeSteps, Experts, run_steps
from equipoise.nn.moe.matmul import expert_swiglu
from equipoise.nn.shuffle import permute_rows
from equipoise.parallel.expert.copies import (
    CopyTraffic,
    SharedTraffic,
    WeightTraffic,
    copied_swiglu,
)
from equipoise.parallel.expert.exchange import (
    ExpertExchange,
    sort_arrivals,
    sparse_layers,
)
from equipoise.parallel.expert.parted import run_parts
from equipoise.parallel.expert.planned import PlannedLoads, counted
from equipoise.parallel.overlap.parts import PartedSites, part_rows
from equipoise.parallel.overlap.travel import RowsTravel
from equipoise.schedule.expert.schedule import COUNT_BYTES, ExpertSchedule
from equipoise.spec.run.layout import ExpertsSpec

Widen = Callable[[CopyTraffic, int], WeightTraffic]
"""How copies, and the given number of own experts, become whole where ranks keep parts of them."""

_DIGITS = 15
"""Hexadecimal digits of a digest that fit in int64."""


@dataclass(slots=True, eq=False)
class BalancedExchange:
    """Sends rows to the places of their experts, and their outputs back."""

    base: ExpertExchange
    """The ranks that share experts, and how rows move between them."""
    wish: ExpertsSpec
    seen: Ints | None = None
    """Loads of the last step, int64 [X]."""
    row_cost: float = 0.0
    """As in ``ExpertRequest``."""
    step: int = 0
    """Steps that the run has done; after some it tries a policy under ``auto``."""
    planned: PlannedLoads = field(default_factory=PlannedLoads)
    sites: PartedSites = field(default_factory=lambda: PartedSites(1))
    """In how many parts rows travel, each while the one before is computed."""
    ffn: int = 0
    """Hidden units of a whole expert."""

    def __call__(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> Tensor:
        """Outputs [R, D]; rows are sorted by expert, ``counts_X`` rows each."""
        return run_steps(self.steps(x_RD, counts_X, experts))

    def steps(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> ExchangeSteps:
        """As ``__call__``, in steps."""
        choice = self.plan(self._gather(counts_X).numpy(force=True))
        schedule = choice.schedule
        rows = int(schedule.rows.sum())
        self._agree(schedule.digest, rows, x_RD.device, self.base.peers)
        return (yield from self._obey(choice, x_RD, experts))

    def _obey(
        self, choice: PolicyChoice, x_RD: Tensor, experts: Experts, widen: Widen | None = None
    ) -> ExchangeSteps:
        """Outputs [R, D] by a schedule; ``widen`` where ranks keep parts of experts."""
        schedule, rank = choice.schedule, self.base.peers.rank
        parts = self._choose(schedule, x_RD)
        order = torch.from_numpy(deal_rows(schedule, rank, parts)).to(x_RD.device)
        if parts > 1:
            yield
            y_RD = self._compute_parts(choice, x_RD, order, experts, widen, parts)
            yield
            return permute_rows(y_RD, torch.argsort(order))
        out, back = self._ways(schedule)
        left = out.start(permute_rows(x_RD, order))
        yield
        y_SD = self._compute(choice, out.finish(left), experts, widen)
        left = back.start(y_SD)
        yield
        return permute_rows(back.finish(left), torch.argsort(order))

    def _choose(self, schedule: ExpertSchedule, x_RD: Tensor) -> int:
        """Parts of a schedule's rows, the same on every rank; one where no row travels."""
        sent = schedule.sent
        leaving = (sent - np.diag(sent.diagonal())).sum(axis=1)
        if not leaving.any():
            return 1
        width = x_RD.shape[1]
        moved_bytes = 2.0 * int(leaving.max()) * width * x_RD.element_size()
        flop = 6.0 * int(schedule.computed.max()) * width * self.ffn
        return self.sites.choose(flop=flop, moved_bytes=moved_bytes)

    def _ways(self, schedule: ExpertSchedule) -> tuple[RowsTravel, RowsTravel]:
        """The ways of a schedule's rows to their places, and back."""
        rank, sent = self.base.peers.rank, schedule.sent
        leaving, coming = sent[rank].tolist(), sent[:, rank].tolist()
        return self.base.way(leaving, coming), self.base.way(coming, leaving)

    def take(self) -> list[int]:
        """``PlannedLoads.numbers`` since this was last called, the end of a step."""
        taken, self.planned = self.planned, PlannedLoads()
        return taken.numbers()

    def copied_bytes(self, schedule: ExpertSchedule, gate: Tensor) -> int:
        """Bytes of weights that leave their rank for a schedule, over all ranks of the base.

        Args:
            schedule: Its copies are of whole experts.
            gate: Gates that this rank keeps [X, F, D].
        """
        return schedule.copies * 3 * gate[:1].numel() * gate.element_size()

    def plan(self, rows: Ints) -> PolicyChoice:
        """The schedule of a micro-batch, from every rank's rows for each expert [ranks, X]."""
        wish = self.wish
        request = ExpertRequest(
            rows,
            slots=wish.slots,
            least_rows=wish.least_rows,
            seen=self.seen,
            row_cost=self.row_cost,
        )
        if wish.policy == AUTO:
            return choose_experts(request, trial=trial_of(self.step, list(EXPERT_POLICIES)))
        return PolicyChoice(plan_experts(wish.policy, request), {})

    def _compute(
        self, choice: PolicyChoice, arrived: Tensor, experts: Experts, widen: Widen | None
    ) -> Tensor:
        """Outputs of rows that lie by source and then by expert, in the same order."""
        schedule = choice.schedule
        slots = _Slots.of(schedule, self.base.peers.rank, arrived.device)

        def products(
            rows: Tensor, _counts: Tensor, gate: Tensor, up: Tensor, down: Tensor
        ) -> Tensor:
            moved, is_trained = self.copied_bytes(schedule, gate), gate.requires_grad
            rows = counted(rows, self.planned, choice, moved, is_trained=is_trained)
            traffic = self._traffic(schedule, widen)
            return _multiply(slots, rows, (gate, up, down), traffic, is_wide=widen is not None)

        y = experts(permute_rows(arrived, slots.order), slots.ends_P, products)
        return permute_rows(y, torch.argsort(slots.order))

    def _compute_parts(
        self,
        choice: PolicyChoice,
        x_RD: Tensor,
        order: Tensor,
        experts: Experts,
        widen: Widen | None,
        parts: int,
    ) -> Tensor:
        """Outputs of rows in the order in which they leave, one part of each quota at a time."""
        schedule, rank = choice.schedule, self.base.peers.rank
        each = [
            dataclasses.replace(schedule, quotas=quotas)
            for quotas in part_rows(schedule.quotas, parts)
        ]
        slots = [_Slots.of(part, rank, x_RD.device) for part in each]
        out, back = zip(*map(self._ways, each), strict=True)

        def products(
            rows: Tensor, _counts: Tensor, gate: Tensor, up: Tensor, down: Tensor
        ) -> Tensor:
            moved, is_trained = self.copied_bytes(schedule, gate), gate.requires_grad
            rows = counted(rows, self.planned, choice, moved, is_trained=is_trained)
            # Only here are weights whole, so parts travel inside, and copies once for all.
            traffic, weights = self._traffic(schedule, widen), (gate, up, down)
            shared = None if traffic is None else SharedTraffic(traffic, parts)

            def part(k: int, arrived: Tensor) -> Tensor:
                mine = permute_rows(arrived, slots[k].order)
                y = _multiply(slots[k], mine, weights, shared, is_wide=widen is not None)
                return permute_rows(y, torch.argsort(slots[k].order))

            sizes = [int(part.quotas[rank].sum()) for part in each]
            return run_parts(permute_rows(rows, order).split(sizes), out, back, part)

        y_RD: Tensor = experts(x_RD, slots[0].ends_P, products)
        return y_RD

    def _traffic(self, schedule: ExpertSchedule, widen: Widen | None) -> WeightTraffic | None:
        """How weights come that this rank computes with and does not keep; None if none travel."""
        copies = CopyTraffic.of(schedule, self.base.peers.rank, self.base.move)
        if widen is not None:
            return widen(copies, self.base.experts[self.base.peers.rank])
        return copies if schedule.copies else None

    def _gather(self, counts_X: Tensor) -> Tensor:
        """Every rank's rows for each expert, int64 [ranks, X]."""
        peers, out = self.base.peers, counts_X.new_empty(self.base.peers.count, len(counts_X))
        if peers.count == 1:
            return counts_X[None]
        dist.all_gather_single(out.view(-1), counts_X.contiguous(), group=peers.group)
        self._ledger(COUNT_BYTES * len(counts_X))
        return out

    def _agree(self, named: str, rows: int, device: torch.device, peers: Peers) -> None:
        """Refuse to move by plans that differ.

        Args:
            named: The digest of this rank's plan.
            rows: Of all ranks.
            device: Where messages are sent from.
            peers: Ranks that must have the same.

        Raises:
            LayoutError: on every rank; names those that differ from the first.
        """
        if peers.count == 1:
            return
        mine = torch.tensor([int(named[:_DIGITS], 16)], device=device)
        every = mine.new_empty(peers.count)
        dist.all_gather_single(every, mine, group=peers.group)
        if peers is self.base.peers:
            self._ledger(COUNT_BYTES)
        digests = every.tolist()
        if differing := [rank for rank, each in enumerate(digests) if each != digests[0]]:
            names = name_ranks([peers.ranks[rank] for rank in differing])
            raise LayoutError(
                f"{names[0].upper()}{names[1:]} planned experts otherwise than rank "
                f"{peers.ranks[0]}, from the same counts of {rows} rows. "
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


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Rows that arrive at a rank, in the order of its products: own experts first, then copies."""

    order: Tensor
    """From the order in which rows arrive, by source and then by expert."""
    ends_P: Tensor
    """Where the rows of each product end, int32 [P]; every own expert has one."""
    own: int
    """Own experts."""
    own_rows: int

    @classmethod
    def of(cls, schedule: ExpertSchedule, rank: int, device: torch.device) -> "_Slots":
        """The rows of a schedule, or of one part of its quotas."""
        mine = schedule.places[:, 1] == rank
        quotas, is_copy = schedule.quotas[:, mine], schedule.is_copy[mine]
        local = schedule.places[mine, 0] - int(np.searchsorted(schedule.owners, rank))
        own = int((schedule.owners == rank).sum())
        slot = np.where(is_copy, own + np.cumsum(is_copy) - 1, local)
        totals = quotas.sum(axis=0)
        counts = np.zeros(own + int(is_copy.sum()), dtype=np.int64)
        counts[slot] = totals
        by_expert = torch.from_numpy(np.ascontiguousarray(quotas)).to(device)
        order = sort_arrivals(by_expert, int(totals.sum()))
        # Runs of places in the order of experts, into the order of slots.
        starts = np.cumsum(totals) - totals
        runs = [np.arange(starts[at], starts[at] + totals[at]) for at in np.argsort(slot)]
        into = torch.from_numpy(np.concatenate([*runs, np.zeros(0, np.int64)]).astype(np.int64))
        ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).to(device)
        return cls(order[into.to(device)], ends, own, int(counts[:own].sum()))


def _multiply(
    slots: _Slots,
    rows: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    traffic: WeightTraffic | None,
    *,
    is_wide: bool,
) -> Tensor:
    """Outputs of rows in the order of slots.

    Args:
        slots: Of the rows.
        rows: [R, D].
        weights: Gates, up and down projections that this rank keeps.
        traffic: Brings other weights; None where none travel.
        is_wide: Whether own experts become whole only by the traffic.
    """
    if traffic is None:
        return expert_swiglu(rows, slots.ends_P, *weights)
    if is_wide:
        return copied_swiglu(rows, slots.ends_P, *weights, traffic)
    few, more = rows.split([slots.own_rows, len(rows) - slots.own_rows])
    y_own = expert_swiglu(few, slots.ends_P[: slots.own], *weights)
    ends_copies = slots.ends_P[slots.own :] - slots.own_rows
    return torch.cat((y_own, copied_swiglu(more, ends_copies, *weights, traffic)))


def deal_rows(schedule: ExpertSchedule, rank: int, parts: int = 1) -> Ints:
    """The order in which a rank's rows, sorted by expert, leave: by part, rank, then expert.

    >>> from equipoise.schedule.expert.schedule import schedule_experts
    >>> schedule = schedule_experts([[2, 2], [3, 0]])
    >>> deal_rows(schedule, 0).tolist(), deal_rows(schedule, 0, 2).tolist()
    ([0, 1, 2, 3], [0, 2, 1, 3])
    """
    quotas = schedule.quotas[rank]
    table = part_rows(quotas, parts)
    # Places are ascending by expert, as rows are.
    starts = np.cumsum(quotas) - quotas + np.cumsum(table, axis=0) - table
    by_rank = np.lexsort((schedule.places[:, 0], schedule.places[:, 1])).tolist()
    runs = [
        np.arange(starts[part, at], starts[part, at] + table[part, at])
        for part in range(parts)
        for at in by_rank
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *runs]).astype(np.int64)


def balanced_exchanges(module: nn.Module) -> list[BalancedExchange]:
    """Those of a module's layers that obey schedules, in order."""
    exchanges = [layer.exchange for layer in sparse_layers(module)]
    return [each for each in exchanges if isinstance(each, BalancedExchange)]
