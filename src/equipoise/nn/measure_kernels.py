"""Samples of single kernels on one core: products, attention, memory.

What it decides
    One sample is a call after a warm-up, on operands that an earlier call has touched, as in a
    layer. It is processor time, like a run's ``busy_s``: another program that takes the core for
    a moment does not count, though its use of caches and memory does. A ``Patience`` sets the
    number of samples.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from equipoise.nn.attention import attend_documents
from equipoise.nn.stream import KERNELS, StreamArrays

_MOST = 30

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to measure one point."""

    least: int = 6
    """Number of samples, unless time runs out."""
    budget_s: float = 0.03
    """Processor time that further samples may take."""
    limit_s: float = math.inf
    """Wall-clock time after which one sample is enough."""


def sample_s(call: Callable[[], object], patience: Patience) -> list[float]:
    """Processor seconds of single calls after a warm-up: between one and thirty."""
    begun = time.perf_counter()
    call()
    samples: list[float] = []
    while len(samples) < _MOST:
        begin = time.process_time()
        call()
        samples.append(time.process_time() - begin)
        is_enough = len(samples) >= patience.least and sum(samples) >= patience.budget_s
        if is_enough or time.perf_counter() - begun >= patience.limit_s:
            break
    return samples


def gemm_samples(dtype: str, m: int, n: int, k: int, patience: Patience) -> list[float]:
    """Seconds of ``(m, k) @ (k, n)``; the second operand is a layer's weight, [n, k] in memory."""
    x = torch.randn(m, k).to(DTYPES[dtype])
    weight = torch.randn(n, k).to(DTYPES[dtype])
    return sample_s(lambda: torch.nn.functional.linear(x, weight), patience)


_TOGETHER, _TOGETHER_TOKENS = 4, 1024
"""Heads per call, as in small decoders, so that a call's fixed cost weighs as much as there."""


def attention_samples(
    dtype: str, tokens: int, head_width: int, patience: Patience
) -> tuple[list[float], list[float]]:
    """Seconds of one head's forward and backward over one document."""
    heads = _TOGETHER if tokens <= _TOGETHER_TOKENS else 1
    q, k, v = (
        torch.randn(tokens, heads, head_width).to(DTYPES[dtype]).requires_grad_() for _ in range(3)
    )
    with torch.no_grad():
        forward_s = sample_s(lambda: attend_documents(q, k, v, [tokens]), patience)
    out = attend_documents(q, k, v, [tokens])
    grad = torch.ones_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    backward_s = sample_s(backward, patience)
    return [s / heads for s in forward_s], [s / heads for s in backward_s]


def stream_samples(elements: int, patience: Patience) -> dict[str, list[float]]:
    """Bytes per second of STREAM's kernels, over arrays of ``elements`` fp64 numbers."""
    arrays = StreamArrays.allocate(elements)
    return {
        name: [arrays.bytes_of(name) / s for s in sample_s(arrays.kernel(name), patience)]
        for name in KERNELS
    }
