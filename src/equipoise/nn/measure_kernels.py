"""Samples of single kernels on one core or one device: products, attention, memory.

What it decides
    Operands are those that an earlier call has touched, as in a layer, and every point begins with
    a call that is not counted. A ``Patience`` sets the number of samples.

    On a core a sample is one call, in processor time, like a run's ``busy_s``: another program
    that takes the core for a moment does not count, though its use of caches and memory does.

    On a device a sample is what passes in the device's queue between the ends of two calls that
    follow each other, as they do in a step: the host launches several, and reads their marks when
    the last is over. A kernel that is shorter than its launch takes as long as its launch.

Kept true (tests/unit/nn/test_measure_kernels.py)
    The same calls are sampled on a core and through a device's marks; marks are read after several.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.nn.attention import pack_attention
from equipoise.nn.device.clock import Marks, make_marks
from equipoise.nn.project import FP8
from equipoise.nn.stream import KERNELS, StreamArrays
from equipoise.numerics.fp8 import require_fp8

_MOST = 30

_IN_A_ROW = 8
"""Calls that a device is given at once: the host launches ahead of it, as in a step."""

_BF16_CAPABILITY = (8, 0)
"""Devices before NVIDIA's Ampere have no bf16."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to measure one point."""

    least: int = 6
    """Number of samples, unless time runs out."""
    budget_s: float = 0.03
    """Computing time that further samples may take."""
    limit_s: float = math.inf
    """Wall-clock time after which one sample, or one row of them, is enough."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Takes samples of calls on a device; what stands in for a device is given its marks."""

    device: torch.device
    make_marks: Callable[[], Marks]
    in_a_row: int
    """Calls whose marks are read together."""

    def sample_s(self, call: Callable[[], object], patience: Patience) -> list[float]:
        """Computing seconds of single calls after a warm-up: between one and thirty or so."""
        begun = time.perf_counter()
        call()
        samples: list[float] = []
        while len(samples) < _MOST:
            marks = self.make_marks()
            ends = [marks.mark()]
            for _ in range(self.in_a_row):
                call()
                ends.append(marks.mark())
            moments = marks.read()
            samples += [moments.busy_s(first, second) for first, second in pairwise(ends)]
            is_enough = len(samples) >= patience.least and sum(samples) >= patience.budget_s
            if is_enough or time.perf_counter() - begun >= patience.limit_s:
                break
        return samples

    def drawn(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(shape, device=self.device).to(dtype)


MakeSampler = Callable[[torch.device], Sampler]


def sampler_on(device: torch.device) -> Sampler:
    """The sampler of a core or a device."""
    in_a_row = _IN_A_ROW if device.type == "cuda" else 1
    return Sampler(device, lambda: make_marks(device), in_a_row)


def multiplies(device: torch.device, dtype: str) -> bool:
    """Whether ranks on a device can multiply a dtype: bf16 or fp8 may be missing."""
    if dtype == "fp8":
        try:
            require_fp8(device)
        except LayoutError:
            return False
        return True
    if dtype == "bf16" and device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
    return True


def gemm_samples(
    sampler: Sampler, size: tuple[str, int, int, int], patience: Patience
) -> list[float]:
    """Seconds of ``(m, k) @ (k, n)``; the second operand is a layer's weight, [n, k] in memory.

    In fp8 both operands are in bf16, and rounding them is part of the product, as in ``train``.

    Args:
        sampler: Of the device that multiplies.
        size: Dtype, m, n and k.
        patience: How long.
    """
    dtype, m, n, k = size
    kept = DTYPES.get(dtype, torch.bfloat16)
    x, weight = sampler.drawn(kept, m, k), sampler.drawn(kept, n, k)
    with torch.no_grad():
        if dtype == "fp8":
            return sampler.sample_s(lambda: FP8.project(x, weight), patience)
        return sampler.sample_s(lambda: torch.nn.functional.linear(x, weight), patience)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one call attends to."""

    doc_tokens: Sequence[int]
    heads: int
    kv_heads: int
    head_width: int


def attention_samples(
    sampler: Sampler, dtype: str, asked: AttentionCall, patience: Patience
) -> tuple[list[float], list[float]]:
    """Seconds of a call's forward and backward, over all its heads and documents."""
    tokens = sum(asked.doc_tokens)
    q, k, v = (
        sampler.drawn(DTYPES[dtype], tokens, heads, asked.head_width).requires_grad_()
        for heads in (asked.heads, asked.kv_heads, asked.kv_heads)
    )
    attend = pack_attention(asked.doc_tokens, sampler.device).attend
    with torch.no_grad():
        forward_s = sampler.sample_s(lambda: attend(q, k, v), patience)
    out = attend(q, k, v)
    grad = torch.ones_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return forward_s, sampler.sample_s(backward, patience)


def stream_samples(sampler: Sampler, elements: int, patience: Patience) -> dict[str, list[float]]:
    """Bytes per second of STREAM's kernels, over arrays of ``elements`` fp64 numbers."""
    arrays = StreamArrays.allocate(elements, sampler.device)
    return {
        name: [arrays.bytes_of(name) / s for s in sampler.sample_s(arrays.kernel(name), patience)]
        for name in KERNELS
    }


def host_copy_samples(sampler: Sampler, size_bytes: int, patience: Patience) -> list[float]:
    """Bytes per second from the host's memory, pinned where there is a device, to the device's."""
    host = torch.zeros(size_bytes, dtype=torch.uint8)
    if sampler.device.type == "cuda":
        host = host.pin_memory()
    there = torch.zeros_like(host, device=sampler.device)
    taken = sampler.sample_s(lambda: there.copy_(host, non_blocking=True), patience)
    return [size_bytes / s for s in taken]
