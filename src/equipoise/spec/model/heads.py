"""Which attention heads each tensor-parallel rank computes.

Why
    Query heads divide over ranks; key/value heads need not: with more ranks than key/value
    heads several ranks read the same one.

What it decides
    Query heads go to ranks in order, equally many to each. A rank takes the key/value heads
    that its queries read. If its queries read unequal runs of them, each query head gets its
    own copy, so that grouped attention stays uniform::

        6 query heads, 2 key/value heads, 3 ranks

        query heads        0 1   2 3   4 5
        they read          0 0   0 1   1 1
        the rank computes  0     0 1   1

Kept true (tests/unit/spec/model/test_heads.py, by Hypothesis)
    Every query head is computed once, and reads the same key/value head as on one rank.
"""

import dataclasses
from dataclasses import dataclass

from equipoise.base.errors import LayoutError
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads of one rank."""

    heads: range
    """Query heads."""
    kv_heads: tuple[int, ...]
    """Key/value heads, ascending; query head ``i`` of the rank reads number
    ``i * len(kv_heads) // len(heads)`` of them."""

    @property
    def kv_run(self) -> range | None:
        """The key/value heads as one run; None if a head appears twice."""
        first, last = self.kv_heads[0], self.kv_heads[-1]
        run = range(first, last + 1)
        return run if tuple(run) == self.kv_heads else None


def share_heads(heads: int, kv_heads: int, *, ranks: int, rank: int) -> HeadShare:
    """The heads of one of several ranks.

    Raises:
        LayoutError: the query heads do not divide over the ranks.

    >>> share_heads(32, 8, ranks=16, rank=3)
    HeadShare(heads=range(6, 8), kv_heads=(1,))
    >>> [share_heads(6, 2, ranks=3, rank=rank).kv_heads for rank in range(3)]
    [(0,), (0, 1), (1,)]
    """
    if heads % ranks:
        raise LayoutError(
            f"{heads} heads do not divide over {ranks} tensor-parallel ranks. Give a divisor of "
            f"{heads} ranks."
        )
    own, group = heads // ranks, heads // kv_heads
    mine = range(rank * own, (rank + 1) * own)
    read = [head // group for head in mine]
    runs = {read.count(head) for head in read}
    uniform = len(runs) == 1
    return HeadShare(mine, tuple(sorted(set(read))) if uniform else tuple(read))


def share_model(model: ModelSpec, ranks: int) -> ModelSpec:
    """The sizes of the largest share of any tensor-parallel rank.

    >>> from equipoise.spec.model.presets import preset
    >>> share_model(preset("llama3-8b"), 16).kv_heads  # 16 ranks do not divide 8: all are copied
    8
    """
    if ranks == 1:
        return model
    own, left = divmod(model.kv_heads, ranks)
    return dataclasses.replace(
        model,
        heads=model.heads // ranks,
        kv_heads=model.kv_heads if left else own,
        ffn=-(-model.ffn // ranks),
        vocab=-(-model.vocab // ranks),
    )
