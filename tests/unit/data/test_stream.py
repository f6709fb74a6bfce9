"""Hypothesis: each token once, no piece too long, any cutting into steps is the same stream."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.data.stream import DocumentStream, tell_apart

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)
seeds = st.integers(0, 2**63 - 1)
contexts = st.integers(1, 12)


def spelled(pieces: np.ndarray) -> list[tuple[int, int]]:
    """Each token of some pieces as (document, offset)."""
    return [(doc, at) for doc, start, stop in pieces.tolist() for at in range(start, stop)]


@given(lengths, seeds, contexts, st.integers(0, 3))
def test_an_epoch_has_every_token_once(doc_tokens, seed, context, epoch):
    stream = DocumentStream(doc_tokens, seed=seed, context_tokens=context)
    total = sum(doc_tokens)
    tokens = spelled(stream.step(epoch * total, total))
    assert len(tokens) == total
    assert set(tokens) == {(doc, at) for doc, n in enumerate(doc_tokens) for at in range(n)}


@given(lengths, seeds, contexts, st.integers(0, 400), st.integers(1, 400))
def test_pieces_are_cut_at_windows_ends_and_edges_only(doc_tokens, seed, context, position, step):
    pieces = DocumentStream(doc_tokens, seed=seed, context_tokens=context).step(position, step)
    assert pieces.dtype == np.int64
    assert (pieces[:, 2] - pieces[:, 1]).sum() == step
    assert (pieces[:, 1] < pieces[:, 2]).all()
    assert (pieces[:, 1] // context == (pieces[:, 2] - 1) // context).all()
    ends = np.asarray(doc_tokens)[pieces[:, 0]]
    assert ((pieces[1:, 1] == 0) | (pieces[1:, 1] % context == 0)).all()
    assert ((pieces[:-1, 2] == ends[:-1]) | (pieces[:-1, 2] % context == 0)).all()


@given(lengths, seeds, contexts, st.lists(st.integers(1, 60), min_size=1, max_size=10))
def test_any_steps_put_together_are_one_large_step(doc_tokens, seed, context, steps):
    stream = DocumentStream(doc_tokens, seed=seed, context_tokens=context)
    edges = np.cumsum([0, *steps]).tolist()
    apart = [token for a, b in pairwise(edges) for token in spelled(stream.step(a, b - a))]
    assert apart == spelled(stream.step(0, edges[-1]))


@given(lengths, seeds, contexts, st.lists(st.integers(0, 500), min_size=1, max_size=8))
def test_the_answer_does_not_depend_on_what_was_asked_before(doc_tokens, seed, context, places):
    used = DocumentStream(doc_tokens, seed=seed, context_tokens=context)
    for place in places:
        new = DocumentStream(doc_tokens, seed=seed, context_tokens=context)
        assert np.array_equal(used.step(place, 20), new.step(place, 20))


@given(lengths, seeds, contexts, st.integers(0, 300), st.integers(1, 300))
def test_it_equals_the_stream_written_out_token_by_token(doc_tokens, seed, context, position, step):
    stream = DocumentStream(doc_tokens, seed=seed, context_tokens=context)
    total = sum(doc_tokens)
    axis = []
    for epoch in range((position + step) // total + 1):
        draws = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
        order = np.argsort(draws.random_raw(len(doc_tokens)), kind="stable")
        axis += [(int(doc), at) for doc in order for at in range(doc_tokens[doc])]
    assert spelled(stream.step(position, step)) == axis[position : position + step]


def test_epochs_and_seeds_have_orders_of_their_own():
    stream = DocumentStream([1] * 100, seed=0, context_tokens=1)
    other = DocumentStream([1] * 100, seed=1, context_tokens=1)
    first = stream.step(0, 100)[:, 0].tolist()
    assert first != stream.step(100, 100)[:, 0].tolist()
    assert first != other.step(0, 100)[:, 0].tolist()
    assert first != list(range(100))


def test_the_order_is_the_same_on_every_day():
    stream = DocumentStream([1] * 8, seed=7, context_tokens=1)
    assert stream.step(0, 8)[:, 0].tolist() == [4, 1, 6, 3, 2, 7, 5, 0]
    assert stream.step(8, 8)[:, 0].tolist() == [3, 1, 6, 2, 5, 4, 0, 7]


def test_one_document_and_a_step_of_many_epochs():
    pieces = DocumentStream([3], seed=0, context_tokens=2).step(1, 9)
    assert pieces.tolist() == [[0, 1, 2], [0, 2, 3], *[[0, 0, 2], [0, 2, 3]] * 2, [0, 0, 1]]


def test_large_positions_are_reached_at_once():
    stream = DocumentStream([1000] * 1000, seed=0, context_tokens=128)
    pieces = stream.step(10**15 + 17, 16_384)
    assert (pieces[:, 2] - pieces[:, 1]).sum() == 16_384


@pytest.mark.parametrize(
    ("doc_tokens", "context", "text"),
    [
        (
            [],
            4,
            "A stream needs at least 1 document, but there are 0. Set data.path to a corpus with "
            "text in it.",
        ),
        (
            [3, 0, 2],
            4,
            "Document 1 of 3 has 0 tokens, but each needs at least 1. Leave out empty documents.",
        ),
        (
            [3, 2.5],
            4,
            "Document 1 of 2 has 2.5 tokens, which is not a whole number. Count its tokens again.",
        ),
        (
            [3],
            0,
            "context_tokens = 0 is below 1. Set pack.context_tokens to the longest piece that the "
            "model reads.",
        ),
    ],
)
def test_wrong_streams(message, doc_tokens, context, text):
    assert message(DataError, DocumentStream, doc_tokens, seed=0, context_tokens=context) == text


def test_wrong_steps(message):
    stream = DocumentStream([3], seed=0, context_tokens=2)
    assert message(DataError, stream.step, 0, 0) == (
        "step_tokens = 0 is below 1. Set pack.step_tokens to the tokens of one optimizer step."
    )
    assert message(DataError, stream.step, -5, 1) == (
        "position_tokens = -5 is before the stream's start. Give the number of tokens already "
        "read, at least 0."
    )


@given(lengths, seeds, contexts, st.integers(0, 400), st.integers(1, 400))
def test_documents_that_come_again_are_told_apart(doc_tokens, seed, context, position, step):
    count = len(doc_tokens)
    stream = DocumentStream(doc_tokens, seed=seed, context_tokens=context)
    pieces = stream.step(position, step)
    apart = tell_apart(pieces, count)
    tokens = spelled(apart)
    assert len(set(tokens)) == len(tokens)
    assert (apart[:, 0] % count == pieces[:, 0]).all()
    assert (apart[:, 1:] == pieces[:, 1:]).all()
    if len(set(spelled(pieces))) == len(tokens):
        assert len(set(apart[:, 0].tolist())) <= len(set(pieces[:, 0].tolist())) + 1
