"""Which tokens of a corpus are learned, as runs of consecutive ones.

Why
    A step's number of labels is needed on every rank before its first micro-batch, and a packer
    needs those of every piece: counts, not tokens. Conversations have a few answers each, so runs
    are some bytes per conversation, and any count takes two look-ups.

What it decides
    A token is the label of the one before it. So the labels of tokens [start, stop) of a document
    are its learned tokens [start + 1, stop + 1), as far as the document goes: cutting a document
    loses no label.

Kept true (tests/unit/data/test_learned.py, by Hypothesis)
    Counts equal those of the mask; parts of a document add up to the whole.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.base.arrays import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Learned tokens of a corpus, whose documents lie end to end.

    ``runs`` int64[runs, 2]: learned tokens [start, stop), ascending and apart.
    """

    runs: NDArray[np.int64]
    _before: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        lengths = self.runs[:, 1] - self.runs[:, 0]
        object.__setattr__(self, "_before", np.concatenate(([0], np.cumsum(lengths))))

    @classmethod
    def of_mask(cls, is_learned: ArrayLike) -> "Learned":
        """From one flag per token.

        >>> Learned.of_mask([0, 1, 1, 0, 1]).runs.tolist()
        [[1, 3], [4, 5]]
        """
        runs = LearnedRuns()
        runs.add(np.asarray(is_learned, dtype=np.bool_))
        return cls(runs.finish())

    def count(self, starts: Ints, stops: Ints) -> Ints:
        """Learned tokens in each of [starts, stops).

        >>> Learned.of_mask([0, 1, 1, 0, 1]).count(np.array([0, 2]), np.array([5, 3])).tolist()
        [3, 1]
        """
        return self._count_before(stops) - self._count_before(starts)

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Whether each of the tokens [start, stop) is learned."""
        low = int(np.searchsorted(self.runs[:, 1], start, side="right"))
        high = int(np.searchsorted(self.runs[:, 0], stop, side="left"))
        is_learned = np.zeros(stop - start, dtype=np.bool_)
        for first, last in self.runs[low:high].tolist():
            is_learned[max(first - start, 0) : last - start] = True
        return is_learned

    def _count_before(self, places: Ints) -> Ints:
        """Learned tokens before each place."""
        if not len(self.runs):
            return np.zeros_like(places)
        run = np.maximum(np.searchsorted(self.runs[:, 0], places, side="right") - 1, 0)
        within = np.clip(places - self.runs[run, 0], 0, self.runs[run, 1] - self.runs[run, 0])
        counts: Ints = self._before[run] + within
        return counts


class LearnedRuns:
    """Collects runs from one flag per token, in parts."""

    def __init__(self) -> None:
        self._at = 0
        self._parts: list[NDArray[np.int64]] = []

    def add(self, is_learned: NDArray[np.bool_]) -> None:
        """Flags of the next tokens."""
        edges = np.diff(np.concatenate(([0], is_learned.astype(np.int8), [0])))
        runs = np.stack((np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)), axis=1)
        self._parts.append(runs + self._at)
        self._at += len(is_learned)

    def finish(self) -> NDArray[np.int64]:
        """All runs, int64[runs, 2]."""
        return np.concatenate([np.zeros((0, 2), np.int64), *self._parts]).astype("<i8")
