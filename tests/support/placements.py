"""Documents cut anywhere, dealt to any ranks, under any masks, for the tests of schedules."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from equipoise.schedule.attention.schedule import AttentionSchedule
from equipoise.schedule.attention.strategies import STRATEGIES, write_attention
from equipoise.spec.mask import Mask


def deal(lengths: list[int], ranks: int, cuts: list[list[int]], owners: list[int]) -> list:
    """Pieces of each rank: documents cut at ``cuts``, pieces to ``owners`` in turn."""
    rows: list[list[list[int]]] = [[] for _ in range(ranks)]
    turn = 0
    for document, tokens in enumerate(lengths):
        at = sorted({0, tokens, *(cut % (tokens + 1) for cut in cuts[document % len(cuts)])})
        for start, stop in pairwise(at):
            rows[owners[turn % len(owners)] % ranks].append([document, start, stop])
            turn += 1
    return [np.array(each, dtype=np.int64).reshape(-1, 3) for each in rows]


@st.composite
def placements(draw: st.DrawFn, most_ranks: int = 5) -> tuple[list[int], list[np.ndarray]]:
    """(lengths, home) of a few small documents over 1 to ``most_ranks`` ranks."""
    lengths = draw(st.lists(st.integers(0, 14), max_size=4))
    ranks = draw(st.integers(1, most_ranks))
    cuts = draw(st.lists(st.lists(st.integers(0, 20), max_size=5), min_size=1, max_size=4))
    owners = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    return lengths, deal(lengths, ranks, cuts, owners)


@st.composite
def masks_for(draw: st.DrawFn, tokens: int) -> Mask:
    """A mask of a document."""
    kind = draw(st.sampled_from(["causal", "full", "window", "prefix"]))
    if kind == "window":
        return Mask("window", draw(st.integers(1, tokens + 2)))
    if kind != "prefix":
        return Mask(kind)
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=4)))
    prefix, *branches = np.diff([0, *cuts, tokens]).tolist()
    return Mask("prefix", prefix_tokens=prefix, branch_tokens=tuple(branches))


def written_out(mask: Mask, tokens: int) -> np.ndarray:
    """Which key each query reads, bool [queries, keys]."""
    query, key = np.mgrid[:tokens, :tokens]
    if mask.kind == "full":
        return np.ones((tokens, tokens), dtype=bool)
    if mask.kind == "window":
        return (key <= query) & (key > query - mask.window_tokens)
    if mask.kind == "causal":
        return key <= query
    # The prefix is part 0, each branch a part of its own.
    part = np.repeat(
        np.arange(1 + len(mask.branch_tokens)), (mask.prefix_tokens, *mask.branch_tokens)
    )
    return (key <= query) & ((part[key] == 0) | (part[key] == part[query]))


def pairs_of(tiles: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Every (document, query, key, head) of some tiles, one by one."""
    return [
        (document, query, key, head)
        for document, q0, q1, k0, k1, kind, h0, h1 in tiles.tolist()
        for query in range(q0, q1)
        for key in range(k0, k1)
        if kind == 0 or (key - k0 <= query - q0 if kind == 1 else key - k0 >= query - q0)
        for head in range(h0, h1)
    ]


HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (9, 3), (6, 2), (7, 7)])


@st.composite
def schedules(draw: st.DrawFn, most_ranks: int = 5) -> AttentionSchedule:
    """Any strategy's schedule of any placement and masks."""
    lengths, home = draw(placements(most_ranks))
    heads, kv_heads = draw(HEADS)
    divisors = [n for n in range(1, len(home) + 1) if len(home) % n == 0]
    return write_attention(
        draw(st.sampled_from(list(STRATEGIES))),
        home,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        mask=[draw(masks_for(tokens)) for tokens in lengths],
        ranks_per_node=draw(st.sampled_from(divisors)),
    )
