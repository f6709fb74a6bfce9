"""Mix the documents of several sources in exact shares of tokens, from one integer.

Why
    Sources are trained in shares that differ from their sizes. Drawing documents at random gives
    the shares only on average, and has a state that a resume must restore.

What it decides
    Each source is a stream of its own (``data.stream``), reshuffled in each of its epochs. The
    mixture's line of tokens consists of equal blocks. In every block each source has the same
    number of tokens up to one, in proportion to its weight::

        block 0                | block 1                | ...
        a a a a a a b b b c c c| a a a a a a b b b c c c|

    How many tokens of a source come before a position follows from the position by integer
    arithmetic. So a step is one slice of every source, whatever came before it: no layout, rank
    count, step size or resume changes which tokens are trained. Within a step documents of all
    sources are interleaved.

Kept true (tests/unit/data/test_mixture.py, by Hypothesis)
    Before any position each source has its share of the tokens to within a block; consecutive
    steps of any sizes have the tokens of one large step; one source alone is its plain stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.base.errors import DataError
from equipoise.data.stream import DocumentStream


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sources of a corpus, whose documents come one source after another."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    """Shares of the trained tokens, relative to each other; each > 0."""
    documents: tuple[int, ...]
    """Documents of each source."""

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Share of each source, exactly as its weight is written; they sum to 1.

        >>> Mixture(("a", "b"), (0.1, 0.2), (1, 1)).shares
        (Fraction(1, 3), Fraction(2, 3))
        """
        weights = [Fraction(str(weight)) for weight in self.weights]
        return tuple(weight / sum(weights) for weight in weights)


class MixedStream:
    """The streams of several sources as one, with the interface of ``DocumentStream``.

    Args:
        doc_tokens: Length of each document, one source after another [tokens]; each >= 1.
        mixture: The sources.
        seed: Seed of the order, 0 <= seed < 2**64.
        context_tokens: Longest piece [tokens], >= 1.
        whole: As of ``DocumentStream``, for each source; none is if empty. A step of few tokens
            of each source may then be empty.

    Raises:
        DataError: as ``DocumentStream``; of any source.
    """

    def __init__(
        self,
        doc_tokens: ArrayLike,
        mixture: Mixture,
        *,
        seed: int,
        context_tokens: int,
        whole: Sequence[bool] = (),
    ) -> None:
        lengths = np.asarray(doc_tokens)
        self._ends = np.cumsum(mixture.documents)
        parts = np.split(lengths, self._ends[:-1])
        self._streams = [
            DocumentStream(
                part, seed=seed, context_tokens=context_tokens, source=index, whole=is_whole
            )
            for index, (part, is_whole) in enumerate(
                zip(parts, whole or [False] * len(parts), strict=True)
            )
        ]
        shares = mixture.shares
        self._bounds = [sum(shares[:count], Fraction(0)) for count in range(len(shares) + 1)]
        # Two tokens of the smallest source, so that rounding leaves it at least one.
        self._block_tokens = -(-2 // min(shares))
        self.seed, self.context_tokens = seed, context_tokens
        self.epoch_tokens = int(lengths.sum())

    def taken(self, position_tokens: int) -> list[int]:
        """Tokens of each source among the first tokens of the mixture; they sum to it."""
        block, rest = divmod(position_tokens, self._block_tokens)
        before, after = self._edges(block), self._edges(block + 1)
        counts = []
        for source in range(len(self._streams)):
            base = before[source + 1] - before[source]
            start = after[source] - before[source]
            quota = after[source + 1] - before[source + 1] - start
            counts.append(base + min(max(rest - start, 0), quota))
        return counts

    def epochs(self, position_tokens: int) -> list[float]:
        """How many times each source has been read before a position."""
        return [
            taken / stream.epoch_tokens
            for taken, stream in zip(self.taken(position_tokens), self._streams, strict=True)
        ]

    def step(self, position_tokens: int, step_tokens: int) -> NDArray[np.int64]:
        """Cut the slice [position, position + step) of the mixture into pieces.

        Args:
            position_tokens: Tokens of the mixture before this step, >= 0.
            step_tokens: Tokens of this step, >= 1; may span several epochs.

        Returns:
            int64[pieces, 3]: document, start, stop; tokens [start, stop) of the document.

        Raises:
            DataError: the position is negative or the step below 1.
        """
        if position_tokens < 0 or step_tokens < 1:
            raise DataError(
                f"position_tokens = {position_tokens:,} and step_tokens = {step_tokens:,} do not "
                "name a slice. Give at least 0 and at least 1."
            )
        firsts, lasts = self.taken(position_tokens), self.taken(position_tokens + step_tokens)
        slices, places = [], []
        for source, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            if first == last:
                continue
            pieces = self._streams[source].step(first, last - first)
            lengths = pieces[:, 2] - pieces[:, 1]
            pieces[:, 0] += self._ends[source - 1] if source else 0
            slices.append(pieces)  # may be empty where pieces are whole
            # The middle of each piece within its source's slice: sources advance side by side.
            places.append((2 * np.cumsum(lengths) - lengths) / (2 * (last - first)))
        order = np.argsort(np.concatenate(places), kind="stable")
        return np.concatenate(slices)[order]

    def _edges(self, block: int) -> list[int]:
        """Tokens of the first 0, 1, 2, ... sources before a block."""
        tokens = block * self._block_tokens
        return [int(tokens * bound) for bound in self._bounds]


Stream = DocumentStream | MixedStream


def open_stream(
    doc_tokens: Sequence[int] | NDArray[np.int64],
    *,
    seed: int,
    context_tokens: int,
    mixture: Mixture | None = None,
    whole: Sequence[bool] = (),
) -> Stream:
    """The stream of a corpus: plain, or of several sources in their shares; arguments as theirs.

    ``whole`` has a flag for each source, or nothing where none is whole.

    Raises:
        DataError: as ``DocumentStream``.
    """
    if mixture is None:
        return DocumentStream(
            doc_tokens, seed=seed, context_tokens=context_tokens, whole=any(whole)
        )
    return MixedStream(doc_tokens, mixture, seed=seed, context_tokens=context_tokens, whole=whole)
