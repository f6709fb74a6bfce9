"""Runs of learned tokens: counts are those of the mask they were made of."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data.batch import count_labels, make_batch
from equipoise.data.cache.store import TokenStore
from equipoise.data.learned import Learned, LearnedRuns
from equipoise.nn.loss import IGNORED
from equipoise.spec.pack import MicroBatch

MASKS = st.lists(st.booleans(), min_size=1, max_size=60)


@given(MASKS, st.data())
def test_counts_and_parts_are_the_masks(mask: list[bool], data: st.DataObject) -> None:
    learned = Learned.of_mask(mask)
    start = data.draw(st.integers(0, len(mask)))
    stop = data.draw(st.integers(start, len(mask)))
    assert learned.mask(start, stop).tolist() == mask[start:stop]
    counted = learned.count(np.array([start, 0]), np.array([stop, len(mask)]))
    assert counted.tolist() == [sum(mask[start:stop]), sum(mask)]


@given(MASKS, MASKS)
def test_runs_of_parts_are_those_of_the_whole(first: list[bool], second: list[bool]) -> None:
    runs = LearnedRuns()
    for part in (first, second):
        runs.add(np.array(part))
    whole = Learned(runs.finish())
    assert whole.mask(0, len(first) + len(second)).tolist() == first + second


@given(st.lists(MASKS, min_size=1, max_size=5), st.data())
def test_labels_of_pieces_are_counted_as_they_are_read(
    masks: list[list[bool]], data: st.DataObject
) -> None:
    lengths = np.array([len(mask) for mask in masks])
    tokens = np.arange(lengths.sum())
    flat = np.concatenate(masks)
    store = TokenStore.in_memory(tokens, lengths, len(tokens), Learned.of_mask(flat))
    number = data.draw(st.integers(0, 2 * len(masks) - 1))  # a second epoch's in the same step
    document = number % len(masks)
    start = data.draw(st.integers(0, int(lengths[document]) - 1))
    stop = data.draw(st.integers(start + 1, int(lengths[document])))
    pieces = np.array([[number, start, stop], [document, 0, lengths[document]]])
    labels = make_batch(store, MicroBatch(pieces), torch.device("cpu")).labels_T.numpy()
    counted = count_labels(pieces, store)
    own = labels[: stop - start]
    assert counted.tolist() == [(own != IGNORED).sum(), (labels[stop - start :] != IGNORED).sum()]
    begin = int(store.offsets[document])
    last = min(stop + 1, int(lengths[document]))
    following = [
        tokens[begin + at] if flat[begin + at] else IGNORED for at in range(start + 1, last)
    ]
    assert own.tolist() == following + [IGNORED] * (stop - start - len(following))
