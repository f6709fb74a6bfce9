"""What each strategy moves, by formula; and requests that it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context.sharding import split_context
from equipoise.base.errors import LayoutError, SpecError
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.attention.strategies import STRATEGIES, write_attention
from equipoise.spec.mask import CAUSAL, Mask
from support.placements import HEADS, placements

WIRE = Wire(head_width=8, element_bytes=2, sum_bytes=4)


def counts_of(strategy, home, lengths, heads=4, kv_heads=2, ranks_per_node=1, mask=CAUSAL):
    schedule = write_attention(
        strategy,
        home,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        mask=mask,
        ranks_per_node=ranks_per_node,
    )
    return count_attention(schedule, WIRE)


@given(placements(), HEADS)
def test_rings_send_what_an_all_gather_sends(placement, heads) -> None:
    lengths, home = placement
    tokens, ranks = sum(lengths), len(home)
    sent = {
        strategy: counts_of(strategy, home, lengths, *heads).forward_bytes.sum()
        for strategy in ("all-gather", "ring", "double-ring")
    }
    assert set(sent.values()) == {(ranks - 1) * tokens * 2 * heads[1] * 8 * 2}


@given(placements())
def test_passed_queries_and_the_token_ring_send_the_same(placement) -> None:
    lengths, home = placement
    one, other = (counts_of(s, home, lengths) for s in ("pass-q", "token-ring"))
    for name in ("forward_bytes", "backward_bytes", "messages"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    queries = (len(home) - 1) * sum(lengths) * 4 * 8
    partial = sum(
        stop - max(start, first)
        for rank, mine in enumerate(home)
        for document, start, stop in mine.tolist()
        for other_rank, theirs in enumerate(home)
        if other_rank != rank
        for first in [min((s for d, s, _ in theirs.tolist() if d == document), default=stop)]
        if first < stop
    )
    assert one.forward_bytes.sum() == queries * 2 + partial * 4 * (8 + 1) * 4
    assert one.backward_bytes.sum() == queries * 4 + partial * 4 * (2 * 8 * 2 + 4)


@given(
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(1, 5),
    st.sampled_from(["contiguous", "head-tail", "head-tail-document", "by-work", "mixed"]),
    st.sampled_from([Mask(), Mask("full"), Mask("window", 1), Mask("window", 50)]),
)
def test_needed_keys_are_those_that_the_split_counts(lengths, ranks: int, sharding, mask) -> None:
    split = split_context(lengths, ranks, sharding, tile=16, mask=mask)
    counts = counts_of("needed-kv", split.pieces, lengths, mask=mask)
    received = counts.forward_bytes.sum(axis=0)
    assert np.array_equal(received, split.travel_tokens * 2 * 2 * 8 * 2)
    assert np.array_equal(counts.pairs, split.pairs * 4)
    assert np.array_equal(counts.kept_bytes, received)


def test_short_documents_that_stay_whole_move_nothing() -> None:
    lengths = [100] * 8
    split = split_context(lengths, 4, "mixed", tile=16)
    assert counts_of("needed-kv", split.pieces, lengths).messages.sum() == 0


def test_a_window_needs_the_keys_before_each_piece_and_no_more() -> None:
    home = split_context([4000], 4, "head-tail").pieces
    counts = counts_of("needed-kv", home, [4000], mask=Mask("window", 64))
    # 8 pieces on ranks 0 1 2 3 3 2 1 0: the first has nothing before it, one its own rank's.
    assert counts.forward_bytes.sum() == 6 * 63 * 2 * 2 * 8 * 2


def test_a_branch_gets_the_prompt_and_nothing_of_other_branches() -> None:
    mask = Mask("prefix", prefix_tokens=10, branch_tokens=(20, 20, 20))
    home = [np.array([[0, 0, 10]]), *(np.array([[0, at, at + 20]]) for at in (10, 30, 50))]
    counts = counts_of("needed-kv", home, [70], mask=mask)
    token_bytes = 2 * 2 * 8 * 2
    assert counts.forward_bytes.tolist() == [[0, *[10 * token_bytes] * 3], *[[0] * 4] * 3]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("mask", [Mask(), Mask("full"), Mask("window", 9)], ids=str)
def test_ulysses_sends_the_formulas_bytes_whatever_the_ranks(ranks: int, mask: Mask) -> None:
    lengths = [64 * ranks]  # tokens grow with ranks
    home = split_context(lengths, ranks, "contiguous").pieces
    counts = counts_of("ulysses", home, lengths, heads=16, kv_heads=16, mask=mask)
    # arXiv:2309.14509: an all-to-all of M elements over P ranks sends M / P of each
    # rank, less the part that stays.
    each = 64 * (2 * 16 + 2 * 16) * 8 * 2 * (ranks - 1) // ranks
    assert counts.forward_bytes.sum(axis=1).tolist() == [each] * ranks
    assert each < 64 * (2 * 16 + 2 * 16) * 8 * 2
    assert counts.pair_skew == 1.0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (16, 1)])
def test_passed_keys_and_passed_queries_send_the_papers_bytes(ranks: int, heads) -> None:
    """arXiv:2411.01783: a ring of keys; a ring of queries, and partial outputs all to all."""
    query_heads, kv_heads = heads
    tokens, width, element, total = 48, 8, 2, 4
    mine = tokens // ranks  # of 2 chunks of each rank's
    home = split_context([tokens], ranks, "head-tail").pieces
    counts = counts_of("ring", home, [tokens], *heads)
    pass_kv = (ranks - 1) * mine * 2 * kv_heads * width * element
    assert counts.forward_bytes.sum(axis=1).tolist() == [pass_kv] * ranks

    pass_q = (ranks - 1) * mine * query_heads * width * element
    back = (ranks - 1) * mine * query_heads * (width + 1) * total
    counts = counts_of("pass-q", home, [tokens], *heads, mask=Mask("full"))
    assert counts.forward_bytes.sum(axis=1).tolist() == [pass_q + back] * ranks
    # Under a causal mask the first chunk of rank r reads no key of ranks after it, and what
    # would come back of it is left out.
    counts = counts_of("pass-q", home, [tokens], *heads)
    chunk = back // max(1, ranks - 1) // 2
    left_out = [rank * chunk for rank in range(ranks)]
    sent = counts.forward_bytes.sum(axis=1)
    assert sent.tolist() == [pass_q + back - less for less in left_out]


def test_usp_is_ulysses_on_one_node_and_a_ring_on_nodes_of_one() -> None:
    lengths = [37, 5]
    home = split_context(lengths, 4, "head-tail").pieces
    usp, ulysses = (counts_of(s, home, lengths, ranks_per_node=4) for s in ("usp", "ulysses"))
    assert np.array_equal(usp.forward_bytes, ulysses.forward_bytes)
    usp, ring = (counts_of(s, home, lengths, ranks_per_node=1) for s in ("usp", "ring"))
    assert np.array_equal(usp.forward_bytes, ring.forward_bytes)


def test_a_double_ring_crosses_nodes_less_often() -> None:
    home = split_context([80], 4, "contiguous").pieces
    between = np.array([[0, 0, 1, 1]] * 2 + [[1, 1, 0, 0]] * 2)
    ring, double = (
        counts_of(s, home, [80], ranks_per_node=2).messages for s in ("ring", "double-ring")
    )
    assert (ring * between).sum() == 2 * 3  # two of four links, three rounds
    assert (double * between).sum() == 4


def test_digests_name_what_is_written() -> None:
    home = split_context([9, 4], 2, "head-tail").pieces
    digests = [
        write_attention(strategy, home, [9, 4], heads=2, kv_heads=1, ranks_per_node=1).digest
        for strategy in (*STRATEGIES, *STRATEGIES)
    ]
    assert len(set(digests)) == len(STRATEGIES)
    assert digests[: len(STRATEGIES)] == digests[len(STRATEGIES) :]


def refusal(strategy: str = "ring", error: type = LayoutError, **keys: int) -> str:
    home = [np.array([[0, 0, 2]])] * 2
    with pytest.raises(error) as caught:
        write_attention(strategy, home, [4], **{"heads": 2, "kv_heads": 1, **keys})
    return str(caught.value)


def test_requests_that_are_refused() -> None:
    assert refusal("rnig", SpecError) == (
        'No attention strategy is called "rnig". Nearest: ring. All: all-gather, needed-kv, ring, '
        "double-ring, pass-q, token-ring, gather-q, ulysses, usp."
    )
    assert refusal(heads=4, kv_heads=3) == (
        "4 query heads cannot share 3 key/value heads. Give a number of key/value heads that "
        "divides the query heads."
    )
    assert refusal("usp") == (
        "usp works within nodes and between them. Give ranks_per_node, the number of ranks that "
        "share a node."
    )
    assert refusal("usp", ranks_per_node=3) == (
        "2 ranks do not fill nodes of 3. Give a ranks_per_node that divides the ranks."
    )
    with pytest.raises(LayoutError) as caught:
        Wire(head_width=0)
    assert str(caught.value) == (
        "Head width 0, elements of 2 bytes and sums of 4 bytes: each must be at least 1."
    )
