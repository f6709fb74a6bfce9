"""What a packer decides: which pieces of which documents each rank computes, and when.

A *piece* is a row ``(document, start, stop)`` of an int64 array: tokens ``start:stop`` of
one document. A micro-batch is one forward and backward; a step is one optimizer update.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.digest import digest_bytes

Pieces = npt.NDArray[np.int64]


def lengths_of(pieces: Pieces) -> npt.NDArray[np.int64]:
    """Length of each piece [tokens].

    >>> lengths_of(np.array([[7, 0, 3], [9, 2, 7]])).tolist()
    [3, 5]
    """
    lengths: npt.NDArray[np.int64] = pieces[:, 2] - pieces[:, 1]
    return lengths


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Pieces that share one forward and backward.

    A piece attends to itself and, if its document was divided, to the document's tokens from
    ``attends_from`` on, which lie in other micro-batches::

        document 7:   |--- micro-batch 0 ---|--- micro-batch 1 ---|
        pieces        [7, 0, 600]           [7, 600, 1000]
        attends_from  [0]                   [0]
    """

    pieces: Pieces
    attends_from: npt.NDArray[np.int64] | None = None
    """First token that each piece reads, int64[pieces]; None if each reads only itself."""

    @property
    def history_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens before each piece to which it attends [tokens]."""
        if self.attends_from is None:
            return np.zeros(len(self.pieces), dtype=np.int64)
        history: npt.NDArray[np.int64] = self.pieces[:, 1] - self.attends_from
        return history

    @property
    def begins(self) -> npt.NDArray[np.int64]:
        """First token of the document, or of its cut, that each piece belongs to."""
        return self.pieces[:, 1] if self.attends_from is None else self.attends_from

    @property
    def doc_tokens(self) -> npt.NDArray[np.int64]:
        """Length of each piece [tokens]."""
        return lengths_of(self.pieces)

    @property
    def tokens(self) -> int:
        """Tokens of the pack; may be 0."""
        return int(self.doc_tokens.sum())


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step's micro-batches, for every rank in the order in which it runs them."""

    policy: str
    ranks: tuple[tuple[MicroBatch, ...], ...]

    def __iter__(self) -> Iterator[MicroBatch]:
        for rank in self.ranks:
            yield from rank

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the rank with the most."""
        return max(map(len, self.ranks))

    @property
    def rank_tokens(self) -> list[int]:
        """Tokens of each rank."""
        return [sum(batch.tokens for batch in rank) for rank in self.ranks]

    @property
    def digest(self) -> str:
        """Digest of the whole decision; equal on ranks that decided alike."""
        parts = [self.policy.encode()]
        for rank in self.ranks:
            parts.append(b"rank")
            for batch in rank:
                parts += (b"batch", np.ascontiguousarray(batch.pieces).tobytes())
                if batch.attends_from is not None:
                    parts += (b"from", np.ascontiguousarray(batch.attends_from).tobytes())
        return digest_bytes(b"|".join(parts))
