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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Pieces that share one forward and backward; no piece attends to another."""

    pieces: Pieces

    @property
    def doc_tokens(self) -> npt.NDArray[np.int64]:
        """Length of each piece [tokens]."""
        lengths: npt.NDArray[np.int64] = self.pieces[:, 2] - self.pieces[:, 1]
        return lengths

    @property
    def tokens(self) -> int:
        """Tokens of the pack; 0 is legal."""
        return int(self.doc_tokens.sum())


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One step's micro-batches, for every rank; each rank has the same number of them."""

    policy: str
    ranks: tuple[tuple[MicroBatch, ...], ...]

    def __iter__(self) -> Iterator[MicroBatch]:
        for rank in self.ranks:
            yield from rank

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])

    @property
    def rank_tokens(self) -> list[int]:
        """Tokens of each rank."""
        return [sum(batch.tokens for batch in rank) for rank in self.ranks]

    @property
    def digest(self) -> str:
        """Name of the whole decision, equal on two ranks that decided the same."""
        parts = [self.policy.encode()]
        for rank in self.ranks:
            parts.append(b"rank")
            for batch in rank:
                parts += (b"batch", np.ascontiguousarray(batch.pieces).tobytes())
        return digest_bytes(b"|".join(parts))
