"""Which tokens of a micro-batch each context-parallel rank computes, and what that costs it.

Why
    Attention wants equal pairs, linear layers want equal tokens, links want little to carry.
    A split is judged by all three, counted exactly, whichever strategy made it.

What it decides
    How a split is written and counted. Every strategy returns rows of (rank, document, start,
    stop); here they are sorted, joined where a rank's rows are adjacent, and counted.

Kept true (tests/unit/balance/context/test_sharding.py, by Hypothesis)
    Each token has exactly one owner; pairs over ranks add up to the documents' pairs; tiles
    are never below pairs; what travels equals a count token by token.

Sources
    Keys that only some ranks need: MagiAttention (GroupCast); the all-gather that it is
    compared with: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.balance.tiles import TILE, count_tile_pairs
from equipoise.base.arrays import Ints
from equipoise.base.digest import digest_bytes
from equipoise.cost.curve import LoadCurve
from equipoise.cost.work import CAUSAL, Mask, slice_pairs
from equipoise.spec.pack import Pieces

Rows = Ints
"""What a strategy decides: int64 [n, 4], each (rank, document, start, stop), in any order."""


@dataclass(frozen=True, slots=True)
class ContextRequest:
    """What a strategy is asked to split."""

    doc_tokens: Ints
    """Length of each document, int64 [documents], each >= 0 [tokens]."""
    ranks: int
    tile: int = TILE
    token_slack: float = 0.02
    """How far above the mean the tokens of a rank may be [share of the mean]."""
    ranks_per_node: int | None = None
    mask: Mask = CAUSAL

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return int(self.doc_tokens.sum())


Strategy = Callable[[ContextRequest], Rows]


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """A micro-batch divided between context-parallel ranks."""

    strategy: str
    pieces: tuple[Pieces, ...]
    """Per rank, int64 [n, 3]: index of the document in the micro-batch, start, stop; sorted.
    A rank may have none."""
    tokens: Ints
    """Tokens of each rank [tokens]."""
    pairs: Ints
    """Exact query-key pairs of each rank [pairs]."""
    tile_pairs: Ints
    """Pairs of the attention tiles that each rank's kernels touch [pairs]."""
    load_ns: Ints
    """Predicted forward and backward time of each rank's pieces [ns]."""
    travel_tokens: Ints
    """Tokens of other ranks whose keys and values each rank must receive [tokens]."""

    @property
    def ranks(self) -> int:
        """Context-parallel degree."""
        return len(self.pieces)

    @property
    def pair_skew(self) -> float:
        """Most pairs of a rank over the mean."""
        return skew_of(self.pairs)

    @property
    def token_skew(self) -> float:
        """Most tokens of a rank over the mean."""
        return skew_of(self.tokens)

    @property
    def load_skew(self) -> float:
        """Longest predicted time of a rank over the mean."""
        return skew_of(self.load_ns)

    @property
    def tile_ratio(self) -> float:
        """Tile pairs of the rank with the most, over the mean of exact pairs."""
        ideal = int(self.pairs.sum())
        return int(self.tile_pairs.max()) * self.ranks / ideal if ideal else 1.0

    @property
    def travel_share(self) -> float:
        """Keys that travel, as a share of an all-gather's (every rank receives all others')."""
        gathered = (self.ranks - 1) * int(self.tokens.sum())
        return int(self.travel_tokens.sum()) / gathered if gathered else 0.0

    @property
    def fragments(self) -> int:
        """Pieces beyond one per document."""
        documents = np.concatenate([piece[:, 0] for piece in self.pieces])
        return len(documents) - len(np.unique(documents))

    @property
    def digest(self) -> str:
        """Digest of the whole decision; equal on ranks that decided alike."""
        parts = [self.strategy.encode()]
        for piece in self.pieces:
            parts += (b"rank", np.ascontiguousarray(piece).tobytes())
        return digest_bytes(b"|".join(parts))


def skew_of(values: Ints) -> float:
    """Maximum over mean; 1 if all are 0.

    >>> skew_of(np.array([3, 1])), skew_of(np.array([0, 0]))
    (1.5, 1.0)
    """
    total = int(values.sum())
    return int(values.max()) * len(values) / total if total else 1.0


def join_rows(rows: Rows) -> Rows:
    """Sort rows by (rank, document, start), and join adjacent ones.

    >>> join_rows(np.array([[1, 0, 4, 9], [0, 2, 0, 3], [1, 0, 0, 4], [0, 1, 5, 5]])).tolist()
    [[0, 2, 0, 3], [1, 0, 0, 9]]
    """
    rows = rows[rows[:, 2] < rows[:, 3]]
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    is_first = np.ones(len(rows), dtype=bool)
    before, after = rows[:-1], rows[1:]
    is_first[1:] = (
        (before[:, 0] != after[:, 0])
        | (before[:, 1] != after[:, 1])
        | (before[:, 3] != after[:, 2])
    )
    joined = rows[is_first]
    joined[:, 3] = rows[np.roll(is_first, -1), 3]
    return joined


def count_split(
    strategy: str, rows: Rows, request: ContextRequest, curve: LoadCurve
) -> ContextSplit:
    """Count what a strategy's rows cost each rank.

    Cost: O(n log n) in rows.
    """
    rows = join_rows(rows)
    rank, document, starts, stops = rows.T
    doc_tokens = request.doc_tokens[document]
    pairs = slice_pairs(starts, stops, doc_tokens, request.mask)
    counts = np.zeros((5, len(rows) + 1), dtype=np.int64)
    counts[0, 1:] = stops - starts
    counts[1, 1:] = pairs
    counts[2, 1:] = count_tile_pairs(
        starts, stops, doc_tokens, tile=request.tile, mask=request.mask
    )
    if request.mask == CAUSAL:
        counts[3, 1:] = curve.slice_ns(starts, stops)
    else:
        price = np.rint(curve.attention_ns(pairs) + curve.ns_per_token * counts[0, 1:])
        counts[3, 1:] = np.maximum(price, 1.0)
    counts[4, 1:] = _missing_keys(rows, doc_tokens, request.mask)
    bounds = np.searchsorted(rank, np.arange(request.ranks + 1))
    tokens, pairs, tile_pairs, load_ns, travel = np.diff(counts.cumsum(1)[:, bounds], axis=1)
    pieces = rows[:, 1:]
    edges = bounds.tolist()
    shares = tuple(pieces[edges[r] : edges[r + 1]] for r in range(request.ranks))
    return ContextSplit(strategy, shares, tokens, pairs, tile_pairs, load_ns, travel)


def _missing_keys(rows: Rows, doc_tokens: Ints, mask: Mask) -> Ints:
    """Tokens that each piece's queries read but its rank does not hold, each counted once.

    A piece adds the gap back to its rank's previous piece of the document, since that piece
    already reads what lies before. Under a full mask the last piece also adds what follows it.
    """
    rank, document, starts, stops = rows.T
    is_same = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
    gaps: Ints = starts.copy()
    gaps[1:] -= np.where(is_same, stops[:-1], 0)
    if mask.kind == "window":
        gaps = np.minimum(gaps, mask.window_tokens - 1)
    if mask.kind == "full":
        is_last = np.append(~is_same, True)[: len(rows)]
        gaps = gaps + np.where(is_last, doc_tokens - stops, 0)
    return gaps
