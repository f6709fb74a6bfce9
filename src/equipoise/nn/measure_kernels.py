"""Samples of single kernels on one core: products, attention, memory.

What it decides
    What one sample is: a call after a warm-up, on operands that an earlier call has touched, as
    a layer's are. It is processor time, as a run's ``busy_s`` is, so that a stranger who takes
    the core for a moment does not count; what he takes of caches and memory does. At least six
    samples a point, because fewer give no 95% interval.
"""

import time
from collections.abc import Callable

import torch

from equipoise.nn.attention import attend_documents
from equipoise.nn.stream import KERNELS, StreamArrays

_LEAST, _MOST = 6, 30

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sample_s(call: Callable[[], object], *, budget_s: float) -> list[float]:
    """Processor seconds of single calls after a warm-up: six to thirty, as the budget allows."""
    call()
    samples: list[float] = []
    spent = 0.0
    while len(samples) < _LEAST or (spent < budget_s and len(samples) < _MOST):
        begin = time.process_time()
        call()
        samples.append(time.process_time() - begin)
        spent += samples[-1]
    return samples


def gemm_samples(dtype: str, m: int, n: int, k: int, *, budget_s: float) -> list[float]:
    """Seconds of ``(m, k) @ (k, n)``, the second operand a layer's weight, [n, k] in memory."""
    x = torch.randn(m, k).to(DTYPES[dtype])
    weight = torch.randn(n, k).to(DTYPES[dtype])
    return sample_s(lambda: torch.nn.functional.linear(x, weight), budget_s=budget_s)


def attention_samples(
    dtype: str, tokens: int, head_width: int, *, budget_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of a forward and of a backward of one head over one document."""
    q, k, v = (
        torch.randn(tokens, 1, head_width).to(DTYPES[dtype]).requires_grad_() for _ in range(3)
    )
    with torch.no_grad():
        forward_s = sample_s(lambda: attend_documents(q, k, v, [tokens]), budget_s=budget_s)
    out = attend_documents(q, k, v, [tokens])
    grad = torch.ones_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return forward_s, sample_s(backward, budget_s=budget_s)


def stream_samples(elements: int, *, budget_s: float) -> dict[str, list[float]]:
    """Bytes a second of STREAM's kernels, over arrays of so many fp64 numbers."""
    arrays = StreamArrays.allocate(elements)
    return {
        name: [arrays.bytes_of(name) / s for s in sample_s(arrays.kernel(name), budget_s=budget_s)]
        for name in KERNELS
    }
