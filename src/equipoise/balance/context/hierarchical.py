"""Hierarchical context sharding: by length, a document stays on a rank, on a node, or spans nodes.

Why
    Links inside a node are an order of magnitude faster than links between nodes. A document
    that fits on a rank should not travel, and one that fits in a node should not leave it.

What it decides
    The zone of each document, twice by the same rule: between nodes, whose capacity is their
    ranks' tokens, then between the ranks of each node::

        length        zone           held by
        ------------  -------------  --------------------------------------
        longest       over nodes     all ranks, in head and tail chunks
        in between    within a node  the ranks of one node, in such chunks
        short         local          one rank, whole

    Whole documents, longest first, go to the place with the least work that has room. If one
    finds no room, documents of its length and above are divided, and placement starts again.

Kept true (tests/unit/balance/context/test_sharding.py, by Hypothesis)
    Each token has one owner; a document that does not span nodes is on ranks of one node; a
    rank's tokens exceed the mean by at most the slack and a few.

Sources
    Three zones and lowering the threshold: Zeppelin, EuroSys 2026, algorithms 1 and 2, as far as
    its abstract and notes describe them; choosing places by work, not tokens, is ours.
"""

import heapq

import numpy as np

from equipoise.balance.context.fixed import fold_documents
from equipoise.balance.context.split import ContextRequest, Rows
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.work import pairs_before


def hierarchical(request: ContextRequest) -> Rows:
    """Split first between nodes, then between the ranks of each node.

    Raises:
        LayoutError: ``ranks_per_node`` is not given, or does not divide the ranks.

    >>> from equipoise.balance.context.split import join_rows
    >>> request = ContextRequest(np.array([20, 8, 4, 2, 2, 4]), 4, ranks_per_node=2)
    >>> join_rows(hierarchical(request))[:5].tolist()  # document 0 is within a node
    [[0, 0, 0, 5], [0, 0, 15, 20], [1, 0, 5, 15], [2, 1, 0, 8], [2, 4, 0, 2]]
    """
    ranks, per_node = request.ranks, request.ranks_per_node
    if per_node is None:
        raise LayoutError(
            "The hierarchical strategy needs to know which ranks share a node. Give "
            "ranks_per_node, or choose mixed."
        )
    if per_node < 1 or ranks % per_node:
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        nearest = min(divisors, key=lambda divisor: (abs(divisor - per_node), divisor))
        raise LayoutError(
            f"{ranks} ranks do not fill nodes of {per_node}. Set ranks_per_node = {nearest}, or "
            f"another divisor of {ranks}."
        )
    lengths = request.doc_tokens
    pairs = pairs_before(lengths, lengths, request.mask)
    documents = np.flatnonzero(lengths)
    nodes = ranks // per_node
    mean = request.tokens / ranks
    rank_tokens = max(-(-request.tokens // ranks), int(mean * (1 + request.token_slack)))
    shared, node_of = _place(documents, lengths, pairs, nodes, per_node * rank_tokens)
    rows = [fold_documents(shared, lengths[shared], ranks)]
    over_nodes = np.bincount(rows[0][:, 0], rows[0][:, 3] - rows[0][:, 2], ranks)
    for node in range(nodes):
        mine = np.flatnonzero(node_of == node)
        first = node * per_node
        room = rank_tokens - int(over_nodes[first : first + per_node].max())
        inner, rank_of = _place(mine, lengths, pairs, per_node, max(0, room))
        folded = fold_documents(inner, lengths[inner], per_node)
        folded[:, 0] += first
        whole = mine[rank_of[mine] >= 0]
        zeros = np.zeros_like(whole)
        rows += [folded, np.stack((first + rank_of[whole], whole, zeros, lengths[whole]), axis=1)]
    return np.concatenate(rows)


def _place(
    documents: Ints, lengths: Ints, pairs: Ints, places: int, capacity: int
) -> tuple[Ints, Ints]:
    """The documents that all places share, and each document's place or -1.

    ``capacity`` is the most tokens that one place holds beside what is already shared.
    """
    order = documents[np.lexsort((documents, -lengths[documents]))]
    tokens, work = lengths[order].tolist(), pairs[order].tolist()
    place_of = np.full(len(lengths), -1, dtype=np.int64)
    if places == 1:
        place_of[order] = 0
        return order[:0], place_of
    divided = sum(length > capacity for length in tokens)
    while True:
        room = capacity - -(-sum(tokens[:divided]) // places)
        placed = _fill(tokens[divided:], work[divided:], places, room)
        if len(placed) == len(tokens) - divided:
            place_of[order[divided:]] = placed
            return order[:divided], place_of
        # Divide the next shorter length as well, and all documents of that length.
        at = divided + len(placed)
        divided = at + 1
        while divided < len(tokens) and tokens[divided] == tokens[at]:
            divided += 1


def _fill(tokens: list[int], work: list[int], places: int, room: int) -> list[int]:
    """Put documents on the place of least work that has room, until one finds none."""
    heap = [(0, 0, place) for place in range(places)]
    placed = []
    for length, pairs in zip(tokens, work, strict=True):
        full = []
        while heap and heap[0][1] + length > room:
            full.append(heapq.heappop(heap))
        if not heap:
            break
        load, used, place = heap[0]
        heapq.heapreplace(heap, (load + pairs, used + length, place))
        for entry in full:
            heapq.heappush(heap, entry)
        placed.append(place)
    return placed
