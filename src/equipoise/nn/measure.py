"""Measure this machine's price of a document: the curve that packing and forecasts read.

Why
    The price of attention depends on kernel, dtype and length in ways that no formula predicts.
    Two seconds of measuring, once per machine and model and cached, replace the formulas.

What it decides
    Attention forward and backward at a geometric ladder of lengths, on the model's own heads;
    the linear layers from decoders of one and two layers over many short documents: the
    difference is a layer, the remainder is embedding and head. The clock is the one of a run's
    ``busy_s`` (``nn.device.clock``).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from equipoise.cost.curve import LoadCurve
from equipoise.nn.attention import attend_documents
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.device.clock import busy_clock
from equipoise.nn.loss import IGNORED
from equipoise.nn.packed import PackedModel
from equipoise.nn.project import PLAIN, Products
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import LayerRecompute, attention_repeats, layer_recompute
from equipoise.spec.run.spec import Recompute

AttendDocuments = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]
"""Attention inside each document of a pack; as ``nn.attention.attend_documents``."""

_SHORT_TOKENS = 64
_LONG_S = 0.25
"""A call that takes longer is not run a third time [s]."""


def _fastest_s(call: Callable[[], None], *, device: torch.device, budget_s: float) -> float:
    """The shortest of several runs after a warm-up: at least three, ``budget_s`` in all.

    For a long call two runs are enough, one of them the warm-up: the first run's extra cost is
    small beside the call, and a user is waiting for the run to start.
    """
    clock = busy_clock(device)

    def once() -> float:
        start = clock()
        call()
        return clock() - start

    first = once()
    if first >= _LONG_S:
        return min(first, once())
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 3 or (spent < budget_s and runs < 20):
        took = once()
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def gemm_flop_per_s(device: torch.device, dtype: torch.dtype, *, size: int = 1024) -> float:
    """This machine's rate on a square matmul, the peak for utilisation [FLOP/s]."""
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)

    def multiply() -> None:
        torch.mm(left, right)

    return 2.0 * size**3 / _fastest_s(multiply, device=device, budget_s=0.15)


@dataclass(frozen=True, slots=True)
class OwnModel:
    """How a decoder of our own is measured."""

    model: ModelSpec
    products: Products = PLAIN

    @property
    def attends(self) -> list[tuple[float, AttendDocuments]]:
        """Attention of each kind of layer, with the share of layers that are of it."""
        return [(1.0, attend_documents)]

    def build(self, layers: int) -> PackedModel:
        """The first of its layers, with embedding and head."""
        decoder = Decoder(dataclasses.replace(self.model, layers=layers))
        initialize(decoder, 0)
        decoder.set_products(self.products)
        return decoder


class MeasuredModel(Protocol):
    """A model whose parts can be run alone."""

    @property
    def attends(self) -> list[tuple[float, AttendDocuments]]:
        """Attention of each kind of layer, with the share of layers that are of it."""

    def build(self, layers: int) -> PackedModel:
        """Its first ``layers`` layers, with experts if it has any, embedding and head."""


