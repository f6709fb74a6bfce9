"""Judge whose copy of some bytes has changed, from fingerprints of all copies.

What it decides
    Of three or more copies of a tensor the majority is right and the others are named. Of two that
    differ, or where no value has a majority, every holder is named: one of them is wrong.

Kept true (tests/unit/fault/detect/test_copies.py, by Hypothesis)
    Whoever is changed among a majority that is not, is named, with the tensor; nobody else is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equipoise.base.errors import CorruptError

_NAMED = 4
"""Most tensors that a message names."""

Sums = Mapping[str, tuple[tuple[int, ...], int]]
"""One rank's tensors by name: the ranks that hold the same bytes, and its fingerprint of them."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """Bytes that have changed though nothing wrote to them."""

    ranks: tuple[int, ...]
    """Who holds them; or if it is not certain, among whom they are."""
    tensors: tuple[str, ...]
    is_certain: bool
    """Whether each of the ranks holds changed bytes."""

    def error(self, step: int, verified: int) -> CorruptError:
        """What ends the ranks.

        Args:
            step: The step that found it, and changed nothing.
            verified: The last step after which all bytes were known to be right.
        """
        listed = ", ".join(map(str, self.ranks))
        one = len(self.ranks) == 1
        if self.is_certain:
            who = f"Rank {listed} holds" if one else f"Ranks {listed} hold"
            who += " bytes that have changed though nothing wrote to them"
        else:
            who = f"One of ranks {listed} holds bytes that differ from the others' copy"
        more = len(self.tensors) - _NAMED
        names = ", ".join(self.tensors[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return CorruptError(
            f"{who}: {names}. Step {step} has changed nothing; checkpoints after step {verified} "
            f"are not trusted and were set aside. Run the same command again to resume from the "
            f"last checkpoint before; if it happens again, test the memory of the host.",
            verified,
            self.ranks[0] if one and self.is_certain else None,
        )


def judge_copies(sums: Sequence[Sums]) -> Corruption | None:
    """Whose copies differ; None if none do.

    Args:
        sums: Of every rank, in order.

    >>> mine, other = {"w": ((0, 1, 2), 7)}, {"w": ((0, 1, 2), 8)}
    >>> judge_copies([mine, other, mine])
    Corruption(ranks=(1,), tensors=('w',), is_certain=True)
    """
    wrong: set[int] = set()
    unclear: set[int] = set()
    tensors: dict[str, None] = {}
    for rank, own in enumerate(sums):
        for name, (holders, _) in own.items():
            if rank != min(holders) or len(holders) == 1:
                continue
            values = {holder: sums[holder][name][1] for holder in holders}
            (most, count), *rest = Counter(values.values()).most_common()
            if not rest:
                continue
            tensors[name] = None
            if 2 * count > len(holders):
                wrong |= {holder for holder, value in values.items() if value != most}
            else:
                unclear |= set(holders)
    if not tensors:
        return None
    if wrong and unclear <= wrong:
        unclear = set()
    ranks = wrong | unclear
    return Corruption(tuple(sorted(ranks)), tuple(tensors), is_certain=not unclear)
