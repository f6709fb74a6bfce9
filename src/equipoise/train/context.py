"""The ranks that share each micro-batch: a rank's tokens, labels and positions of it.

What it decides
    Ranks that share weights are neighbours, and so are those that share tokens, so that they lie
    on one node where they fit. Tokens, labels and positions are taken by the same rows; attention
    runs over all rows. Ranks that share weights have the same rows, and each its own heads.

Kept true (tests/multi/check/test_check.py, tests/multi/train/test_train.py)
    Loss, logits and every gradient equal one rank's, also where a rank has no token or no label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.balance.context.plan import ContextPlan
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger, LinkGroups
from equipoise.comm.mesh import Mesh
from equipoise.cost.curve import LoadCurve
from equipoise.data.batch import Batch
from equipoise.nn.attention import Attend, PackAttention, Scoring
from equipoise.nn.device.send import send
from equipoise.parallel.context.attention import attend_by_plan, attend_in_one_process
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.modality.readers import embedding_places
from equipoise.sim.rank_loads import ContextPlanner, RankLoads
from equipoise.sim.stages import StagePlanner
from equipoise.spec.mask import Mask
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's share of a micro-batch, as the decoder takes it."""

    tokens_t: Tensor
    labels_t: Tensor
    pack: tuple[int, ...] | PackAttention
    rows: Tensor | slice
    """Which rows of the micro-batch these are."""


def whole(batch: Batch) -> Share:
    """All of a micro-batch, for a rank that computes it alone."""
    return Share(batch.tokens_T, batch.labels_T, batch.doc_tokens, slice(None))


class AttendPlanned:
    """Attention over ranks, by a plan for each kind of layer that a model has.

    Not a dataclass: ``fully_shard`` would copy it, and what it counts with it, on the way into a
    model of mixed precision.
    """

    def __init__(
        self,
        plan_for: Callable[[int, int, Mask], ContextPlan],
        group: dist.ProcessGroup | None,
        links: LinkGroups | None,
        ledger: Ledger,
        *,
        is_alone: bool = False,
    ) -> None:
        """Attend by the plan of ``plan_for`` for query heads, key/value heads and a mask.

        Args:
            plan_for: Makes or finds the plan.
            group: The ranks.
            links: Theirs, where messages have no tags.
            ledger: Counts messages.
            is_alone: Whether all ranks of the plan are this one.
        """
        self.plan_for, self.group, self.links = plan_for, group, links
        self.ledger, self.is_alone = ledger, is_alone

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """One layer's attention."""
        plan = self.plan_for(q.shape[1], k.shape[1], scoring.mask)
        options: dict[str, Any] = {"softcap": scoring.softcap, "sinks_H": scoring.sinks_H}
        if self.is_alone:
            return attend_alone(plan, q.device, **options)(q, k, v)
        options |= {"ledger": self.ledger, "links": self.links}
        return attend_by_plan(q, k, v, plan, self.group, **options)


def take(
    batch: Batch,
    rows: Ints,
    positions: Ints,
    attend: Attend,
    attend_scored: AttendPlanned,
    longest_tokens: int,
) -> Share:
    """Some rows of a micro-batch, which stand at these positions and attend so."""
    device = batch.tokens_T.device
    taken, places = (send(torch.from_numpy(each), device) for each in (rows, positions))
    pack = PackAttention(places, attend, attend_scored, longest_tokens)
    return Share(batch.tokens_T[taken], batch.labels_T[taken], pack, taken)


