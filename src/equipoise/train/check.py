"""Prove that a layout equals one rank: the loss and every gradient, on uneven documents.

What it decides
    A *case* is a layout (ranks, ZeRO stage), a packing, a window and a recomputation. Its
    loss and gradients are held against the plain model, in one process, in fp32, one document
    at a time, in the order of the stream, with autograd's accumulation alone: no mesh, no
    packer, no sharding in it. Under ``in-order`` documents are cut at window edges, so that
    baseline is given the same cut pieces. Every rank compares what it holds itself: copies of
    a gradient that ZeRO 0 keeps may differ.

    The error of a parameter is ``max |g - reference| / max |reference|`` over its elements.

Kept true (tests/multi/test_check.py)
    A gradient that is wrong on one rank alone, or in one parameter alone, fails the case and
    names the parameter.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from equipoise.balance.pack import pack_step, rank_seconds, skew
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.cost.curve import counted_curve
from equipoise.nn.decoder import Decoder, initialize, set_recompute
from equipoise.parallel.zero import ShardedDecoder
from equipoise.spec.model import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run import PackSpec, Policy, Recompute

TOLERANCE = 1e-5
"""Largest error of a loss or gradient in fp32, relative to its scale (design, Tests)."""

_DOCUMENT_TOKENS = (173, 5, 1, 64, 97, 31, 8, 129, 2, 40, 77, 200)


@dataclass(frozen=True, slots=True)
class Case:
    """One layout and packing to be proven."""

    ranks: int
    zero: Literal[0, 1, 2, 3]
    policy: Policy
    context_tokens: int
    recompute: Recompute


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a case is from one rank."""

    case: Case
    micro_batches: int
    loss_error: float
    gradient_error: float
    worst_parameter: str
    skew: float

    @property
    def is_exact(self) -> bool:
        """Within the tolerance."""
        return max(self.loss_error, self.gradient_error) <= TOLERANCE


def all_cases(ranks: int) -> list[Case]:
    """Every ZeRO stage, packing, accumulation and recomputation on up to ``ranks`` ranks."""
    cases = []
    for zero in (0, 1, 2, 3):
        for policy in ("in-order", "fixed", "by-tokens", "by-work"):
            cases += [  # with few and with many micro-batches
                Case(ranks, zero, policy, context_tokens, "none") for context_tokens in (512, 256)
            ]
        cases.append(Case(ranks, zero, "by-work", 512, "full"))
    return cases


@dataclass(frozen=True, slots=True)
class _Sample:
    """Documents of random tokens; what both sides compute on."""

    tokens: list[torch.Tensor]

    @classmethod
    def draw(cls, vocab: int) -> "_Sample":
        generator = torch.Generator().manual_seed(0)
        return cls([torch.randint(vocab, (n,), generator=generator) for n in _DOCUMENT_TOKENS])

    @property
    def pieces(self) -> Pieces:
        lengths = np.array([len(each) for each in self.tokens], dtype=np.int64)
        index = np.arange(len(lengths), dtype=np.int64)
        return np.stack((index, np.zeros_like(index), lengths), axis=1)

    def piece(self, document: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of one piece; the last token of a document has no label."""
        following = torch.full((stop - start,), -1)
        known = self.tokens[document][start + 1 : stop + 1]
        following[: len(known)] = known
        return self.tokens[document][start:stop], following

    def batch(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        parts = [self.piece(*row) for row in batch.pieces.tolist()]
        empty = torch.zeros(0, dtype=torch.int64)
        tokens = torch.cat([empty, *(tokens for tokens, _ in parts)])
        labels = torch.cat([empty, *(labels for _, labels in parts)])
        return tokens, labels, batch.doc_tokens.tolist()

    def labels(self, packed: PackedStep) -> int:
        return sum(int((self.batch(batch)[1] >= 0).sum()) for batch in packed)


def _pack(case: Case, model: ModelSpec, sample: _Sample) -> PackedStep:
    pack = PackSpec(policy=case.policy, context_tokens=case.context_tokens)
    return pack_step(sample.pieces, pack, case.ranks, counted_curve(model))


@dataclass(frozen=True, slots=True)
class _Reference:
    loss: float
    gradients: dict[str, torch.Tensor]


def _compute_reference(model: ModelSpec, sample: _Sample, packed: PackedStep) -> _Reference:
    decoder = Decoder(model)
    initialize(decoder, 0)
    labels = sample.labels(packed)
    total = 0.0
    for row in _rows(packed):
        tokens, following = sample.piece(*row)
        loss = decoder(tokens, [len(tokens)], labels_T=following) / labels
        loss.backward()
        total += float(loss.detach())
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return _Reference(total, grads)


def _rows(packed: PackedStep) -> tuple[tuple[int, int, int], ...]:
    """Pieces of a step in the order of the stream, however they were packed."""
    return tuple(sorted(tuple(row) for batch in packed for row in batch.pieces.tolist()))


def _run_case(
    ranks: Ranks, case: Case, model: ModelSpec, references: dict[object, _Reference]
) -> Verdict:
    """One rank's part of a case; the verdict is of the rank that is furthest off."""
    sample = _Sample.draw(model.vocab)
    packed = _pack(case, model, sample)
    labels = sample.labels(packed)
    decoder = Decoder(model)
    initialize(decoder, 0)
    set_recompute(decoder, case.recompute == "full")
    sharded = ShardedDecoder(decoder, ranks, zero=case.zero, precision="fp32")
    loss_sum = torch.zeros((), dtype=torch.float64)
    turns = packed.ranks[ranks.rank]
    for index, turn in enumerate(turns):
        tokens, following, doc_tokens = sample.batch(turn)
        last = index == len(turns) - 1 and not sharded.sums_at_end
        sharded.prepare_micro_batch(last=last)
        loss = decoder(tokens, doc_tokens, labels_T=following) / labels
        loss.backward()
        loss_sum += loss.detach()
    if sharded.sums_at_end:
        sharded.sum_gradients()
    ranks.sum_(loss_sum)
    gradients = {
        name: parameter.grad.full_tensor()
        if isinstance(parameter.grad, DTensor)
        else parameter.grad
        for name, parameter in decoder.named_parameters()
    }
    rows = _rows(packed)
    if rows not in references:
        references[rows] = _compute_reference(model, sample, packed)
    expected = references[rows]
    errors = {
        name: _error(gradients[name], gradient) for name, gradient in expected.gradients.items()
    }
    mine = max(errors, key=lambda name: errors[name])
    error, worst = max(ranks.gather_objects((errors[mine], mine)))
    return Verdict(
        case=case,
        micro_batches=packed.micro_batches,
        loss_error=abs(float(loss_sum) - expected.loss) / abs(expected.loss),
        gradient_error=error,
        worst_parameter=worst,
        skew=skew(rank_seconds(packed, counted_curve(model))),
    )


def _error(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    if found is None:
        return float("inf")
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale or 1.0)


def check_cases(ranks: Ranks, cases: list[Case], model: ModelSpec) -> list[Verdict]:
    """Run cases on these ranks, one after another; every rank has the same verdicts."""
    references: dict[object, _Reference] = {}
    return [_run_case(ranks, case, model, references) for case in cases]


def check_layouts(model: ModelSpec, worlds: list[int]) -> list[Verdict]:
    """Every case on every number of ranks, each on real gloo ranks."""
    found: list[Verdict] = []
    for world in worlds:
        found += run_ranks(world, check_cases, all_cases(world), model)[0]
    return found
