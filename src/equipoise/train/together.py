"""Documents divided over some of the ranks of a step, which run them at the same time.

Why
    One process group serves all the sets of ranks that share documents: what one *turn* of all
    ranks holds is one attention plan, in which a document's keys pass between its own ranks alone.

What it decides
    Nothing: ``balance.turns`` says what runs when.

Kept true (tests/unit/train/test_together.py, by Hypothesis; tests/multi/test_check.py)
    Nothing passes between ranks that share no document; loss and every gradient equal one rank's.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from equipoise.balance.turns import place_turn
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger
from equipoise.cost.curve import LoadCurve
from equipoise.data.batch import Batch
from equipoise.parallel.context.attention import attend_by_plan
from equipoise.parallel.context.plan import ContextPlan, plan_pieces
from equipoise.spec.model import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run import LayoutSpec
from equipoise.train.context import Share, received_bytes, take
from equipoise.train.shares import ContextPlanner, RankLoads


def plan_turn(packed: PackedStep, turn: int, model: ModelSpec) -> ContextPlan:
    """The attention of one turn of all ranks, in which every document stays on its own ranks.

    Args:
        packed: As ``align_turns`` returns it.
        turn: Which micro-batch of each rank.
        model: Its heads.

    Raises:
        CheckError: a token of a document is on no rank, or on two.
    """
    home, doc_tokens = place_turn(packed, turn)
    return plan_pieces(home, doc_tokens.tolist(), heads=model.heads, kv_heads=model.kv_heads)


@dataclass(frozen=True, slots=True, eq=False)
class Partners:
    """This rank among all, of whom others hold parts of its documents."""

    model: ModelSpec
    rank: int
    ledger: Ledger
    """What it has sent to others and received."""
    kept: dict[tuple[str, int], ContextPlan] = field(default_factory=dict)
    """Plans of the turns of one step, by its digest."""

    @classmethod
    def join(cls, ranks: Ranks, model: ModelSpec) -> "Partners":
        """Find the others; they are all ranks.

        Raises:
            LayoutError: the ranks are not on a CPU.
        """
        if ranks.device.type != "cpu":
            raise LayoutError(
                f"Documents are divided over CPU ranks, and this rank is on {ranks.device}. Set "
                f'pack.policy = "by-work".'
            )
        return cls(model, ranks.rank, Ledger(ranks.world))

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is added to the others': it has tokens of its own."""
        return True

    def turns(self, packed: PackedStep) -> tuple[MicroBatch, ...]:
        """The micro-batches that this rank computes, some of them with others."""
        return packed.ranks[self.rank]

    def share(self, packed: PackedStep, turn: int, batch: Batch) -> Share:
        """A micro-batch of this rank, with attention over all ranks of its documents."""
        plan = self._plan(packed, turn)
        attend = partial(attend_by_plan, plan=plan, ledger=self.ledger)
        positions = plan.shares.positions[self.rank]
        return take(batch, np.arange(len(positions)), positions, attend)

    def holds(self, packed: PackedStep, turn: int) -> tuple[int, int]:
        """Tokens of a micro-batch, and bytes that a layer keeps of what it receives, in fp32."""
        plan = self._plan(packed, turn)
        return packed.ranks[self.rank][turn].tokens, received_bytes(plan, self.model, self.rank)

    def loads(self, packed: PackedStep, curve: LoadCurve) -> RankLoads:
        """Load of each rank, by the pairs of its own queries."""
        return ContextPlanner(self.model, LayoutSpec()).loads(packed, curve)

    def _plan(self, packed: PackedStep, turn: int) -> ContextPlan:
        name = packed.digest
        for other in [key for key in self.kept if key[0] != name]:
            del self.kept[other]
        if (name, turn) not in self.kept:
            self.kept[name, turn] = plan_turn(packed, turn, self.model)
        return self.kept[name, turn]
