"""Say which tokens of which documents make up a step, from one integer.

Why
    A run that stops and resumes, with other ranks or other steps, must read the tokens that it
    would have read anyway. So the only state to save is the count of tokens read so far: the
    cursor has no rank, no epoch and no shuffle buffer.

What it decides
    The order of documents in each epoch, and where they are cut. The epochs' documents lie
    end to end on one line of tokens, each epoch permuted by its own key:

        epoch 0              | epoch 1              | ...
        doc 2 | doc 0  | d 1 | d 1 | doc 2 | doc 0  |
              ^ position           ^ position + step_tokens

    A step is the slice between the two marks. It is cut at the end of each document and, within
    a document, at multiples of ``context_tokens`` from its start. Conversations are *whole*: a
    step has every document, or part up to ``context_tokens``, that begins between the marks, so
    that no answer is in another step than its question; steps then differ in tokens.

Kept true (tests/unit/data/test_stream.py, by Hypothesis)
    An epoch has each token exactly once; no piece is longer than the context; consecutive steps
    of any sizes have the tokens of one large step, in its order; the answer depends only on the
    arguments. Whole documents are cut nowhere but at multiples of the context.

Sources
    Philox4x64: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011). The
    raw 64-bit stream is used because NumPy keeps it stable between versions, unlike
    ``Generator.permutation`` (NEP 19).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.base.errors import DataError
from equipoise.data.sampler_arguments import whole_tokens
from equipoise.spec.pack import Pieces


class DocumentStream:
    """An endless stream of documents, reshuffled each epoch; ``step`` cuts slices out of it.

    Args:
        doc_tokens: Length of each document [tokens]; each >= 1.
        seed: Seed of the order, 0 <= seed < 2**64.
        context_tokens: Longest piece [tokens], >= 1.
        source: Which source of a mixture this is, 0 if it is the only one.
        whole: Leave a piece whole where a step ends within it. A step of at least
            ``context_tokens`` then has at least one.

    Raises:
        DataError: there are no documents, one is empty or not a whole number of tokens, or the
            context is below 1.
    """

    def __init__(
        self,
        doc_tokens: ArrayLike,
        *,
        seed: int,
        context_tokens: int,
        source: int = 0,
        whole: bool = False,
    ) -> None:
        if not np.size(doc_tokens):
            raise DataError(
                "A stream needs at least 1 document, but there are 0. Set data.path to a corpus "
                "with text in it."
            )
        self._doc_tokens = whole_tokens(doc_tokens)
        if self._doc_tokens.min() < 1:
            document = int(self._doc_tokens.argmin())
            raise DataError(
                f"Document {document:,} of {len(self._doc_tokens):,} has "
                f"{self._doc_tokens[document]:,} tokens, but each needs at least 1. Leave out "
                "empty documents."
            )
        if context_tokens < 1:
            raise DataError(
                f"context_tokens = {context_tokens:,} is below 1. Set pack.context_tokens to the "
                "longest piece that the model reads."
            )
        self.seed, self._source = seed, source
        self.context_tokens = context_tokens
        self.whole = whole
        self.epoch_tokens = int(self._doc_tokens.sum())
        self._epoch = (-1, self._doc_tokens, self._doc_tokens)

    def step(self, position_tokens: int, step_tokens: int) -> NDArray[np.int64]:
        """Cut the slice [position, position + step) of the stream into pieces.

        Args:
            position_tokens: Tokens of the stream before this step, >= 0.
            step_tokens: Tokens of this step, >= 1; may span several epochs.

        Returns:
            int64[pieces, 3]: document, start, stop; tokens [start, stop) of the document.

        Raises:
            DataError: the position is negative or the step below 1.

        Cost: O(pieces + log documents), and O(documents log documents) for a new epoch.

        >>> stream = DocumentStream([5, 2], seed=5, context_tokens=4)
        >>> stream.step(0, 7).tolist()
        [[1, 0, 2], [0, 0, 4], [0, 4, 5]]
        >>> stream.step(3, 7).tolist()
        [[0, 1, 4], [0, 4, 5], [1, 0, 2], [0, 0, 1]]
        >>> whole = DocumentStream([5, 2], seed=5, context_tokens=4, whole=True)
        >>> whole.step(0, 4).tolist(), whole.step(4, 4).tolist()
        ([[1, 0, 2], [0, 0, 4]], [[0, 4, 5], [1, 0, 2]])
        """
        if position_tokens < 0:
            raise DataError(
                f"position_tokens = {position_tokens:,} is before the stream's start. Give the "
                "number of tokens already read, at least 0."
            )
        if step_tokens < 1:
            raise DataError(
                f"step_tokens = {step_tokens:,} is below 1. Set pack.step_tokens to the tokens of "
                "one optimizer step."
            )
        slices = []
        stop = position_tokens + step_tokens
        while position_tokens < stop:
            epoch, first = divmod(position_tokens, self.epoch_tokens)
            last = min(self.epoch_tokens, first + stop - position_tokens)
            slices.append(self._slice(epoch, first, last))
            position_tokens += last - first
        return np.concatenate(slices)

    def _slice(self, epoch: int, first: int, last: int) -> NDArray[np.int64]:
        """Pieces of tokens [first, last) of one epoch; whole ones are those that begin there."""
        order, ends = self._order(epoch)
        places = np.arange(
            np.searchsorted(ends, first, side="right"),
            np.searchsorted(ends, last, side="left") + 1,
        )
        documents = order[places]
        begins = ends[places] - self._doc_tokens[documents]
        starts = np.maximum(first - begins, 0)
        stops = np.minimum(last, ends[places]) - begins
        first_window = starts // self.context_tokens
        if self.whole:
            first_window = -(-starts // self.context_tokens)
            starts, last_tokens = np.zeros_like(starts), stops
            stops = self._doc_tokens[documents]
            windows = np.maximum(-(-last_tokens // self.context_tokens) - first_window, 0)
        else:
            windows = (stops - 1) // self.context_tokens - first_window + 1
        before = np.cumsum(windows) - windows
        owner = np.repeat(np.arange(len(places)), windows)
        window = first_window[owner] + np.arange(len(owner)) - before[owner]
        return np.stack(
            [
                documents[owner],
                np.maximum(starts[owner], window * self.context_tokens),
                np.minimum(stops[owner], (window + 1) * self.context_tokens),
            ],
            axis=1,
        )

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """An epoch's permutation and where its documents end; cached for the last epoch."""
        known, order, ends = self._epoch
        if known != epoch:
            order = epoch_order(len(self._doc_tokens), self.seed, epoch, self._source)
            ends = np.cumsum(self._doc_tokens[order])
            # One assignment: a concurrent thread sees either the old epoch or the new one.
            self._epoch = (epoch, order, ends)
        return order, ends


