"""The indices that a packed sampler passes to a dataset: pieces of documents, with their turn.

Kept true (tests/unit/data/test_sampler.py)
    The sampler yields them; a dataset may unpack them as ``document, start, stop``.
"""

from typing import NamedTuple


class Turn(NamedTuple):
    """Which micro-batch of which step this is, and the labels that divide the step's loss."""

    epoch: int
    step: int
    """Step of the epoch, from 0."""
    micro_batch: int
    """Micro-batch of the step, from 0."""
    micro_batches: int
    """Micro-batches of the step, the same on every rank."""
    step_labels: int
    """Labels of the whole step over all ranks, at least 1."""


class PieceIndex(NamedTuple):
    """Tokens ``[start, stop)`` of a document.

    ``start == stop`` asks for one token without a label, for a rank that has no piece.
    """

    document: int
    start: int
    stop: int
    doc_tokens: int
    """Length of the whole document [tokens]."""
    turn: Turn
