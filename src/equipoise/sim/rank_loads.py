"""Context parallelism of a packed step: each micro-batch's plan, each rank's load.

Why
    A packer gives micro-batches to data-parallel ranks. Where ``layout.cp`` ranks share
    each micro-batch, a rank's time is that of its tokens and of the attention that it computes,
    which its strategy decides: under ``needed-kv`` that of its own queries, under ``pass-q`` that
    of its own keys, under ``ulysses`` that of its heads.

    ::

        rank             0        1        2        3          dp = 2, cp = 2
        micro-batches    data rank 0's     data rank 1's
        tokens of each   first    second   first    second     share

    Where ``layout.tp`` ranks share weights, each has an even part of that; where
    ``layout.pp`` ranks share layers, ``sim.stages`` says which part.

What it decides
    Every rank plans every micro-batch of the step from the pack alone, so that all know the
    longest rank before the step. A tile is priced as a document of as many pairs.

Kept true (tests/unit/sim/test_rank_loads.py)
    Tokens, pairs and FLOP of all ranks add up to those of the pack; a context of one rank is
    priced as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.context.plan import ContextPlan, plan_context
from equipoise.balance.context.price import ContextPrice
from equipoise.balance.packing.pack import rank_seconds, turns_seconds
from equipoise.balance.stage import LayerPrices, price_layers
from equipoise.base.arrays import Ints
from equipoise.cost.curve import LoadCurve
from equipoise.cost.work import causal_pairs, useful_flop
from equipoise.schedule.attention.count import tile_pairs
from equipoise.schedule.attention.price import BACKWARD_OVER_FORWARD
from equipoise.sim.planned import end_of_step_s
from equipoise.spec.layout import rows_of
from equipoise.spec.mask import CAUSAL, Mask
from equipoise.spec.model.heads import share_heads
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import LayoutSpec


def batch_flop(batch: MicroBatch, model: ModelSpec) -> int:
    """Useful FLOP of a micro-batch's pieces, what they read in others included."""
    before = batch.history_tokens
    pairs = causal_pairs(before + batch.doc_tokens) - causal_pairs(before)
    return useful_flop(model, batch.tokens, int(pairs.sum()))


