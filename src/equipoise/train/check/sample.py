"""What every case of ``equipoise check`` computes on, and what it is held against.

What it decides
    The documents are uneven on purpose: 12 of them, of 1 to 200 tokens. The reference is the
    plain model in one process, in fp32, one piece at a time, in the order of the stream, with
    autograd's accumulation alone: no mesh, no packer, no sharding in it. Under ``in-order``
    documents are cut at window edges, so it is given the same cut pieces.

    Models with experts are computed in fp64. In fp32 two experts whose scores differ by rounding
    may be ranked one way on one layout and the other way on another, and then all that follows
    differs, rightly. Their routers begin as if the last step had been out of balance, so that the
    auxiliary loss is in every gradient.

Kept true (tests/multi/check/test_check.py)
    A gradient that is wrong in one parameter alone differs from the reference.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from equipoise.data.batch import Batch
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.loss import IGNORED
from equipoise.nn.moe.balance import balances, set_loss_scale
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces

DOCUMENT_TOKENS = (173, 5, 1, 64, 97, 31, 8, 129, 2, 40, 77, 200)

Row = tuple[int, int, int]
"""A piece: document, start, stop."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Documents of random tokens."""

    tokens: tuple[Tensor, ...]

    @classmethod
    def draw(cls, vocab: int, doc_tokens: Sequence[int] = DOCUMENT_TOKENS) -> "Sample":
        """The same documents on every rank."""
        generator = torch.Generator().manual_seed(0)
        return cls(tuple(torch.randint(vocab, (n,), generator=generator) for n in doc_tokens))

    @property
    def pieces(self) -> Pieces:
        """All documents, whole."""
        lengths = np.array([len(each) for each in self.tokens], dtype=np.int64)
        index = np.arange(len(lengths), dtype=np.int64)
        return np.stack((index, np.zeros_like(index), lengths), axis=1)

    def batch(self, batch: MicroBatch) -> Batch:
        """Tokens and labels of a micro-batch; the last token of a document has no label."""
        parts = [self._piece(*row) for row in batch.pieces.tolist()]
        empty = torch.zeros(0, dtype=torch.int64)
        tokens = torch.cat([empty, *(tokens for tokens, _ in parts)])
        labels = torch.cat([empty, *(labels for _, labels in parts)])
        return Batch(tokens, labels, tuple(batch.doc_tokens.tolist()))

    def _piece(self, document: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        labels = torch.full((stop - start,), IGNORED)
        known = self.tokens[document][start + 1 : stop + 1]
        labels[: len(known)] = known
        return self.tokens[document][start:stop], labels

    def count_labels(self, packed: PackedStep) -> int:
        """Labels of a whole step: what every loss is divided by."""
        return sum(int((self.batch(batch).labels_T != IGNORED).sum()) for batch in packed)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Loss, gradients, and the logits of each piece, of the plain model."""

    loss: float
    gradients: dict[str, Tensor]
    logits: dict[tuple[int, int], Tensor]
    """By the document and the first token of each piece."""
    largest_logit: float

    def logits_of(self, batch: MicroBatch) -> Tensor:
        """Logits of a micro-batch, in its order."""
        parts = [next(iter(self.logits.values()))[:0]]
        for row, before in zip(batch.pieces.tolist(), batch.history_tokens.tolist(), strict=True):
            document, start, stop = row
            begin = start - before
            parts.append(self.logits[document, begin][start - begin : stop - begin])
        return torch.cat(parts)


def make_decoder(model: ModelSpec, labels: int) -> Decoder:
    """The decoder that the reference and every case begin with.

    Args:
        model: Its sizes.
        labels: What every loss is divided by.
    """
    decoder = Decoder(model)
    initialize(decoder, 0)
    for balance in balances(decoder):
        balance.state_X.copy_(torch.arange(model.experts))
    set_loss_scale(decoder, 1 / labels)
    return decoder.double() if model.experts else decoder


def compute_reference(decoder: Decoder, sample: Sample, packed: PackedStep) -> Reference:
    """Run the pieces of a step one after another.

    Args:
        decoder: As ``make_decoder`` returns it; gets no gradient.
        sample: Its tokens.
        packed: Its pieces.
    """
    labels = sample.count_labels(packed)
    decoder = copy.deepcopy(decoder)
    total, logits = 0.0, {}
    for row in rows_of(packed):
        piece = sample.batch(MicroBatch(np.array([row])))
        loss = decoder(piece.tokens_T, piece.doc_tokens, labels_T=piece.labels_T) / labels
        loss.backward()
        total += float(loss.detach())
        with torch.no_grad():
            logits[row[:2]] = decoder(piece.tokens_T, piece.doc_tokens)
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    largest = max(float(each.abs().max()) for each in logits.values())
    return Reference(total, grads, logits, largest)


def rows_of(packed: PackedStep) -> tuple[Row, ...]:
    """Pieces of a step in the order of the stream, however they were packed and divided."""
    stops: dict[tuple[int, int], int] = {}
    for batch in packed:
        begins = batch.begins
        for row, begin in zip(batch.pieces.tolist(), begins.tolist(), strict=True):
            stops[row[0], begin] = max(row[2], stops.get((row[0], begin), 0))
    return tuple(sorted((*begin, stop) for begin, stop in stops.items()))


class References:
    """References by the pieces that they are of, each computed when first asked for."""

    def __init__(self, model: ModelSpec) -> None:
        self.model, self.sample = model, Sample.draw(model.vocab)
        self._found: dict[tuple[Row, ...], Reference] = {}

    def of(self, packed: PackedStep) -> Reference:
        """What a step must equal."""
        rows = rows_of(packed)
        if rows not in self._found:
            decoder = make_decoder(self.model, self.sample.count_labels(packed))
            self._found[rows] = compute_reference(decoder, self.sample, packed)
        return self._found[rows]


def relative_error(found: Tensor | None, expected: Tensor, scale: float | None = None) -> float:
    """Largest difference of any element over the largest element of the reference.

    What is missing or not a number is infinitely wrong.

    Args:
        found: Of the case.
        expected: Of the reference.
        scale: Instead of the largest element.

    >>> relative_error(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 4.0]))
    0.25
    >>> relative_error(None, torch.ones(1))
    inf
    >>> relative_error(torch.tensor([torch.nan]), torch.ones(1))
    inf
    """
    if found is None:
        return float("inf")
    if not found.numel():
        return 0.0
    scale = float(expected.abs().max()) if scale is None else scale
    error = float((found - expected).abs().max()) / (scale or 1.0)
    return error if math.isfinite(error) else float("inf")


def held_error(found: Tensor | None, expected: Tensor, scale: float | None = None) -> float:
    """``relative_error`` of the part of a tensor that this rank holds; nothing is gathered.

    Args:
        found: Of the case: whole, or placed on a mesh.
        expected: Of the reference, whole.
        scale: Instead of the largest element of the whole.
    """
    scale = float(expected.abs().max()) if scale is None else scale
    if not isinstance(found, DTensor):
        return relative_error(found, expected, scale)
    placed = distribute_tensor(expected, found.device_mesh, found.placements, src_data_rank=None)
    return relative_error(found.to_local(), placed.to_local(), scale)
