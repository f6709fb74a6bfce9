"""Documents cut anywhere and dealt to any ranks, for the tests of schedules."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from equipoise.schedule.attention import AttentionSchedule
from equipoise.schedule.attention_strategies import STRATEGIES, write_attention


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


HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (9, 3), (6, 2), (7, 7)])


@st.composite
def schedules(draw: st.DrawFn, most_ranks: int = 5) -> AttentionSchedule:
    """Any strategy's schedule of any placement."""
    lengths, home = draw(placements(most_ranks))
    heads, kv_heads = draw(HEADS)
    divisors = [n for n in range(1, len(home) + 1) if len(home) % n == 0]
    return write_attention(
        draw(st.sampled_from(list(STRATEGIES))),
        home,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        ranks_per_node=draw(st.sampled_from(divisors)),
    )
