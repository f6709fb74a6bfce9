"""Context sharding, by Hypothesis: each token once, everything counted, promises kept."""

import dataclasses
import doctest
import importlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context.sharding import AUTO, STRATEGIES, ContextSplit, split_context
from equipoise.balance.tiles import count_tile_pairs
from equipoise.base.errors import EquipoiseError, LayoutError, SpecError
from equipoise.cost.curve import counted_curve
from equipoise.cost.work import Mask, causal_pairs
from equipoise.spec.model.presets import preset

CURVE = counted_curve(preset("2m"))
EVERY = (*STRATEGIES, AUTO)
LENGTHS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2000)), max_size=12)
RANKS = st.integers(1, 9)
MASKS = st.one_of(
    st.just(Mask()), st.just(Mask("full")), st.integers(1, 300).map(lambda w: Mask("window", w))
)


def split_by(strategy: str, lengths, ranks: int, **options) -> ContextSplit:
    options = {"tile": 16, "curve": CURVE, **options}
    if strategy == "hierarchical":
        options.setdefault("ranks_per_node", max(d for d in (1, 2, 3) if ranks % d == 0))
    return split_context(lengths, ranks, strategy, **options)


def owners(split: ContextSplit, lengths: list[int]) -> list[np.ndarray]:
    """Of each document, how many pieces hold each token, and which rank holds it."""
    held = [np.zeros(tokens, dtype=int) for tokens in lengths]
    rank_of = [np.full(tokens, -1) for tokens in lengths]
    for rank, pieces in enumerate(split.pieces):
        for document, start, stop in pieces.tolist():
            assert 0 <= start < stop <= lengths[document]
            held[document][start:stop] += 1
            rank_of[document][start:stop] = rank
    assert all((count == 1).all() for count in held)
    return rank_of


@pytest.mark.parametrize("strategy", EVERY)
@given(lengths=LENGTHS, ranks=RANKS)
def test_tokens_have_one_owner_pieces_are_sorted_and_counted_and_ranks_decide_alike(
    strategy: str, lengths, ranks
) -> None:
    split, again = (split_by(strategy, list(lengths), ranks) for _ in range(2))
    assert split.digest == again.digest
    assert split.ranks == ranks
    owners(split, lengths)
    doc_tokens = np.array(lengths, dtype=np.int64)
    assert split.pairs.sum() == causal_pairs(doc_tokens).sum()
    for rank, pieces in enumerate(split.pieces):
        assert pieces.dtype == np.int64
        rows = pieces.tolist()
        assert rows == sorted(rows)
        assert all(a[0] != b[0] or a[2] < b[1] for a, b in itertools.pairwise(rows))
        document, starts, stops = pieces.T
        assert split.tokens[rank] == (stops - starts).sum()
        assert split.pairs[rank] == (causal_pairs(stops) - causal_pairs(starts)).sum()
        tiles = count_tile_pairs(starts, stops, doc_tokens[document], tile=16)
        assert split.tile_pairs[rank] == tiles.sum() >= split.pairs[rank]
        assert split.load_ns[rank] == CURVE.slice_ns(starts, stops).sum()


@pytest.mark.parametrize("strategy", EVERY)
@given(lengths=st.lists(st.integers(0, 60), max_size=6), ranks=st.integers(1, 6), mask=MASKS)
def test_what_travels_is_what_some_query_reads_and_the_rank_lacks(
    strategy: str, lengths, ranks, mask: Mask
) -> None:
    split = split_by(strategy, lengths, ranks, mask=mask, tile=4)
    rank_of = owners(split, lengths)
    for rank in range(ranks):
        missing = 0
        for owner in rank_of:
            query, key = np.indices((len(owner), len(owner)))
            is_read = np.ones_like(query, dtype=bool) if mask.kind == "full" else key <= query
            if mask.kind == "window":
                is_read &= query - key < mask.window_tokens
            read = is_read[owner == rank].any(axis=0)
            missing += int((read & (owner != rank)).sum())
        assert split.travel_tokens[rank] == missing


