"""The sample that every case of ``equipoise check`` computes on, and its reference.

What it decides
    The documents are uneven on purpose. The reference is the plain model in one process, in the
    case's precision, one piece at a time, in the order of the stream, with autograd's accumulation
    alone: no mesh, no packer, no sharding in it. Under ``in-order`` documents are cut at window
    edges, so it gets the same cut pieces.

    Routers begin as if the last step had been out of balance, so that the auxiliary loss is in
    every gradient.

    The error of a parameter is ``max |g - reference| / max |reference|`` over its elements, that
    of the logits is over the largest logit of the sample.

Kept true (tests/multi/check/test_check.py)
    A gradient that is wrong in one parameter alone differs from the reference.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from equipoise.data.batch import Batch
from equipoise.data.cache.store import TokenStore
from equipoise.data.learned import Learned
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.loss import IGNORED
from equipoise.nn.modality.attach import encoders_of, make_encoders
from equipoise.nn.moe.balance import balances, set_loss_scale
from equipoise.nn.packed import PackedModel
from equipoise.nn.project import FP8
from equipoise.spec.modality.encoder import ENCODERS, EncoderSpec
from equipoise.spec.modality.items import Items
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run.lora import LoraSpec
from equipoise.train.check.balanced import router_state
from equipoise.train.check.case import Case, Precision
from equipoise.train.check.items import draw_items, encode_alone, stand_ins
from equipoise.train.trained import choose_trained

Row = tuple[int, int, int]
"""A piece: document, start, stop."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Documents of random tokens."""

    tokens: tuple[Tensor, ...]
    vocab: int
    is_learned: tuple[Tensor, ...] | None = None
    """Whether each token is learned; None if all are."""
    items: Items | None = None
    """Images and sound among the tokens."""

    @classmethod
    def draw(
        cls,
        vocab: int,
        doc_tokens: Sequence[int],
        *,
        masks: bool = False,
        encoders: Sequence[EncoderSpec] = (),
    ) -> "Sample":
        """The same documents on every rank.

        Masked, one document in four is not learned at all, and turns of 1 to 24 tokens alternate
        in the others. With encoders, some tokens stand in for items and are not learned.
        """
        generator = torch.Generator().manual_seed(0)
        drawn = tuple(torch.randint(vocab, (n,), generator=generator) for n in doc_tokens)
        if encoders:
            items = draw_items(doc_tokens, encoders)
            stands = [stand_ins(items, at, tokens) for at, tokens in enumerate(doc_tokens)]
            return cls(drawn, vocab, tuple(torch.from_numpy(~each) for each in stands), items)
        if not masks:
            return cls(drawn, vocab)
        masked = []
        for number, tokens in enumerate(doc_tokens):
            turns = torch.randint(1, 25, (tokens,), generator=generator)
            turn_of = torch.repeat_interleave(torch.arange(tokens), turns)[:tokens]
            masked.append(
                (turn_of % 2 == 1) if number % 4 else torch.zeros(tokens, dtype=torch.bool)
            )
        return cls(drawn, vocab, tuple(masked))

    @property
    def pieces(self) -> Pieces:
        """All documents, whole."""
        lengths = np.array([len(each) for each in self.tokens], dtype=np.int64)
        index = np.arange(len(lengths), dtype=np.int64)
        return np.stack((index, np.zeros_like(index), lengths), axis=1)

    @property
    def store(self) -> TokenStore:
        """The same documents as a run reads them."""
        tokens, learned = torch.cat(self.tokens).numpy(), None
        if self.is_learned is not None:
            learned = Learned.of_mask(torch.cat(self.is_learned).numpy())
        return TokenStore.in_memory(tokens, self.pieces[:, 2], self.vocab, learned, self.items)

    @property
    def labels(self) -> int:
        """Labels of a whole step: tokens that are learned, but the first of a document."""
        if self.is_learned is not None:
            return int(sum(int(each[1:].sum()) for each in self.is_learned))
        return sum(len(each) - 1 for each in self.tokens)

    def piece(self, row: Row) -> Batch:
        """Tokens and labels of one piece."""
        document, start, stop = row
        labels = torch.full((stop - start,), IGNORED)
        known = self.tokens[document][start + 1 : stop + 1]
        if self.is_learned is not None:
            is_learned = self.is_learned[document][start + 1 : stop + 1]
            known = torch.where(is_learned, known, IGNORED)
        labels[: len(known)] = known
        return Batch(self.tokens[document][start:stop], labels, (stop - start,))


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Loss, gradients, and the logits of each piece, of the plain model."""

    loss: float
    gradients: dict[str, Tensor]
    scales: dict[str, float]
    """Largest element of each gradient."""
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

    def gradient_error(self, decoder: PackedModel) -> tuple[float, str]:
        """Error of the worst gradient that is here, and its parameter."""
        errors = [
            (held_error(parameter.grad, self.gradients[name], self.scales[name]), name)
            if name in self.gradients
            else (0.0 if parameter.grad is None else float("inf"), name)
            for name, parameter in decoder.named_parameters()
            if parameter.grad is not None or self.gradients[name].any()
        ]
        return max(errors, default=(0.0, ""))  # a stage may train nothing


def make_theirs(case: Case) -> PackedModel:
    """The model of transformers that the reference and every case begin with, in fp64."""
    # They take seconds to import, and are an extra.
    from equipoise.parallel.theirs.build import build_random, wrap_theirs
    from equipoise.parallel.theirs.shrink import read_config

    theirs = build_random(read_config(case.theirs), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in theirs.parameters():  # biases begin as zeros, norms as ones
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    if getattr(theirs.config, "_experts_implementation", None) is not None:
        theirs.set_experts_implementation("eager")  # the others have no fp64
    wrapped = wrap_theirs(theirs.double(), case.model, context_tokens=max(case.doc_tokens))
    _choose_trained(wrapped, case)
    return wrapped


def make_decoder(case: Case, labels: int) -> Decoder:
    """The decoder that the reference and every case begin with.

    Args:
        case: Sizes, what is trained, and in which precision. Adapters have done some steps.
        labels: What every loss is divided by.
    """
    model = case.model
    decoder = Decoder(model)
    initialize(decoder, 0)
    for balance in balances(decoder):
        states = torch.arange(model.experts)
        if case.router:
            states = torch.tensor(router_state(case.router, model.experts, case.ranks))
        balance.state_X[: model.experts] = states * balance.unit
    set_loss_scale(decoder, 1 / labels)
    _choose_trained(decoder, case)
    if specs := case.resolved.spec.encoders:
        decoder.add_module(ENCODERS, make_encoders(specs, model.hidden, 0))
    if case.precision == "fp8":
        decoder.set_products(FP8)
    return decoder.double() if case.precision == "fp64" else decoder


def _choose_trained(decoder: PackedModel, case: Case) -> None:
    """As a run does, but adapters have done some steps."""
    choose_trained(decoder, case.resolved.spec, case.model)
    for at, (name, weight) in enumerate(decoder.named_parameters()):
        if name.endswith("lora_B"):
            nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(at))


def compute_reference(decoder: PackedModel, sample: Sample, rows: Sequence[Row]) -> Reference:
    """Run the pieces of a step one after another.

    Args:
        decoder: As ``make_decoder`` returns it; gets no gradient.
        sample: Its tokens.
        rows: Its pieces, in the order of the stream.
    """
    decoder = copy.deepcopy(decoder)
    total, logits = 0.0, {}
    for row in rows:
        piece = sample.piece(row)
        refer = _refer(decoder, sample, row)
        loss = refer(piece.tokens_T, piece.doc_tokens, labels_T=piece.labels_T) / sample.labels
        if loss.requires_grad:  # a piece of text alone has none where encoders alone are trained
            loss.backward()
        total += float(loss.detach())
        with torch.no_grad():
            logits[row[:2]] = refer(piece.tokens_T, piece.doc_tokens)
    named = decoder.named_parameters()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}
    scales = {name: float(grad.abs().max()) for name, grad in grads.items()}
    # A bias of keys may have a gradient of zero, but for rounding.
    least = _LEAST_SCALE * max(scales.values())
    scales = {name: max(scale, least) for name, scale in scales.items()}
    largest = max(float(each.abs().max()) for each in logits.values())
    return Reference(total, grads, scales, logits, largest)


def _refer(decoder: PackedModel, sample: Sample, row: Row) -> Callable[..., Tensor]:
    """What computes a piece on one rank, with its items where it has any."""
    encoders = encoders_of(decoder)
    if encoders is None or sample.items is None:
        return decoder.reference
    inserted = encode_alone(encoders, sample.items, *row)
    return partial(decoder, inserted=inserted)


def rows_of(packed: PackedStep) -> tuple[Row, ...]:
    """Pieces of a step in the order of the stream, however they were packed and divided."""
    stops: dict[tuple[int, int], int] = {}
    for batch in packed:
        begins = batch.begins
        for row, begin in zip(batch.pieces.tolist(), begins.tolist(), strict=True):
            stops[row[0], begin] = max(row[2], stops.get((row[0], begin), 0))
    return tuple(sorted((*begin, stop) for begin, stop in stops.items()))


_Encoders = tuple[EncoderSpec, ...]

_Model = tuple[
    *tuple[ModelSpec, Precision, tuple[int, ...], bool, LoraSpec, tuple[str, ...], str],
    *tuple[tuple[str, int], _Encoders],
]

_LEAST_SCALE = 1e-9
"""Smallest scale of a gradient, over the largest of all."""


class References:
    """Documents, first weights and references of cases, each made when first asked for."""

    def __init__(self) -> None:
        self._samples: dict[tuple[int, tuple[int, ...], bool, _Encoders], Sample] = {}
        self._decoders: dict[_Model, PackedModel] = {}
        self._references: dict[tuple[_Model, tuple[Row, ...]], Reference] = {}

    def sample(self, case: Case) -> Sample:
        """Its documents."""
        encoders = case.resolved.spec.encoders
        key = case.model.vocab, case.doc_tokens, case.masks, encoders
        if key not in self._samples:
            self._samples[key] = Sample.draw(*key[:2], masks=case.masks, encoders=encoders)
        return self._samples[key]

    def decoder(self, case: Case) -> PackedModel:
        """Its decoder before the step, not shared with anybody."""
        return copy.deepcopy(self._first_decoder(case))

    def of(self, case: Case, packed: PackedStep) -> Reference:
        """What its step must equal."""
        key = self._model(case), rows_of(packed)
        if key not in self._references:
            first = self._first_decoder(case)
            self._references[key] = compute_reference(first, self.sample(case), key[1])
        return self._references[key]

    def _first_decoder(self, case: Case) -> PackedModel:
        key = self._model(case)
        if key not in self._decoders:
            labels = self.sample(case).labels
            self._decoders[key] = make_theirs(case) if case.theirs else make_decoder(case, labels)
        return self._decoders[key]

    def _model(self, case: Case) -> _Model:
        routed = case.router, case.ranks * bool(case.router)
        encoders = case.resolved.spec.encoders
        kind = case.masks, case.lora, case.train.freeze, case.theirs, routed, encoders
        return case.model, case.precision, case.doc_tokens, *kind


def loss_error(computed: float, expected: float) -> float:
    """Difference over the reference; infinite where the loss is not a number.

    >>> loss_error(3.0, 2.0), loss_error(math.nan, 2.0)
    (0.5, inf)
    """
    error = abs(computed - expected) / (abs(expected) or 1.0)
    return error if math.isfinite(error) else float("inf")


def relative_error(computed: Tensor | None, expected: Tensor, scale: float | None = None) -> float:
    """Largest difference of any element over the largest element of the reference.

    What is missing or not a number is infinitely wrong.

    Args:
        computed: The case's.
        expected: The reference's.
        scale: Instead of the largest element.

    >>> relative_error(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 4.0]))
    0.25
    >>> relative_error(None, torch.ones(1))
    inf
    >>> relative_error(torch.tensor([torch.nan]), torch.ones(1))
    inf
    """
    if computed is None:
        return float("inf")
    if not computed.numel():
        return 0.0
    scale = float(expected.abs().max()) if scale is None else scale
    error = float((computed.to(expected.device) - expected).abs().max()) / (scale or 1.0)
    return error if math.isfinite(error) else float("inf")


def held_error(computed: Tensor | None, expected: Tensor, scale: float | None = None) -> float:
    """``relative_error`` of the part of a tensor that this rank holds; nothing is gathered.

    Args:
        computed: The case's: whole, or placed on a mesh.
        expected: The reference's, whole.
        scale: Instead of the largest element of the whole.
    """
    scale = float(expected.abs().max()) if scale is None else scale
    if not isinstance(computed, DTensor):
        return relative_error(computed, expected, scale)
    mesh, places = computed.device_mesh, computed.placements
    placed = distribute_tensor(expected, mesh, places, src_data_rank=None)
    return relative_error(computed.to_local(), placed.to_local(), scale)
