"""The price of a context split: what ``auto`` compares and ``explain`` shows.

Why
    The most even split may send the most keys, and one that sends none may leave ranks waiting.
    Which is faster depends on the links, and on what they carry while ranks compute.

What it decides
    A split's price is the predicted time of its attention schedule on a machine: rounds of tiles
    and messages, replayed forward and backward as the executor runs them (``price_on``). A
    round's messages travel while its tiles are computed; a tile is one kernel call over whole
    blocks. ``auto`` takes the lowest price in whole nanoseconds; ties go to the earlier strategy
    of the registry. A split whose tiles alone take longer than the best price is not replayed.

Kept true (tests/unit/balance/context/test_auto.py)
    The choice has the lowest price that ``equipoise explain`` shows, whatever the lengths, ranks,
    links, nodes and masks; it depends on the arguments alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.balance.context.split import ContextRequest, ContextSplit
from equipoise.balance.tiles import TILE
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import BACKWARD_OVER_FORWARD, LinkPrice
from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.score import (
    AssumedMachine,
    AttentionScore,
    price_on,
    score_attention,
)
from equipoise.schedule.attention.strategies import write_attention
from equipoise.spec.model.presets import ModelSpec

TILE_S = 5e-6
"""Time to start a GPU kernel: a guess, the length of a launch that nothing hides [s]."""

ASSUMED = AssumedMachine(4e14, LinkPrice(1e-5, 5e10), block=TILE, tile_s=TILE_S)
"""The machine assumed by default: H100s with a network port each."""

_BF16 = Wire(128)
"""Heads of Llama 3 8B."""

_HOME_QUERIES = ("all-gather", "needed-kv", "ring", "double-ring")
"""Strategies in which a rank computes all pairs of its own queries."""


@dataclass(frozen=True, slots=True)
class ContextPrice:
    """What a split's price depends on beside the split."""

    machine: AssumedMachine = ASSUMED
    strategy: str = "needed-kv"
    """What moves between ranks: a name in ``schedule.attention.strategies``."""
    heads: int = 32
    """Query heads of a rank; those of Llama 3 8B unless given."""
    kv_heads: int = 8
    wire: Wire = _BF16

    @classmethod
    def on(
        cls, machine: AssumedMachine, model: ModelSpec, *, strategy: str, tensor: int, bits: int
    ) -> "ContextPrice":
        """The price of a model's attention.

        All ranks of ``tensor``, which share the heads, choose by the one with the most; ``bits``
        are those of an element that travels.
        """
        kv_heads = max(1, model.kv_heads // tensor)
        heads = -(-model.heads // (tensor * kv_heads)) * kv_heads
        width = (model.score_width + model.head_width) // 2
        return cls(machine, strategy, heads, kv_heads, Wire(width, bits // 8))

    def write(self, split: ContextSplit, request: ContextRequest) -> AttentionSchedule:
        """The attention schedule of a split."""
        return write_attention(
            self.strategy,
            split.pieces,
            request.doc_tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            mask=request.mask,
            ranks_per_node=request.ranks_per_node,
        )

    def total_ns(self, split: ContextSplit, request: ContextRequest) -> int:
        """Predicted forward and backward of one layer on the slowest rank [ns]."""
        return round(price_on(self.write(split, request), self.wire, self.machine).total_ns)

    def score(
        self, split: ContextSplit, request: ContextRequest, *, name: str | None = None
    ) -> AttentionScore:
        """The same time with everything that ``explain`` shows about it.

        ``name`` is shown instead of the strategy's own.
        """
        schedule = self.write(split, request)
        return score_attention(
            schedule, self.wire, self.machine, sharding=split.strategy, name=name
        )

    def fastest(self, splits: Sequence[ContextSplit], request: ContextRequest) -> ContextSplit:
        """The split with the lowest price; the first of equals."""
        least_ns = [self._least_ns(split, request) for split in splits]
        best_ns, best = math.inf, 0
        for place in sorted(range(len(splits)), key=lambda place: (least_ns[place], place)):
            if least_ns[place] > best_ns:
                break
            best_ns, best = min((best_ns, best), (self.total_ns(splits[place], request), place))
        return splits[best]

    def _least_ns(self, split: ContextSplit, request: ContextRequest) -> int:
        """A lower bound on ``total_ns``: the pairs of the rank with the most."""
        if self.strategy not in _HOME_QUERIES:
            return 0
        is_whole = request.mask.kind == "causal" and self.machine.block == request.tile
        pairs = int((split.tile_pairs if is_whole else split.pairs).max(initial=0))
        flop = 4 * self.wire.head_width * self.heads * pairs
        forward_ns = 1e9 * flop / self.machine.flop_per_s
        # Minus what the replay's sums may lose to rounding.
        return math.floor((1 + BACKWARD_OVER_FORWARD) * forward_ns * (1 - 1e-9))