_NO_TILES = np.zeros((0, 8), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RankLoads:
    """Load of each rank of the world in one step."""

    predicted_s: list[float]
    """Forward and backward, without waiting [s]."""
    tokens: list[int]
    pieces: list[int]
    flop: list[int]
    """Useful FLOP."""
    pipeline_s: float = 0.0
    """The longest pipeline from its first forward to its last backward, bubbles included [s]."""
    kept_layer_tokens: tuple[int, ...] = ()
    """The most tokens times layers whose activations each rank of a pipeline keeps at a time."""
    turns_s: float = 0.0
    """The slowest rank of each turn, added up; in a pipeline the mean stage's part of it [s]."""
    meets_each_turn: bool = False
    """Whether data-parallel ranks wait for each other in every micro-batch."""

    @property
    def longest_s(self) -> float:
        """When the last rank has computed [s]."""
        if self.meets_each_turn and not self.pipeline_s:
            return max(self.turns_s, *self.predicted_s)
        return max(self.pipeline_s, *self.predicted_s)

    def step_s(self, host_s: float) -> float:
        """The forecast of the step that the journal keeps [s].

        Args:
            host_s: What a step takes beside computing: messages that nothing hides, the host.
        """
        return end_of_step_s(self.longest_s, host_s=host_s)

    @property
    def turn_skew(self) -> float:
        """The slowest rank of each turn, added up, over the mean rank [ratio].

        >>> RankLoads([2.0, 2.0], [5, 5], [3, 3], [9, 9], turns_s=3.0).turn_skew
        1.5
        """
        mean = sum(self.predicted_s) / len(self.predicted_s)
        return self.turns_s / mean if mean else 1.0

    def divided(self, ranks: int) -> "RankLoads":
        """The loads with ``ranks`` ranks in place of each, which share its weights and its work.

        >>> RankLoads([2.0], [5], [3], [9]).divided(2)
        RankLoads(predicted_s=[1.0, 1.0], tokens=[2, 3], pieces=[3, 3], flop=[4, 5])
        """
        if ranks == 1:
            return self

        def divide(numbers: list[int]) -> list[int]:
            own = range(ranks)
            return [len(rows_of(n, ranks=ranks, rank=rank)) for n in numbers for rank in own]

        return RankLoads(
            [load_s / ranks for load_s in self.predicted_s for _ in range(ranks)],
            divide(self.tokens),
            [pieces for pieces in self.pieces for _ in range(ranks)],
            divide(self.flop),
            self.pipeline_s,
            tuple(kept for kept in self.kept_layer_tokens for _ in range(ranks)),
            self.turns_s / ranks,
            self.meets_each_turn,
        )


@dataclass(frozen=True, slots=True)
class ContextPlanner:
    """Plans the micro-batches of one model in one layout; the same on every rank."""

    model: ModelSpec
    layout: LayoutSpec
    price: ContextPrice | None = None
    """The price by which ``layout.sharding = "auto"`` chooses."""

    @property
    def context(self) -> int:
        """Ranks that share each micro-batch."""
        return self.layout.cp

    def plan(self, doc_tokens: Sequence[int], *, tensor_rank: int = 0) -> ContextPlan:
        """Who holds which tokens of a micro-batch, and what moves between them.

        Args:
            doc_tokens: Length of each document [tokens].
            tensor_rank: Whose heads, of the ranks that share weights.
        """
        heads = share_heads(
            self.model.heads, self.model.kv_heads, ranks=self.layout.tp, rank=tensor_rank
        )
        return self.plan_as(doc_tokens, len(heads.heads), len(heads.kv_heads))

    def plan_as(
        self, doc_tokens: Sequence[int], heads: int, kv_heads: int, mask: Mask = CAUSAL
    ) -> ContextPlan:
        """The plan for other heads or another mask; the same tokens lie on the same ranks.

        Args:
            doc_tokens: Length of each document [tokens].
            heads: Query heads.
            kv_heads: Key/value heads.
            mask: Which keys of its document a query reads.
        """
        return plan_context(
            doc_tokens,
            self.context,
            self.layout.strategy,
            heads=heads,
            kv_heads=kv_heads,
            mask=mask,
            sharding=self.layout.sharding,
            ranks_per_node=self.layout.ranks_per_node or self.context,
            price=self.price,
        )

    def loads(self, packed: PackedStep, curve: LoadCurve) -> RankLoads:
        """Load of each rank of the world.

        Args:
            packed: Micro-batches of each data-parallel rank.
            curve: Price of a document.

        Cost: a plan for each micro-batch, milliseconds each; those that are not kept are made
            again when the micro-batch runs.
        """
        return self.context_loads(packed, curve).divided(self.layout.tp)

    def layer_prices(self, turns: Sequence[MicroBatch], curve: LoadCurve) -> LayerPrices:
        """What a layer and the head take of each micro-batch, on the slowest rank that shares it.

        Args:
            turns: Micro-batches of one data-parallel rank.
            curve: Price of a document.
        """
        whole = price_layers(curve, self.model, turns)
        attention, tokens = whole.attention_ns, whole.tokens
        if self.context > 1:
            loads = [self._batch_loads(batch, curve) for batch in turns]
            backward_too = (1 + BACKWARD_OVER_FORWARD) * self.model.layers
            attention = np.array([load[0].max() for load in loads]) / backward_too
            tokens = np.array([load[1].max() for load in loads], dtype=np.int64)
        share = tokens / np.maximum(whole.tokens, 1) / self.layout.tp
        return LayerPrices(
            whole.linear_ns * share,
            attention / self.layout.tp,
            whole.head_ns * share,
            tokens,
        )

    def context_loads(self, packed: PackedStep, curve: LoadCurve) -> RankLoads:
        """Load of each context rank, as if it held all weights."""
        ranks = len(packed.ranks) * self.layout.sharing
        meets = self.layout.of_ranks(ranks).meets_each_turn
        if self.context == 1:
            return RankLoads(
                rank_seconds(packed, curve),
                packed.rank_tokens,
                [sum(len(batch.pieces) for batch in rank) for rank in packed.ranks],
                [sum(batch_flop(batch, self.model) for batch in rank) for rank in packed.ranks],
                turns_s=turns_seconds(packed, curve),
                meets_each_turn=meets,
            )
        rows, slowest_ns = [], np.zeros(packed.micro_batches)
        for turns in packed.ranks:
            columns = np.zeros((4, self.context))
            for turn, batch in enumerate(turns):
                loads = self._batch_loads(batch, curve)
                # Of labels too, each rank is taken to have its share by tokens.
                saved_ns = float(curve.saved_ns(batch.pieces).sum()) / max(1, batch.tokens)
                loads[0] += curve.fixed_ns + (curve.ns_per_token - saved_ns) * loads[1]
                slowest_ns[turn] = max(slowest_ns[turn], loads[0].max())
                columns += loads
            rows += columns.T.tolist()
        predicted_ns, tokens, pieces, flop = zip(*rows, strict=True)
        return RankLoads(
            [ns * 1e-9 for ns in predicted_ns],
            list(map(int, tokens)),
            list(map(int, pieces)),
            list(map(int, flop)),
            turns_s=float(slowest_ns.sum()) * 1e-9,
            meets_each_turn=meets,
        )

    def _batch_loads(self, batch: MicroBatch, curve: LoadCurve) -> np.ndarray[tuple[int, int]]:
        """Attention [ns], tokens, pieces and FLOP of each rank of one context, [4, ranks]."""
        plan = self.plan(batch.doc_tokens.tolist())
        rows = []
        for home, rounds in zip(plan.schedule.home, plan.schedule.rounds, strict=True):
            tokens = int((home[:, 2] - home[:, 1]).sum())
            tiles = np.concatenate([_NO_TILES, *(each.tiles for each in rounds)])
            heads = tiles[:, 7] - tiles[:, 6]
            of_all_heads = tile_pairs(tiles)
            share = heads * self.layout.tp / self.model.heads
            attention_ns = curve.attention_ns(of_all_heads // heads) * share
            flop = self._flop(tokens, of_all_heads)
            rows.append((float(attention_ns.sum()), tokens, len(home), flop))
        return np.array(rows).T

    def _flop(self, tokens: int, of_all_heads: Ints) -> int:
        linear = useful_flop(self.model, tokens, 0)
        attention = useful_flop(self.model, 0, int(of_all_heads.sum()) * self.layout.tp)
        return linear + attention // self.model.heads
