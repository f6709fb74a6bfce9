"""Which experts lie on which rank, and the rows that travel to them, as data without torch.

Why
    How many rows an expert gets is known only once tokens have chosen. What moves then follows
    from the counts alone: every rank's rows for every expert.

What it decides
    Expert ``x`` of X is on rank ``x // ceil(X / ranks)``: runs of equal length, the last perhaps
    shorter, as torch splits a tensor's first dim.

    ::

        7 experts on 4 ranks     0 1 | 2 3 | 4 5 | 6

    A row goes to its expert's rank and comes back, in the forward and, as a gradient, in the
    backward pass: four trips in all. A row whose expert is on its own rank stays.

Kept true (tests/unit/schedule/test_expert.py, tests/multi/parallel/test_expert.py)
    Each row is computed once; ranks send exactly the bytes counted here, link by link.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.spec.model.experts import split_experts as split_experts

_COUNT_BYTES = 8
"""Bytes of one entry of the counts that ranks exchange, int64."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSchedule:
    """The rows of one sparse layer and micro-batch."""

    rows: Ints
    """Rows that each rank has for each expert, int64 [ranks, X]."""
    sent: Ints
    """Rows that each rank sends to each rank, int64 [ranks, ranks]; its own on the diagonal."""

    @property
    def computed(self) -> Ints:
        """Rows that the experts of each rank compute, int64 [ranks]."""
        total: Ints = self.sent.sum(axis=0)
        return total

    @property
    def skew(self) -> float:
        """Rows of the rank that computes the most, over the mean; 1 if there are none."""
        return load_skew(self.computed)

    def bytes(self, width: int, *, element_bytes: int, forwards: int = 1) -> Ints:
        """Bytes that each rank sends to each rank in forward and backward, int64 [ranks, ranks].

        Args:
            width: Elements of a row, D.
            element_bytes: Bytes of an activation's element.
            forwards: Forward passes, 2 with full recomputation.
        """
        ranks, experts = self.rows.shape
        count_bytes = _COUNT_BYTES * np.array(split_experts(experts, ranks=ranks), dtype=np.int64)
        rows = (forwards + 1) * (self.sent + self.sent.T) * width * element_bytes
        sent_bytes: Ints = (rows + forwards * count_bytes[np.newaxis, :]) * ~np.eye(
            ranks, dtype=bool
        )
        return sent_bytes


def schedule_experts(rows: Sequence[Sequence[int]] | Ints) -> ExpertSchedule:
    """The rows that move, given each rank's rows for each expert.

    Raises:
        LayoutError: a rank would have no expert.

    >>> schedule_experts([[3, 0, 1, 1], [0, 2, 0, 5]]).sent.tolist()
    [[3, 2], [2, 5]]
    """
    rows = np.asarray(rows, dtype=np.int64)
    ranks, experts = rows.shape
    ends = np.cumsum(split_experts(experts, ranks=ranks))
    totals = np.concatenate((np.zeros((ranks, 1), dtype=np.int64), rows.cumsum(axis=1)), axis=1)
    sent = np.diff(totals[:, np.concatenate(([0], ends))], axis=1)
    return ExpertSchedule(rows, sent)


def load_skew(loads: Sequence[int] | Ints) -> float:
    """The largest load over the mean; 1 if all are 0.

    >>> load_skew([6, 2, 4, 0]), load_skew([0, 0])
    (2.0, 1.0)
    """
    counts = np.asarray(loads, dtype=np.int64)
    total = int(counts.sum())
    return int(counts.max()) * counts.size / total if total else 1.0


def layer_skews(loads: Sequence[Sequence[int]] | Ints) -> Iterator[float]:
    """``load_skew`` of each layer's experts, int64 [layers, X]."""
    return (load_skew(each) for each in np.asarray(loads, dtype=np.int64))
