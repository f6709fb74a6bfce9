"""Count an attention schedule's bytes, messages, pairs and memory.

What it decides
    How large each message is. Keys, queries and outputs travel in their dtype, partial outputs
    and gradient sums in the dtype of the sums (fp32, or fp64 for fp64 tensors)::

        bytes a token         forward                  backward, the other way
        q,       h heads      h E element              h E sum
        kv,      g heads      2 g E element            2 g E sum
        partial, h heads      h (E + 1) sum            2 h E element + h sum
        output,  h heads      h E element              h E element

    A rank keeps what it receives until its backward pass has used it.

Kept true (tests/unit/schedule/attention/test_strategies.py, tests/multi/parallel/test_context.py)
    Ranks send exactly these bytes and messages, link by link.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.schedule.attention.schedule import AttentionSchedule, Message


@dataclass(frozen=True, slots=True)
class Wire:
    """The sizes of what travels."""

    head_width: int
    element_bytes: int = 2
    """Bytes of an element of queries, keys, values and outputs: 2 for bf16."""
    sum_bytes: int = 4
    """Bytes of an element of partial outputs, log-sum-exp and gradient sums."""

    def __post_init__(self) -> None:
        if min(self.head_width, self.element_bytes, self.sum_bytes) < 1:
            raise LayoutError(
                f"Head width {self.head_width}, elements of {self.element_bytes} bytes and sums "
                f"of {self.sum_bytes} bytes: each must be at least 1."
            )

    def forward_bytes(self, message: Message) -> int:
        """Size of a message in the forward pass [bytes]."""
        heads = message.heads[1] - message.heads[0]
        width = self.head_width
        a_head = {
            "q": width * self.element_bytes,
            "kv": 2 * width * self.element_bytes,
            "partial": (width + 1) * self.sum_bytes,
            "output": width * self.element_bytes,
        }
        return message.tokens * heads * a_head[message.carries]

    def backward_bytes(self, message: Message) -> int:
        """Size of the backward pass's answer to a message [bytes]."""
        heads = message.heads[1] - message.heads[0]
        width = self.head_width
        a_head = {
            "q": width * self.sum_bytes,
            "kv": 2 * width * self.sum_bytes,
            "partial": 2 * width * self.element_bytes + self.sum_bytes,
            "output": width * self.element_bytes,
        }
        return message.tokens * heads * a_head[message.carries]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCounts:
    """Counts of one forward and one backward pass of one layer."""

    forward_bytes: Ints
    """Bytes from each rank (row) to each rank in the forward pass, int64 [ranks, ranks]."""
    backward_bytes: Ints
    """The same for the backward pass [bytes]."""
    messages: Ints
    """Messages of the forward pass, int64 [ranks, ranks]; the backward's are the transpose."""
    pairs: Ints
    """Query-key pairs of each rank, summed over heads, int64 [ranks] [pairs]."""
    tiles: Ints
    """Kernel calls of each rank's forward pass, int64 [ranks]."""
    in_flight_bytes: Ints
    """Most bytes, sent and received, that each rank has in flight in the forward pass."""
    kept_bytes: Ints
    """What each rank receives and keeps for its backward pass [bytes]."""

    @property
    def total_bytes(self) -> int:
        """Bytes of both passes over all links."""
        return int(self.forward_bytes.sum() + self.backward_bytes.sum())

    @property
    def pair_skew(self) -> float:
        """Most pairs of a rank over the mean; 1 if there are none."""
        total = int(self.pairs.sum())
        return int(self.pairs.max()) * len(self.pairs) / total if total else 1.0


def tile_pairs(tiles: Ints, *, block: int = 1) -> Ints:
    """Pairs of each tile, summed over its heads [pairs].

    Args:
        tiles: Tiles of an ``AttentionSchedule``.
        block: Queries and keys of a kernel's block, which counts whole [tokens].

    >>> tile_pairs(np.array([[0, 2, 4, 2, 4, 1, 0, 2], [0, 2, 4, 0, 2, 0, 0, 2]])).tolist()
    [6, 8]
    >>> tile_pairs(np.array([[0, 2, 5, 2, 5, 1, 0, 1]]), block=2).tolist()
    [12]
    """
    queries = -(-(tiles[:, 2] - tiles[:, 1]) // block)
    keys = -(-(tiles[:, 4] - tiles[:, 3]) // block)
    one_head = np.where(tiles[:, 5] != 0, queries * (queries + 1) // 2, queries * keys)
    pairs: Ints = one_head * (tiles[:, 7] - tiles[:, 6]) * block**2
    return pairs


def count_attention(schedule: AttentionSchedule, wire: Wire) -> AttentionCounts:
    """Count a schedule.

    Cost: O(messages x runs + tiles).
    """
    ranks = schedule.ranks
    forward, backward, messages = (np.zeros((ranks, ranks), dtype=np.int64) for _ in range(3))
    pairs, tiles, kept, peak = (np.zeros(ranks, dtype=np.int64) for _ in range(4))
    under_way: list[dict[int, int]] = [{} for _ in range(ranks)]
    for rank, at, each in schedule:
        for message in each.sends:
            forward[rank, message.peer] += wire.forward_bytes(message)
            backward[message.peer, rank] += wire.backward_bytes(message)
            messages[rank, message.peer] += 1
        for message in each.receives:
            if message.carries in ("q", "kv"):
                kept[rank] += wire.forward_bytes(message)
        for message in (*each.sends, *each.receives):
            for late in range(at, at + message.rounds):
                size = wire.forward_bytes(message)
                under_way[rank][late] = under_way[rank].get(late, 0) + size
        pairs[rank] += tile_pairs(each.tiles).sum()
        tiles[rank] += len(each.tiles)
    for rank, sizes in enumerate(under_way):
        peak[rank] = max(sizes.values(), default=0)
    return AttentionCounts(forward, backward, messages, pairs, tiles, peak, kept)
