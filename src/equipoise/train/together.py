"""Documents divided over some of the ranks of a step, which run them at the same time.

Why
    One process group serves all the sets of ranks that share documents: what one *turn* of all
    ranks holds is one attention plan, in which a document's keys pass between its own ranks alone.
    Where ``layout.tp`` ranks share weights, each exchanges the keys of its own heads with the
    ranks of other data-parallel ranks that have the same heads.

What it decides
    Nothing: ``balance.packing.turns`` says what runs when.

Kept true (tests/unit/train/test_together.py, by Hypothesis; tests/multi/check/test_check.py)
    Nothing passes between ranks that share no document; loss and every gradient equal one rank's.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from equipoise.balance.context.plan import ContextPlan, plan_pieces
from equipoise.balance.packing.turns import place_turn
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import Mesh
from equipoise.cost.curve import LoadCurve
from equipoise.data.batch import Batch
from equipoise.nn.attention import Attend
from equipoise.parallel.context.attention import attend_by_plan
from equipoise.sim.rank_loads import ContextPlanner, RankLoads
from equipoise.spec.mask import CAUSAL, Mask
from equipoise.spec.model.heads import share_heads
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.train.context import AttendPlanned, Share, attend_alone, received_bytes, take


def plan_turn(
    packed: PackedStep, turn: int, model: ModelSpec, *, tensor: int = 1, tensor_rank: int = 0
) -> ContextPlan:
    """The attention of one turn of all ranks, in which every document stays on its own ranks.

    Args:
        packed: As ``align_turns`` returns it.
        turn: Which micro-batch of each rank.
        model: Its heads.
        tensor: Ranks that share the weights of each data-parallel rank.
        tensor_rank: Whose heads, of those.

    Raises:
        CheckError: a token of a document is on no rank, or on two.
    """
    heads = share_heads(model.heads, model.kv_heads, ranks=tensor, rank=tensor_rank)
    return _plan_as(packed, turn, len(heads.heads), len(heads.kv_heads), CAUSAL)


def _plan_as(packed: PackedStep, turn: int, heads: int, kv_heads: int, mask: Mask) -> ContextPlan:
    home, doc_tokens = place_turn(packed, turn)
    return plan_pieces(home, doc_tokens.tolist(), heads=heads, kv_heads=kv_heads, mask=mask)


@dataclass(frozen=True, slots=True, eq=False)
class Partners:
    """This rank, and the others that hold parts of its documents."""

    planner: ContextPlanner
    rank: int
    """Its data-parallel rank: whose micro-batches of a ``PackedStep`` it computes."""
    ledger: Ledger
    """Bytes sent to other data-parallel ranks and received."""
    mesh: Mesh | None = None
    """The groups of the layout, where ranks share weights or messages have no tags."""
    kept: dict[tuple[str, int, int, int, Mask], ContextPlan] = field(default_factory=dict)
    """Plans of the turns of one step, by its digest, their heads and mask."""

    @classmethod
    def join(cls, ranks: Ranks, planner: ContextPlanner) -> "Partners":
        """Find the others: all data-parallel ranks. Every rank calls it."""
        if planner.layout.tp == 1 and ranks.has_tags:
            return cls(planner, ranks.rank, Ledger(ranks.world))
        return cls.on_mesh(planner, Mesh.join(ranks, planner.layout.of_ranks(ranks.world)))

    @classmethod
    def on_mesh(cls, planner: ContextPlanner, mesh: Mesh) -> "Partners":
        """Among the data-parallel ranks of groups that exist already."""
        peers = mesh.peers("dp")
        return cls(planner, peers.rank, Ledger(peers.count), mesh)

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is added to the others': of ranks that share weights one is."""
        return self.tensor_rank == 0

    @property
    def tensor_rank(self) -> int:
        """This rank's number among those that share its weights."""
        return 0 if self.mesh is None else self.mesh.coordinates["tp"]

    def turns(self, packed: PackedStep) -> tuple[MicroBatch, ...]:
        """The micro-batches that this rank computes, some of them with others."""
        return packed.ranks[self.rank]

    def share(self, packed: PackedStep, turn: int, batch: Batch) -> Share:
        """A micro-batch of this rank, with attention over all ranks of its documents."""
        plan = self._plan(packed, turn)
        positions = plan.shares.positions[self.rank]
        peers = None if self.mesh is None else self.mesh.peers("dp")
        scored = AttendPlanned(
            partial(self._plan_for, packed, turn),
            None if peers is None else peers.group,
            None if peers is None else peers.links,
            self.ledger,
            is_alone=plan.schedule.ranks == 1,
        )
        longest = int(plan.schedule.doc_tokens.max(initial=0))
        rows = np.arange(len(positions))
        attend = self._attend(plan, batch.tokens_T.device)
        return take(batch, rows, positions, attend, scored, longest)

    def holds(self, packed: PackedStep, turn: int) -> tuple[int, int]:
        """Tokens of a micro-batch, and bytes that a layer keeps of what it receives, in fp32."""
        plan = self._plan(packed, turn)
        return packed.ranks[self.rank][turn].tokens, received_bytes(
            plan, self.planner.model, self.rank
        )

    def loads(self, packed: PackedStep, curve: LoadCurve) -> RankLoads:
        """Load of each rank of the world, by the pairs of its own queries."""
        return self.planner.loads(packed, curve)

    def _attend(self, plan: ContextPlan, device: torch.device) -> Attend:
        if plan.schedule.ranks == 1:  # a group of one rank does not exist, and None is all ranks
            return attend_alone(plan, device)
        attend = partial(attend_by_plan, plan=plan, ledger=self.ledger)
        if self.mesh is None:
            return attend
        peers = self.mesh.peers("dp")
        return partial(attend, group=peers.group, links=peers.links)

    def _plan(self, packed: PackedStep, turn: int) -> ContextPlan:
        model, layout = self.planner.model, self.planner.layout
        share = share_heads(model.heads, model.kv_heads, ranks=layout.tp, rank=self.tensor_rank)
        return self._plan_for(packed, turn, len(share.heads), len(share.kv_heads), CAUSAL)

    def _plan_for(
        self, packed: PackedStep, turn: int, heads: int, kv_heads: int, mask: Mask
    ) -> ContextPlan:
        name = packed.digest
        for other in [key for key in self.kept if key[0] != name]:
            del self.kept[other]
        key = name, turn, heads, kv_heads, mask
        if key not in self.kept:
            self.kept[key] = _plan_as(packed, turn, heads, kv_heads, mask)
        return self.kept[key]
