"""What a packed sampler asks a dataset for: pieces of documents, each with its turn.

Kept true (tests/unit/data/test_sampler.py)
    The sampler yields them, and datasets that unpack ``document, start, stop`` understand them.
"""

from typing import NamedTuple


class Turn(NamedTuple):
    """Which micro-batch of which step this is, and what the loss of the step is divided by."""

    epoch: int
    step: int
    """Of the epoch, from 0."""
    micro_batch: int
    """Of the step, from 0."""
    micro_batches: int
    """Of the step; the same on every rank."""
    step_labels: int
    """Labels of the whole step over all ranks, at least 1."""


class PieceIndex(NamedTuple):
    """What the sampler asks the dataset for: tokens ``[start, stop)`` of a document.

    ``start == stop`` asks for one token without a label, which keeps a rank in step.
    """

    document: int
    start: int
    stop: int
    doc_tokens: int
    """Length of the whole document [tokens]."""
    turn: Turn