def _attention_s(
    model: ModelSpec,
    measured: MeasuredModel,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Seconds of the mean layer's attention, forward and backward."""
    tokens = sum(lengths)
    q, k, v = (
        torch.randn(tokens, heads, model.score_width, device=device, dtype=dtype).requires_grad_()
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )

    def run(attend: AttendDocuments) -> None:
        out = attend(q, k, v, lengths)
        out.backward(out.detach())

    return sum(
        share * _fastest_s(partial(run, attend), device=device, budget_s=0.05)
        for share, attend in measured.attends
    )


def _decoder_s(
    measured: MeasuredModel,
    layers: int,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    recompute: LayerRecompute,
    *,
    has_labels: bool = True,
) -> float:
    decoder = measured.build(layers)
    decoder.set_recompute(recompute)
    decoder = decoder.to(device=device, dtype=dtype)
    tokens_T = torch.arange(sum(lengths), device=device) % decoder.model.vocab
    labels_T = tokens_T if has_labels else torch.full_like(tokens_T, IGNORED)

    def run() -> None:
        decoder(tokens_T, lengths, labels_T=labels_T).backward()
        decoder.zero_grad(set_to_none=True)

    return _fastest_s(run, device=device, budget_s=0.3)


def touch_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Run a tiny decoder once, forward, backward and update.

    The first use of a kernel reads its code from disk and allocates its buffers: 60 MiB and a
    tenth of a second that must not count towards a step.
    """
    tiny = ModelSpec(layers=1, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=16, head_width=8)
    decoder = Decoder(tiny).to(device=device, dtype=dtype)
    tokens_T = torch.arange(16, device=device)
    decoder(tokens_T, [16], labels_T=tokens_T).backward()
    torch.optim.AdamW(decoder.parameters(), fused=True).step()


def measure_curve(
    model: ModelSpec,
    *,
    context_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    recompute: Recompute,
    masks: bool = False,
    measured: MeasuredModel | None = None,
    products: Products = PLAIN,
) -> LoadCurve:
    """Measure the seconds of a rank's forward and backward on this machine.

    Args:
        model: The sizes of the model that will run.
        context_tokens: Longest document that the curve must cover.
        device: Where it will run.
        dtype: Dtype of activations.
        recompute: The run's activation recomputation.
        masks: Whether some tokens have no label, so that what they save is measured too.
        measured: What is run; a decoder of these sizes unless given.
        products: Of that decoder.

    Returns:
        A curve with the fastest of several runs at each point.

    Cost: two to four seconds on one core for models of up to 30M weights.
    """
    alike = dataclasses.replace(model, dense_layers=0, expert_every=1)  # of layers with experts
    measured = measured or OwnModel(alike, products)
    ladder = sorted({min(context_tokens, 16 * 2**power) for power in range(24)})
    # A backward is 2.5 forwards of attention; some layers run one more.
    passes = 1 + attention_repeats(recompute, model.layers) / model.layers / 3.5
    doc_ns = []
    for tokens in ladder:
        copies = max(1, 256 // tokens)
        took_s = _attention_s(model, measured, [tokens] * copies, device, dtype) / copies
        doc_ns.append(took_s * passes * model.layers * 1e9)
    documents = max(2, min(context_tokens, 2048) // _SHORT_TOKENS)
    shorts = [min(_SHORT_TOKENS, context_tokens)] * documents
    attention_s = _attention_s(model, measured, shorts, device, dtype)
    kinds = Counter(layer_recompute(recompute, layer) for layer in range(model.layers))
    layer_s = outside_s = 0.0
    for kind, layers in kinds.items():
        one_s, two_s = (_decoder_s(measured, n, shorts, device, dtype, kind) for n in (1, 2))
        own_s = attention_s * (1 + attention_repeats(kind, 1) / 3.5)
        each_s = max(two_s - one_s - own_s, 1e-9)
        layer_s += layers / model.layers * each_s
        outside_s += layers / model.layers * max(one_s - own_s - each_s, 1e-9)
    mean = model.layer_matmul_params / alike.layer_matmul_params
    head_s = 0.0
    if masks:
        kind = max(kinds, key=lambda each: kinds[each])
        with_s, without_s = (
            _decoder_s(measured, 1, shorts, device, dtype, kind, has_labels=each)
            for each in (True, False)
        )
        head_s = min(max(with_s - without_s, 0.0), outside_s)
    few_s = max(_decoder_s(measured, 1, [1], device, dtype, kind) for kind in kinds)
    return LoadCurve(
        fixed_ns=few_s * model.layers * 1e9,
        ns_per_token=(layer_s * mean * model.layers + outside_s) / sum(shorts) * 1e9,
        doc_tokens=tuple(float(tokens) for tokens in ladder),
        doc_ns=tuple(doc_ns),
        peak_flop_per_s=gemm_flop_per_s(device, dtype),
        measured=True,
        head_ns=head_s / sum(shorts) * 1e9,
    )
