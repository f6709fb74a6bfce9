"""Choose what moves when texts are continued over ranks: keys, or queries.

Why
    A long prompt after a short cache has more queries than keys to move; a short one after a long
    cache has far fewer; a token each has hardly any. Which way is faster depends on the number of
    heads, on the links, and on what messages cost the cores that compute. A fixed share of new
    tokens cannot say, so every way is priced.

What it decides
    Each strategy's schedule is replayed (``schedule.attention.price``) with prices that the ranks
    measured when they started. Tiles cost by their pairs, by the keys that they read, and once
    each: a single query's tile reads keys faster than it computes. A message takes the link's
    time, and beside it processor time of both its ends, which no computing hides where ranks have
    one core each. The fastest wins, among equals the one that sends the fewest bytes: ranks may
    share a link that the price takes as each one's own. Then the first of ``VARIANTS``.

Kept true (tests/unit/balance/context/test_variant.py)
    The choice has the lowest price of all; with free links it is pass-KV or pass-Q by the tiles
    alone; it depends on the arguments alone, so all ranks choose alike.

Sources
    Context Parallelism for Scalable Million-Token Inference, arXiv:2411.01783, section 3.5, which
    fits the sign of one expression instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.context.continued import ContinuedPlan, plan_continued
from equipoise.base.arrays import Ints
from equipoise.schedule.attention.count import Wire, tile_pairs
from equipoise.schedule.attention.price import LinkPrice, Links, replay_pass
from equipoise.schedule.attention.schedule import AttentionSchedule, Tiles

VARIANTS = ("ring", "needed-kv", "pass-q", "gather-q")
"""What may move: keys around the ranks or to where they are read, queries likewise."""


@dataclass(frozen=True, slots=True)
class GatheredPrice:
    """What attention costs in one layer where every text has one new token, measured as a whole.

    All rows of a rank are one call and two exchanges, so tiles and messages have no prices here.
    """

    call_s: float = 0.0
    """Once, whatever the sizes."""
    row_s: float = 0.0
    """Each query that a rank computes, of its own texts and of others'."""
    key_s: float = 0.0
    """Each key/value row that these read, in all heads."""

    def seconds(self, cached: Sequence[Sequence[int]], homes: Sequence[Ints]) -> float:
        """Forward pass of one layer, until the last rank ends.

        Args:
            cached: As for ``plan_continued``.
            homes: Of each rank, the texts whose new token it computes.
        """
        keys = np.array(cached, dtype=np.float64)  # [texts, ranks]
        for rank, texts in enumerate(homes):
            keys[texts, rank] += 1
        loads = self.row_s * (keys > 0).sum(axis=0) + self.key_s * keys.sum(axis=0)
        return self.call_s + float(loads.max())


@dataclass(frozen=True, slots=True)
class ContinuedPrice:
    """What attention over ranks costs in one layer, as measured on them."""

    tile_s: float
    """Each tile, whatever its size."""
    pair_s: float
    """Each query-key pair in each query head."""
    key_s: float
    """Each key/value row that a tile reads, in each key/value head."""
    link: LinkPrice
    core_s_per_byte: float = 0.0
    """Processor time of a message at each of its ends."""
    round_s: float = 0.0
    """Each round: posting and awaiting its messages."""
    gathered: GatheredPrice = GatheredPrice()
    """Texts with one new token each, which go another way."""

    def seconds(self, schedule: AttentionSchedule, wire: Wire) -> float:
        """Forward pass of one layer, until the last rank ends."""
        compute_ns = np.zeros((schedule.ranks, max(map(len, schedule.rounds), default=0)))
        for rank, at, each in schedule:
            sizes = sum(wire.forward_bytes(m) for m in (*each.sends, *each.receives))
            is_round = bool(len(each.tiles)) or sizes > 0
            compute_ns[rank, at] = 1e9 * (
                self._tiles_s(schedule, each.tiles)
                + sizes * self.core_s_per_byte
                + is_round * self.round_s
            )
        links = Links(self.link, self.link, (0,) * schedule.ranks)
        return float(replay_pass(schedule, compute_ns, links, wire).ends_ns.max(initial=0)) / 1e9

    def _tiles_s(self, schedule: AttentionSchedule, tiles: Tiles) -> float:
        if not len(tiles):
            return 0.0
        ratio = schedule.heads // schedule.kv_heads
        heads = -(-tiles[:, 7] // ratio) - tiles[:, 6] // ratio
        rows = (tiles[:, 4] - tiles[:, 3]) * heads
        pairs, keys = float(tile_pairs(tiles).sum()), float(rows.sum())
        return len(tiles) * self.tile_s + pairs * self.pair_s + keys * self.key_s


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """What moves, and what each way was priced at."""

    strategy: str
    plan: ContinuedPlan
    priced_s: Mapping[str, float]
    """Forward pass of one layer under each strategy [s]."""


def choose_variant(
    cached: Sequence[Sequence[int]],
    new: Sequence[int],
    price: ContinuedPrice,
    wire: Wire,
    *,
    heads: int,
    kv_heads: int,
    variants: Sequence[str] = VARIANTS,
) -> Variant:
    """Plan the attention of new tokens in the way that the price says is fastest.

    Args:
        cached: As for ``plan_continued``.
        new: Likewise.
        price: The same on every rank.
        wire: Sizes of what travels.
        heads: Query heads.
        kv_heads: Key/value heads.
        variants: What may move.

    Raises:
        LayoutError: as ``plan_continued``.

    >>> price = ContinuedPrice(1e-5, 1e-9, 1e-9, LinkPrice(1e-5, 1e9))
    >>> wire = Wire(64, 4)
    >>> [
    ...     choose_variant([[cached] * 2], [new], price, wire, heads=9, kv_heads=3).strategy
    ...     for cached, new in ((0, 8192), (4096, 64), (4096, 1))
    ... ]
    ['needed-kv', 'pass-q', 'pass-q']
    """
    plans = {
        name: plan_continued(cached, new, name, heads=heads, kv_heads=kv_heads) for name in variants
    }
    priced_s = {name: price.seconds(plan.schedule, wire) for name, plan in plans.items()}
    sent = {name: _sent_bytes(plan.schedule, wire) for name, plan in plans.items()}
    fastest = min(priced_s, key=lambda name: (priced_s[name], sent[name]))
    return Variant(fastest, plans[fastest], priced_s)


def _sent_bytes(schedule: AttentionSchedule, wire: Wire) -> int:
    return sum(wire.forward_bytes(each) for _, _, own in schedule for each in own.sends)