@pytest.mark.parametrize("strategy", ["contiguous", "head-tail", "head-tail-document"])
@given(lengths=LENGTHS, ranks=RANKS)
def test_tokens_differ_by_at_most_one(strategy: str, lengths, ranks) -> None:
    tokens = split_by(strategy, lengths, ranks).tokens
    assert tokens.max() - tokens.min() <= 1


@given(tokens=st.integers(2, 5000), ranks=RANKS)
def test_head_tail_of_one_document_is_even_in_pairs(tokens: int, ranks: int) -> None:
    tokens -= tokens % (2 * ranks)
    for strategy in ("head-tail", "head-tail-document"):
        assert np.ptp(split_by(strategy, [tokens], ranks).pairs) == 0


@pytest.mark.parametrize("tokens", [1, 7, 8, 9])
def test_a_document_of_about_as_many_tokens_as_chunks(tokens: int) -> None:
    split = split_by("head-tail-document", [tokens, tokens], 4)
    assert split.tokens.sum() == 2 * tokens
    assert np.ptp(split.tokens) <= 1


@given(LENGTHS, st.integers(1, 3), st.integers(1, 3))
def test_only_documents_over_nodes_leave_their_node(lengths, nodes: int, per_node: int) -> None:
    ranks = nodes * per_node
    split = split_by("hierarchical", lengths, ranks, ranks_per_node=per_node)
    mean = sum(lengths) / ranks
    assert split.tokens.max(initial=0) <= 1.02 * mean + 4
    rank_of = owners(split, lengths)
    for owner in rank_of:
        nodes_of = set((owner // per_node).tolist())
        in_chunks = np.bincount(owner, minlength=ranks) if len(owner) else np.zeros(ranks)
        # Over nodes is over all of them; within a node over all its ranks; else on one rank.
        assert len(nodes_of) <= 1 or np.ptp(in_chunks) <= 2
        assert (
            len(nodes_of) != 1
            or len(set(owner.tolist())) == 1
            or np.ptp(in_chunks.reshape(nodes, per_node)[nodes_of.pop()]) <= 2
        )


def test_short_documents_stay_on_a_rank_and_long_ones_in_a_node() -> None:
    split = split_by("hierarchical", [400, 100, 100, 100, 100], 4, ranks_per_node=2)
    assert split.travel_tokens.tolist() == [200, 100, 0, 0]


@given(lengths=LENGTHS, ranks=RANKS, mask=MASKS)
def test_other_masks_add_up_too(lengths, ranks: int, mask: Mask) -> None:
    for strategy in EVERY:
        split = split_by(strategy, lengths, ranks, mask=mask)
        doc_tokens = np.array(lengths, dtype=np.int64)
        reach = min(mask.window_tokens, 10**6) if mask.kind == "window" else 10**6
        expected = (
            (doc_tokens**2).sum()
            if mask.kind == "full"
            else sum(min(i + 1, reach) for tokens in lengths for i in range(tokens))
        )
        assert split.pairs.sum() == expected


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_share_out(strategy: str, lengths: list[int]) -> None:
    split = split_by(strategy, lengths, 3)
    assert [len(pieces) for pieces in split.pieces] == [0, 0, 0]
    assert split.tokens.tolist() == split.travel_tokens.tolist() == [0, 0, 0]
    assert (split.pair_skew, split.tile_ratio, split.travel_share) == (1.0, 1.0, 0.0)
    assert split.fragments == 0


def test_the_ratios_of_a_split() -> None:
    split = split_by("contiguous", [8, 4], 2, tile=2)
    assert [pieces.tolist() for pieces in split.pieces] == [
        [[0, 0, 6]],
        [[0, 6, 8], [1, 0, 4]],
    ]
    assert (split.pairs.tolist(), split.tile_pairs.tolist()) == ([21, 25], [24, 28])
    assert split.pair_skew == 25 * 2 / 46
    assert split.token_skew == 1.0
    assert split.tile_ratio == 28 * 2 / 46
    assert split.travel_share == 6 / 12
    assert split.fragments == 1
    assert split.load_skew == split.load_ns.max() / split.load_ns.mean()


def test_a_run_of_one_rank_holds_all() -> None:
    for strategy in EVERY:
        split = split_by(strategy, [5, 0, 9], 1)
        assert split.pieces[0].tolist() == [[0, 0, 5], [2, 0, 9]]


def test_the_default_curve_is_counted() -> None:
    assert split_context([100, 50], 2).load_ns.min() > 0


def message(*arguments, **options) -> str:
    with pytest.raises(EquipoiseError) as caught:
        split_context(*arguments, **options)
    return str(caught.value)


def test_an_unknown_strategy() -> None:
    assert message([5], 2, "head-tial") == (
        'No context-sharding strategy is called "head-tial". Nearest: head-tail. All: '
        "contiguous, head-tail, head-tail-document, by-work, mixed, hierarchical, auto."
    )
    with pytest.raises(SpecError):
        split_context([5], 2, "head-tial")


def test_negative_lengths() -> None:
    assert message([5, -3], 2) == ("Document 1 has -3 tokens. Give each document 0 tokens or more.")
    with pytest.raises(LayoutError):
        split_context([-1], 1)


@pytest.mark.parametrize(
    ("lengths", "shape", "kind"),
    [([1.5], "(1,)", "float64"), ([float("nan")], "(1,)", "float64"), ([[1]], "(1, 1)", "int64")],
)
def test_lengths_that_are_no_lengths(lengths, shape: str, kind: str) -> None:
    assert message(lengths, 2) == (
        f"Document lengths are an array of shape {shape} of {kind}. Give a flat list of whole "
        f"numbers of tokens."
    )


@pytest.mark.parametrize("ranks", [0, -2])
def test_no_ranks(ranks: int) -> None:
    assert message([5], ranks) == (
        f"A context cannot be divided between {ranks} ranks. Give 1 or more."
    )


@pytest.mark.parametrize(("tile", "slack"), [(0, 0.02), (128, -0.5), (128, float("nan"))])
def test_sizes_that_are_none(tile: int, slack: float) -> None:
    assert message([5], 2, tile=tile, token_slack=slack) == (
        f"The tile is {tile} tokens and the token slack {slack:g}. Give a tile of 1 or more and a "
        f"slack of 0 or more."
    )


def test_hierarchical_without_nodes() -> None:
    assert message([5], 4, "hierarchical") == (
        "The hierarchical strategy needs to know which ranks share a node. Give "
        "ranks_per_node, or choose mixed."
    )


@pytest.mark.parametrize(("per_node", "fix"), [(4, 3), (0, 1), (9, 6)])
@pytest.mark.parametrize("strategy", ["hierarchical", AUTO])
def test_nodes_that_ranks_do_not_fill(strategy: str, per_node: int, fix: int) -> None:
    assert message([5], 6, strategy, ranks_per_node=per_node) == (
        f"6 ranks do not fill nodes of {per_node}. Set ranks_per_node = {fix}, or another "
        f"divisor of 6."
    )


def test_a_shared_prefix() -> None:
    mask = Mask("prefix", prefix_tokens=2, branch_tokens=(3,))
    assert message([5], 2, mask=mask) == (
        "Context-parallel ranks cannot divide a shared-prefix mask. Use a causal, full or window "
        "mask, or give the branches as documents."
    )


def test_a_split_is_plain_data() -> None:
    split = split_by("mixed", [50, 20], 2)
    assert dataclasses.replace(split, strategy="other").digest != split.digest


@pytest.mark.parametrize(
    "name",
    [
        "context.sharding",
        "context.split",
        "context.fixed",
        "context.line",
        "context.mixed",
        "context.hierarchical",
        "context.remap",
        "tiles",
    ],
)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"equipoise.balance.{name}")
    assert doctest.testmod(module).failed == 0
