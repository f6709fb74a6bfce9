"""Which way to move things between ranks, iteration by iteration, without planning every way.

What it decides
    Iterations of about the same sizes go the same way: sizes are rounded to quarters of powers of
    two, and all ways are priced only for sizes that did not come yet.

    Single tokens of any number of texts go by ``GATHERED``, beside longer chunks as well: all tiles
    of a rank are one call then (``gathered``), which has a price of its own.
"""

import math
from collections.abc import Sequence

from equipoise.balance.context.variant import VARIANTS, ContinuedPrice, choose_variant
from equipoise.schedule.attention.count import Wire
from equipoise.spec.model.presets import ModelSpec

GATHERED = "gather-q"
"""Queries go to every rank that has keys for them, and partial outputs come back."""

_MOST = 4096
"""Sizes that are remembered."""


class VariantChoice:
    """Chooses by price, and remembers."""

    def __init__(
        self,
        model: ModelSpec,
        price: ContinuedPrice,
        wire: Wire,
        variants: Sequence[str] = VARIANTS,
    ) -> None:
        self.price, self.wire = price, wire
        self._model, self._variants = model, variants
        self._chosen: dict[tuple[int, ...], str] = {}

    @property
    def gathers(self) -> bool:
        """Whether single tokens go by ``GATHERED``."""
        return GATHERED in self._variants

    def choose(self, cached: Sequence[Sequence[int]], new: Sequence[int]) -> str:
        """The strategy for some texts; arguments as for ``plan_continued``."""
        if len(self._variants) == 1:
            return self._variants[0]
        if self.gathers and max(new) == 1:
            return GATHERED
        key = _sizes(cached, new)
        strategy = self._chosen.get(key)
        if strategy is None:
            strategy = choose_variant(
                cached,
                new,
                self.price,
                self.wire,
                heads=self._model.heads,
                kv_heads=self._model.kv_heads,
                variants=self._variants,
            ).strategy
            if len(self._chosen) == _MOST:
                self._chosen.clear()
            self._chosen[key] = strategy
        return strategy


def _sizes(cached: Sequence[Sequence[int]], new: Sequence[int]) -> tuple[int, ...]:
    """Single tokens, what they read, and each longer chunk with what it reads, rounded.

    >>> _sizes([[40, 40], [41, 40], [0, 0]], [1, 1, 300])
    (4, 29, 33, 0)
    """
    texts = [(tokens, sum(before)) for tokens, before in zip(new, cached, strict=True)]
    singles = [before for tokens, before in texts if tokens == 1]
    longer = sorted(pair for pair in texts if pair[0] > 1)
    return tuple(map(_round, (len(singles), sum(singles), *(x for pair in longer for x in pair))))


def _round(size: int) -> int:
    return round(4 * math.log2(size)) if size > 1 else size
