"""A step's kernels against the roofline: what each takes beside what its FLOP and bytes allow.

The roofline is the longer of FLOP at the device's peak in bf16 and bytes at its memory's rate, each
operand read once and each result written once. Where the device is in the table, products are also
held against the price that plans use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.lib.device import bf16_peak, call_s, device_facts, known_device, run_here
from bench.lib.stamp import environment, spread
from equipoise.cost.kernel import gemm_s
from equipoise.cost.work import causal_pairs
from equipoise.nn.attention import pack_attention
from equipoise.nn.loss import head_loss
from equipoise.nn.norm import RmsNorm
from equipoise.nn.project import add_swiglu, project
from equipoise.nn.rope import rotary_frequencies, rotary_table, rotate
from equipoise.spec.model.presets import ModelSpec

_BF16 = torch.bfloat16


MODEL = ModelSpec(
    layers=1, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, head_width=128
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run."""

    model: ModelSpec = MODEL
    doc_tokens: tuple[int, ...] = (8192, 4096, 2048, 1024, 512, 256, 128, 128)
    stream_elements: int = 1 << 28
    peak_size: int = 8192
    samples: int = 5
    calls: int = 10


@dataclass(frozen=True, slots=True)
class Kernel:
    """A call, and what it needs at least."""

    call: Callable[[], object]
    flop: float
    bytes: float


def measure(device: torch.device, sizes: Sizes | None = None) -> dict[str, Any]:
    """Time every kernel."""
    sizes = sizes or Sizes()
    peak, source = bf16_peak(device, size=sizes.peak_size)
    known = known_device(device)
    stream = _stream_bytes_per_s(device, sizes)
    rate = known.memory_bytes_per_s if known is not None else stream
    rows = {}
    for name, kernel in _kernels(device, sizes).items():
        taken = spread(call_s(kernel.call, device, samples=sizes.samples, calls=sizes.calls))
        roofline_s = max(kernel.flop / peak, kernel.bytes / rate)
        rows[name] = {
            "s": taken,
            "roofline_s": roofline_s,
            "share_of_roofline": roofline_s / taken["median"],
            "bound_by": "FLOP" if kernel.flop / peak > kernel.bytes / rate else "bytes",
        }
    return {
        "what": f"kernels over {sum(sizes.doc_tokens):,} packed tokens, bf16 (measured)",
        **device_facts(device),
        "documents": list(sizes.doc_tokens),
        "peak_flop_per_s": peak,
        "peak_from": source,
        "memory_bytes_per_s": rate,
        "stream_bytes_per_s": stream,
        "kernels": rows,
        "products predicted": _predicted(device, sizes),
        "environment": environment(),
    }


def _stream_bytes_per_s(device: torch.device, sizes: Sizes) -> float:
    x = torch.ones(sizes.stream_elements, dtype=_BF16, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / min(call_s(lambda: y.copy_(x), device, calls=sizes.calls))


def _shapes(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """Products of a layer: rows, outputs and inputs of each."""
    model, tokens = sizes.model, sum(sizes.doc_tokens)
    query = model.heads * model.head_width
    return {
        "product hidden x query": (tokens, query, model.hidden),
        "product hidden x ffn": (tokens, model.ffn, model.hidden),
        "product ffn x hidden": (tokens, model.hidden, model.ffn),
        "product hidden x vocab": (tokens, model.vocab, model.hidden),
    }


def _draw(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=_BF16)


def _kernels(device: torch.device, sizes: Sizes) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    for name, (m, n, k) in _shapes(sizes).items():
        x, weight = _draw(device, m, k), _draw(device, n, k)
        kernels[name] = Kernel(
            lambda x=x, weight=weight: project(x, weight),
            2.0 * m * n * k,
            2 * (m * n + m * k + n * k),
        )
    return kernels | _attention(device, sizes) | _layer(device, sizes)


def _attention(device: torch.device, sizes: Sizes) -> dict[str, Kernel]:
    model, lengths = sizes.model, sizes.doc_tokens
    tokens = sum(lengths)
    q, k, v = (
        _draw(device, tokens, heads, model.head_width).requires_grad_()
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )
    attend = pack_attention(lengths, device).attend
    out = attend(q, k, v)
    grad = torch.ones_like(out)
    pairs = sum(int(causal_pairs(n)) for n in lengths)
    flop = 4.0 * pairs * model.heads * model.head_width
    moved = 2.0 * tokens * model.head_width * (2 * model.heads + 2 * model.kv_heads)

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return {
        "attention forward": Kernel(forward, flop, moved),
        "attention backward": Kernel(backward, 2.5 * flop, 2.5 * moved),
    }


def _layer(device: torch.device, sizes: Sizes) -> dict[str, Kernel]:
    model, lengths = sizes.model, sizes.doc_tokens
    tokens, hidden, ffn = sum(lengths), model.hidden, model.ffn
    x = _draw(device, tokens, hidden)
    norm = RmsNorm(hidden, model.norm_eps).to(device=device, dtype=_BF16)
    heads = _draw(device, tokens, model.heads, model.head_width)
    positions = pack_attention(lengths, device).positions_T
    table = rotary_table(rotary_frequencies(model, device=device), positions, _BF16)
    gate, up, down = (
        _draw(device, *shape) for shape in ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    )
    head = _draw(device, model.vocab, hidden).requires_grad_()
    labels = torch.arange(tokens, device=device) % model.vocab
    inputs = x.detach().clone().requires_grad_()
    return {
        "norm": Kernel(lambda: norm(x), 4.0 * x.numel(), 2.0 * x.nbytes),
        "rotation": Kernel(lambda: rotate(heads, table), 3.0 * heads.numel(), 2.0 * heads.nbytes),
        "feed-forward": Kernel(
            lambda: add_swiglu(x, x, gate, up, down),
            6.0 * tokens * hidden * ffn,
            2.0 * (3 * hidden * ffn + tokens * (3 * hidden + 6 * ffn)),
        ),
        "head and loss, with gradients": Kernel(
            lambda: head_loss(inputs, head, labels),
            6.0 * tokens * hidden * model.vocab,
            2.0 * (3 * hidden * model.vocab + 3 * tokens * hidden),
        ),
    }


def _predicted(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Predicted over measured seconds, minus 1, where the device is in the table."""
    known = known_device(device)
    if known is None:
        return {}
    kernels = _kernels(device, sizes)
    errors = {}
    for name, (m, n, k) in _shapes(sizes).items():
        measured = min(call_s(kernels[name].call, device, calls=sizes.calls))
        errors[name] = float(gemm_s(known, m, n, k, "bf16").s) / measured - 1
    return errors


if __name__ == "__main__":
    run_here(measure)
