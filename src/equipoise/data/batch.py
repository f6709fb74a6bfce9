"""The executor of a pack: turns pieces into token and label tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from equipoise.base.arrays import Ints
from equipoise.data.cache.store import TokenStore
from equipoise.nn.device.send import send
from equipoise.nn.loss import IGNORED
from equipoise.spec.pack import MicroBatch, Pieces


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch as the model takes it."""

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    doc_tokens: tuple[int, ...]


def count_labels(pieces: Pieces, store: TokenStore) -> Ints:
    """The number of labels in each piece: of its tokens, those whose next token is learned.

    Repeated documents may have numbers of their own, as after ``data.stream.tell_apart``.

    Returns:
        int64[pieces].
    """
    document = pieces[:, 0] % store.documents
    last = np.minimum(pieces[:, 2] + 1, store.doc_tokens[document])
    first = np.minimum(pieces[:, 1] + 1, last)
    if store.learned is None:
        return last - first
    begin = store.offsets[document]
    return store.learned.count(begin + first, begin + last)


def label_counter(store: TokenStore) -> Callable[[Pieces], Ints] | None:
    """What counts the labels of pieces; None where every token is learned."""
    return None if store.learned is None else partial(count_labels, store=store)


def make_batch(store: TokenStore, micro_batch: MicroBatch, device: torch.device) -> Batch:
    """Read a micro-batch's tokens; each token's label is the next one of its document.

    A token whose next one is not learned has no label. A piece that ends inside its document takes
    the following token as its last label: cutting a document loses attention, never a label.

    Raises:
        DataError: the token cache is damaged where it is read.
    """
    tokens = np.empty(micro_batch.tokens, dtype=np.int64)
    labels = np.empty(micro_batch.tokens, dtype=np.int64)
    at = 0
    for number, start, stop in micro_batch.pieces.tolist():
        document, length = number % store.documents, stop - start
        # One token more if the document goes on after the piece: the last label.
        read = store.read(document, start, min(stop + 1, int(store.doc_tokens[document])))
        tokens[at : at + length] = read[:length]
        following = read[1:]
        if store.learned is not None:
            begin = int(store.offsets[document]) + start + 1
            is_learned = store.learned.mask(begin, begin + len(following))
            following = np.where(is_learned, following, IGNORED)
        labels[at : at + len(following)] = following
        labels[at + len(following) : at + length] = IGNORED
        at += length
    lengths = tuple(int(length) for length in micro_batch.doc_tokens)
    tokens_T, labels_T = (send(torch.from_numpy(each), device) for each in (tokens, labels))
    return Batch(tokens_T, labels_T, lengths)