def epoch_order(documents: int, seed: int, epoch: int, source: int = 0) -> NDArray[np.int64]:
    """The order of documents in an epoch, the same on every machine, int64 [documents].

    Args:
        documents: How many there are.
        seed: Of the run.
        epoch: From 0.
        source: Number of the source in a mixture.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    # 2**64 blocks of draws for each source: none ever reaches the next one's.
    counter = np.array([0, source, 0, 0], dtype=np.uint64)
    draws = np.random.Philox(key=key, counter=counter).random_raw(documents)
    return np.argsort(draws, kind="stable")


def tell_apart(pieces: Pieces, documents: int) -> Pieces:
    """Renumber documents that repeat within a step.

    If a step is longer than a small corpus, a policy that divides documents would otherwise take
    both occurrences for one document.

    Args:
        pieces: The pieces of one step in the stream's order, int64 [n, 3]: document, start, stop.
        documents: Documents in the corpus; a new number modulo this is the original one.

    >>> tell_apart(np.array([[0, 0, 5], [1, 0, 2], [0, 0, 3]]), 2).tolist()
    [[0, 0, 5], [1, 0, 2], [2, 0, 3]]
    """
    order = np.argsort(pieces[:, 0], kind="stable")
    document, start, stop = pieces[order].T
    is_same = document[1:] == document[:-1]
    # A piece that does not start where the previous one stopped begins the document again.
    begins = np.concatenate(([0], np.cumsum(is_same & (start[1:] != stop[:-1]))))
    first = np.searchsorted(document, document)
    apart = pieces.copy()
    apart[order, 0] += (begins - begins[first]) * documents
    return apart
