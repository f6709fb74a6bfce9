"""Documents divided over some of the ranks of a step, which run them at the same time.

Why
    Under ``divided``, ``gangs``, ``flexsp`` and ``bytescale`` each long document has ranks of its
    own, and these differ from document to document. One process group serves all of them: what
    one *turn* of all ranks holds is one attention plan, in which a document's keys pass between
    its own ranks alone.

    ::

        rank 0   [ A, first half  ] [ C ]            A on ranks 0 and 1, D on ranks 1 and 2
        rank 1   [ A, second half ] [ D, first half  ]
        rank 2   [ B              ] [ D, second half ]
                   turn 0             turn 1

What it decides
    In which turn each micro-batch runs: as early as its rank and its partners are free. A rank
    with nothing to do in a turn has a micro-batch of no tokens there, so that all ranks have the
    same number of them, and of the collectives that ZeRO 2 and 3 put into each.

Kept true (tests/unit/train/test_together.py, by Hypothesis; tests/multi/test_check.py)
    Each rank runs its micro-batches in the packer's order; all parts of a document have one turn;
    loss and every gradient equal one rank's.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger
from equipoise.cost.curve import LoadCurve
from equipoise.data.batch import Batch
from equipoise.parallel.context.attention import attend_by_plan
from equipoise.parallel.context.plan import ContextPlan, plan_pieces
from equipoise.schedule.attention_count import Ints
from equipoise.spec.model import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run import LayoutSpec, Policy
from equipoise.train.context import Share, received_bytes, take
from equipoise.train.shares import ContextPlanner, RankLoads

TOGETHER: tuple[Policy, ...] = ("divided", "gangs", "flexsp", "bytescale")
"""Policies whose documents lie on several ranks that run them at the same time."""

_Place = tuple[int, int]
"""A micro-batch: rank, and number among those of the rank."""


def align_turns(packed: PackedStep) -> PackedStep:
    """Give all parts of a document one turn, and all ranks the same number of turns.

    Args:
        packed: Micro-batches of each rank, in its order.

    Returns:
        The same with empty micro-batches where ranks have nothing to do; pieces are in order of
        document and start.

    Raises:
        LayoutError: a document has parts in two micro-batches of one rank, or ranks would wait
            for each other in a circle.

    Cost: O(pieces log pieces + ranks x micro-batches).

    >>> half, other = (MicroBatch(np.array([[7, *run]]), np.array([0])) for run in ((0, 5), (5, 9)))
    >>> short = MicroBatch(np.array([[8, 0, 3]]))
    >>> aligned = align_turns(PackedStep("gangs", ((short, half), (other,))))
    >>> [[batch.tokens for batch in rank] for rank in aligned.ranks]
    [[3, 5], [0, 4]]
    """
    partners = _partners(packed)
    heads, free = [0] * len(packed.ranks), [0] * len(packed.ranks)
    turn_of: dict[_Place, int] = {}
    waiting = sum(map(len, packed.ranks))
    while waiting:
        before = waiting
        for rank, batches in enumerate(packed.ranks):
            while heads[rank] < len(batches):
                together = partners[rank, heads[rank]]
                if any(heads[other] != number for other, number in together):
                    break
                turn = max(free[other] for other, _ in together)
                for other, number in together:
                    turn_of[other, number] = turn
                    heads[other], free[other] = number + 1, turn + 1
                waiting -= len(together)
        if waiting == before:
            stuck = [
                rank for rank, batches in enumerate(packed.ranks) if heads[rank] < len(batches)
            ]
            raise LayoutError(
                f"Ranks {stuck} wait for parts of documents in later micro-batches of each other, "
                f"{waiting} of them. Put all parts of a document into micro-batches that their "
                f"ranks can run at the same time."
            )
    rows = [[_NOTHING] * max(free) for _ in packed.ranks]
    for (rank, number), turn in turn_of.items():
        rows[rank][turn] = _in_order(packed.ranks[rank][number])
    return PackedStep(packed.policy, tuple(map(tuple, rows)))


_NOTHING = MicroBatch(np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.int64))


def _begins(batch: MicroBatch) -> Ints:
    """First token of the document, or of its cut, that each piece belongs to."""
    begins: Ints = batch.pieces[:, 1] - batch.history_tokens
    return begins


def _in_order(batch: MicroBatch) -> MicroBatch:
    order = np.lexsort((batch.pieces[:, 1], batch.pieces[:, 0]))
    return MicroBatch(batch.pieces[order], _begins(batch)[order])


def _partners(packed: PackedStep) -> dict[_Place, set[_Place]]:
    """Of each micro-batch those that run with it, itself among them."""
    found: dict[_Place, set[_Place]] = {}
    of_document: dict[tuple[int, int], _Place] = {}
    for rank, batches in enumerate(packed.ranks):
        for number, batch in enumerate(batches):
            here = (rank, number)
            found[here] = {here}
            keys = zip(batch.pieces[:, 0].tolist(), _begins(batch).tolist(), strict=True)
            for key in keys:
                together = found[of_document.setdefault(key, here)]
                if here not in together:
                    together |= found[here]
                    for each in together:
                        found[each] = together
    return found


def plan_turn(packed: PackedStep, turn: int, model: ModelSpec) -> ContextPlan:
    """The attention of one turn of all ranks, in which every document stays on its own ranks.

    Args:
        packed: As ``align_turns`` returns it.
        turn: Which micro-batch of each rank.
        model: Its heads.

    Raises:
        CheckError: a token of a document is on no rank, or on two.
    """
    batches = [rank[turn] for rank in packed.ranks]
    keys = np.concatenate([np.stack((b.pieces[:, 0], _begins(b)), axis=1) for b in batches])
    names, which = np.unique(keys, axis=0, return_inverse=True)
    bounds = np.cumsum([0, *(len(batch.pieces) for batch in batches)])
    doc_tokens = np.zeros(len(names), dtype=np.int64)
    home = []
    for rank, batch in enumerate(batches):
        document = which.reshape(-1)[bounds[rank] : bounds[rank + 1]]
        runs = batch.pieces[:, 1:] - _begins(batch)[:, None]
        np.maximum.at(doc_tokens, document, runs[:, 1])
        home.append(np.column_stack((document, runs)))
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