@dataclass(frozen=True, slots=True, eq=False)
class ContextGroup:
    """This rank among those that share its micro-batches."""

    planner: ContextPlanner
    data_rank: int
    """The data-parallel rank whose micro-batches it computes with the others."""
    rank: int
    """Its number among them."""
    mesh: Mesh
    ledger: Ledger
    """Bytes sent to them and received."""
    stages: StagePlanner | None = None
    """Stages of the pipeline, if there is one."""

    @classmethod
    def join(
        cls, ranks: Ranks, planner: ContextPlanner, stages: StagePlanner | None = None
    ) -> "ContextGroup":
        """Find the ranks that share with this one; every rank calls it.

        Raises:
            LayoutError: cp does not divide the ranks.
        """
        context = planner.context
        require_context(context, ranks)
        mesh = Mesh.join(ranks, planner.layout.of_ranks(ranks.world))
        place = mesh.coordinates
        return cls(planner, place["dp"], place["cp"], mesh, Ledger(context), stages)

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is added to the others': of ranks that share weights one is."""
        return self.mesh.coordinates["tp"] == 0

    def turns(self, packed: PackedStep) -> tuple[MicroBatch, ...]:
        """The micro-batches that this rank computes with the others."""
        return packed.ranks[self.data_rank]

    def share(self, packed: PackedStep, turn: int, batch: Batch) -> Share:
        """This rank's part of a micro-batch; which one it is makes no difference."""
        del packed, turn
        if self.planner.context == 1:
            return whole(batch)
        plan = self._plan(batch.doc_tokens)
        peers, ledger = self.mesh.peers("cp"), self.ledger
        group, links = peers.group, peers.links
        attend = partial(attend_by_plan, plan=plan, group=group, ledger=ledger, links=links)
        plan_for = partial(self.planner.plan_as, batch.doc_tokens)
        scored = AttendPlanned(plan_for, group, links, ledger)
        rows, positions = plan.shares.rows[self.rank], plan.shares.positions[self.rank]
        return take(batch, rows, positions, attend, scored, max(batch.doc_tokens, default=0))

    def places(self, packed: PackedStep, data_rank: int, turn: int) -> tuple[Ints, Ints]:
        """Who embeds each token of any rank's micro-batch.

        Returns:
            The rank of the world, and which row of its own that is, int64 [tokens] each.
        """
        micro_batch = packed.ranks[data_rank][turn]
        shares: Sequence[Ints] = [np.arange(micro_batch.tokens)]
        if self.planner.context > 1:
            shares = self._plan(micro_batch.doc_tokens.tolist()).shares.rows
        stage = 0 if self.stages is None else int(self.stages.rank_of[0])
        return embedding_places(self.mesh.layout, data_rank, shares, stage_rank=stage)

    def holds(self, packed: PackedStep, turn: int) -> tuple[int, int]:
        """Tokens of its share, and bytes that a layer keeps of what it receives, in fp32."""
        micro_batch = self.turns(packed)[turn]
        if self.planner.context == 1:
            return micro_batch.tokens, 0
        plan = self._plan(micro_batch.doc_tokens.tolist())
        received = received_bytes(plan, self.planner.model, self.rank)
        return len(plan.shares.rows[self.rank]), received

    def loads(self, packed: PackedStep, curve: LoadCurve) -> RankLoads:
        """Load of each rank of the world."""
        return (
            self.planner.loads(packed, curve) if self.stages is None else self.stages.loads(packed)
        )

    def _plan(self, doc_tokens: Sequence[int]) -> ContextPlan:
        """Attention of this rank's heads over a micro-batch."""
        return self.planner.plan(doc_tokens, tensor_rank=self.mesh.coordinates["tp"])


def received_bytes(plan: ContextPlan, model: ModelSpec, rank: int) -> int:
    """What a layer keeps of other ranks' tokens for its backward pass, in fp32 [bytes]."""
    wire = Wire(model.head_width, element_bytes=4)
    return int(count_attention(plan.schedule, wire).kept_bytes[rank])


def require_context(context: int, ranks: Ranks) -> None:
    """Refuse what ranks cannot share.

    Raises:
        LayoutError: cp does not divide the ranks.
    """
    if ranks.world % context:
        raise LayoutError(
            f"layout.cp = {context} does not divide {ranks.world} ranks. Set layout.cp "
            f"to a divisor of {ranks.world}."
        )


def attend_alone(
    plan: ContextPlan, device: torch.device, *, softcap: float = 0.0, sinks_H: Tensor | None = None
) -> Attend:
    """Attention of all ranks of a plan on this device; rows are in the order of their ranks."""
    rows = torch.from_numpy(np.concatenate(plan.shares.rows))
    order, back = send(rows, device), send(torch.argsort(rows), device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend_in_one_process(
            q[back], k[back], v[back], plan, softcap=softcap, sinks_H=sinks_H
        )
        return out[order]

    return attend
