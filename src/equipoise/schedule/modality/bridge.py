"""What travels between ranks that encode items and ranks whose decoder reads them.

Why
    Encoders and the decoder lie on meshes of their own: an item is encoded where there is time
    for it, and its rows are needed by whichever rank embeds those tokens. Moved all at once they
    would need memory for a whole step's embeddings on both sides; so they go in rounds of a
    bounded size.

What it decides
    Nothing but the rounds: who encodes says ``balance.modality.deal``, who reads says the pack.
    Rows between two ranks go in the order of the reader's turns and rows, and every pair spreads
    its rows evenly over all rounds::

        encodes     item 0: rows a b c           item 1: rows d e
        rank 0  ->  rank 0: a    rank 1: b c     rank 1 -> rank 0: d e
        round 0                  b                         d
        round 1                  c                         e

    Gradients return the same way in the opposite direction, so a step sends each row twice; those
    of rows behind which nothing is trained do not, and a second plan has the rows that return.

Kept true (tests/unit/schedule/modality/test_bridge.py, tests/multi/parallel/test_modality.py)
    Each row that is read arrives once; ranks send exactly the bytes counted here, pair by pair.

Sources
    Chunked exchange between encoder and decoder: LongCat-Flash-Omni, arXiv:2511.00279.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Flags, Ints
from equipoise.base.digest import digest
from equipoise.base.errors import CheckError


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Rows of items that decoders read, in arrays of one length, one element a row."""

    item: Ints
    """The item of the step."""
    item_row: Ints
    """The row among the item's."""
    rank: Ints
    """The rank that embeds this token."""
    turn: Ints
    """Which of its micro-batches."""
    row: Ints
    """The row among those that it keeps of that micro-batch."""

    def some(self, which: Flags | Ints) -> "Readers":
        """Some of them, or all in another order."""
        return Readers(
            self.item[which],
            self.item_row[which],
            self.rank[which],
            self.turn[which],
            self.row[which],
        )


@dataclass(frozen=True, slots=True, eq=False)
class BridgePlan:
    """Rows of a step between ranks, in rounds."""

    ranks: int
    owner: Ints
    """The rank that encodes each item, int64 [items]."""
    item_rows: Ints
    """Rows of each item, int64 [items]."""
    readers: Readers
    """By encoding rank, reading rank, turn and row, ascending."""
    rounds: int

    @property
    def sent(self) -> Ints:
        """Rows that each rank sends to each, int64 [ranks, ranks]; its own on the diagonal."""
        sent = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        np.add.at(sent, (self.owner[self.readers.item], self.readers.rank), 1)
        return sent

    @property
    def away(self) -> Ints:
        """Rows that each rank sends to each other, int64 [ranks, ranks]."""
        away: Ints = self.sent * ~np.eye(self.ranks, dtype=np.bool_)
        return away

    @property
    def digest(self) -> str:
        """Equal for equal plans, on every rank."""
        readers = self.readers
        where = [readers.item, readers.item_row, readers.rank, readers.turn, readers.row]
        return digest([self.ranks, self.owner, self.item_rows, where, self.rounds])

    def bytes(self, width: int, *, element_bytes: int) -> Ints:
        """Bytes that each rank sends to each in forward and backward, int64 [ranks, ranks].

        Args:
            width: Hidden width of the decoder.
            element_bytes: Of one number.
        """
        total: Ints = (self.away + self.away.T) * width * element_bytes
        return total

    @property
    def messages(self) -> int:
        """Messages of all ranks in forward and backward."""
        rounds = (self.rows_of_round(number) for number in range(self.rounds))
        return 2 * sum(
            int((each * ~np.eye(self.ranks, dtype=np.bool_) > 0).sum()) for each in rounds
        )

    def rows_of_round(self, number: int) -> Ints:
        """Rows that each rank sends to each in one round, int64 [ranks, ranks]."""
        sent = self.sent
        rows: Ints = sent * (number + 1) // self.rounds - sent * number // self.rounds
        return rows

    def items_of(self, rank: int) -> Ints:
        """The items that a rank encodes, ascending."""
        return np.flatnonzero(self.owner == rank)

    def spans(self) -> Iterator[tuple[int, int, slice]]:
        """Encoding rank, reading rank, and their rows among ``readers``, for every pair."""
        ends = np.cumsum(self.sent.ravel()).reshape(self.ranks, self.ranks)
        start = 0
        for source in range(self.ranks):
            for target in range(self.ranks):
                stop = int(ends[source, target])
                yield source, target, slice(start, stop)
                start = stop


def plan_bridge(
    readers: Readers, owner: Ints, item_rows: Ints, *, ranks: int, round_rows: int
) -> BridgePlan:
    """Sort the rows of a step by who sends and who reads, and cut them into rounds.

    Args:
        readers: Rows that are read, in any order.
        owner: The rank that encodes each item, int64 [items].
        item_rows: Rows of each item, int64 [items].
        ranks: All ranks.
        round_rows: Most rows that a rank sends or receives in a round, up to one more a peer.

    >>> one, zero = np.array([0, 0]), np.array([0, 1])
    >>> plan = plan_bridge(
    ...     Readers(one, zero, np.array([1, 0]), one, zero),
    ...     np.array([0]), np.array([2]), ranks=2, round_rows=8,
    ... )
    >>> plan.sent.tolist(), plan.rounds, plan.bytes(4, element_bytes=2).tolist()
    ([[1, 1], [0, 0]], 1, [[0, 8], [8, 0]])
    """
    order = np.lexsort((readers.row, readers.turn, readers.rank, owner[readers.item]))
    ordered = readers.some(order)
    plan = BridgePlan(ranks, owner, item_rows, ordered, 0)
    away = plan.away
    most = int(max(away.sum(axis=0).max(initial=0), away.sum(axis=1).max(initial=0)))
    return BridgePlan(ranks, owner, item_rows, ordered, -(-most // round_rows))


def check_bridge(plan: BridgePlan) -> None:
    """Prove that every row that is read comes from one item, and arrives once.

    Raises:
        CheckError: names the first row that does not.
    """
    readers = plan.readers
    is_wrong = (readers.item_row < 0) | (readers.item_row >= plan.item_rows[readers.item])
    if is_wrong.any():
        at = int(np.flatnonzero(is_wrong)[0])
        item = int(readers.item[at])
        raise CheckError(
            f"Row {int(readers.item_row[at])} of item {item} is read, but it has "
            f"{int(plan.item_rows[item])} rows. Make the plan again from the pack."
        )
    places = np.stack((readers.rank, readers.turn, readers.row), axis=1)
    unique, counts = np.unique(places, axis=0, return_counts=True)
    if (counts > 1).any():
        rank, turn, row = unique[counts > 1][0].tolist()
        raise CheckError(
            f"Row {row} of micro-batch {turn} on rank {rank} would be filled twice. Make the plan "
            f"again from the pack."
        )
    rounds = [plan.rows_of_round(number) for number in range(plan.rounds)]
    away = plan.away
    carried = sum(rounds, np.zeros_like(away)) * ~np.eye(plan.ranks, dtype=np.bool_)
    if (carried != away).any():
        source, target = np.argwhere(carried != away)[0].tolist()
        raise CheckError(
            f"Rank {source} sends {int(carried[source, target])} rows to rank {target} in "
            f"{plan.rounds} rounds, but {int(away[source, target])} are read there. Make the plan "
            f"again from the pack."
        )
