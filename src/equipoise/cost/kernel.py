"""Seconds of kernels: matrix products, attention over documents, streams of bytes.

Why
    Nothing reaches the peak. What share of it a product, or attention over documents, reaches was
    measured on a few devices at some thousand sizes, and a step is priced from that.

What it decides
    Inside a device's measured sizes, log-log interpolation. On another device (*transfer*), the
    same share of its roofline: seconds scale with ``max(FLOP / peak, bytes / bandwidth)`` of the
    two, but no kernel is faster than the shortest measured one. If two devices differ only in
    power, the sustained clock goes with the cube root of what is above idle. fp16 runs like bf16.
    Transferred times, and those from a formula, are flagged as extrapolated.

    Attention of a packed micro-batch is the sum over its documents; each runs as fast as in a
    pack of equal documents with as many tokens. A slice of a document, as cut by context
    parallelism, costs as much as a whole document with as many pairs. Kernels whose scores are
    wider than their values, as latent attention's, compute at the rate of the values' width.

Kept true (tests/unit/cost/test_kernel.py)
    Measured points are met; time grows with each size; no product beats its device's peak except
    by rounding; twice the peak and bandwidth is never slower; documents add up.

Sources
    Curves: the first lines of each file of ``cost/data``. Backward over forward:
    FlashAttention-3, arXiv:2407.08608, figures 5 and 6 (2.5 times the FLOP at five sixths of
    the rate). Scores of 192 and values of 128: cudnn-frontend of NVIDIA at 3929da2e,
    benchmark/sdpa_benchmark_training/results. Streams: aiconfigurator-core 0.12.0,
    mem_bw_empirical_scaling_factor 0.8 and a constant of 3 us. Power: switching power is C V^2 f,
    and voltage follows the clock.
"""

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Floats
from equipoise.base.errors import SpecError
from equipoise.cost.curves.grid import Timing, counted
from equipoise.cost.curves.measured import attention_curves, decode_curve, gemm_curve, residual
from equipoise.spec.device.by_name import DTYPE_BYTES, THIS_CPU, DeviceSpec, Dtype, find_device
from equipoise.spec.program.stack import Attention, Fp8

_BACKWARD_OVER_FORWARD = 3.0

_STREAM_EFFICIENCY = 0.8
_LAUNCH_S = 3e-6

_ATTENTION_SHARE = {
    ("flash-1", True): 0.33,
    ("flash-1", False): 0.6,
    ("flash-2", True): 0.55,
}
"""Speed of older attention kernels over the fastest, by whether the device is as fast as Hopper: on
A100 the first FlashAttention reaches about 0.6 of the second, on H100 about 200 of 600 TFLOP/s
(arXiv:2307.08691, figures 5 and 7), and there the second about 0.55 of the third (arXiv:2407.08608,
figures 5 and 6)."""

_MX_ATTENTION = {False: 0.98, True: 1.34}
"""Speed of attention in MXFP8 over BF16, both passes together, by whether scores are wider than
values: windows of 4,096 and 8,192 on GB200 and GB300, cuDNN 9.22 (the source of latent attention
above). Forwards are 1.2 to 1.6 times as fast, backwards of 128-wide heads no faster."""

_FAST = 500e12
"""FLOP/s of devices that older attention kernels cannot keep busy."""

UNMEASURED_EFFICIENCY = 0.6
"""Share of the peak if nothing was measured: what is reported for untuned CPUs."""


def _sustained_flop_per_s(device: DeviceSpec, base: DeviceSpec, dtype: Dtype) -> float:
    peak = device.peak_flop_per_s(dtype)
    if not _is_measured(device, base.name) and device.peaks == base.peaks:
        switched = (each.power_w - each.idle_power_w for each in (device, base))
        return peak * float(min(1.0, (next(switched) / next(switched)) ** (1 / 3)))
    return peak


def _is_measured(device: DeviceSpec, name: str) -> bool:
    """Whether a curve of this name was measured on the device as it is, at its power."""
    if device.is_here:
        return True
    return device.name == name and device.power_w == find_device(name).power_w


def _roofline_s(
    device: DeviceSpec, base: DeviceSpec, dtype: Dtype, flop: Floats, size_bytes: Floats
) -> Floats:
    compute = flop / _sustained_flop_per_s(device, base, dtype)
    return np.maximum(compute, size_bytes / device.memory_bytes_per_s)


def gemm_s(
    device: DeviceSpec,
    m: npt.ArrayLike,
    n: npt.ArrayLike,
    k: npt.ArrayLike,
    dtype: Dtype,
    *,
    scaled: Fp8 = "per-product",
) -> Timing:
    """Seconds of ``(m, k) @ (k, n)``; the sizes broadcast.

    In FP8, ``scaled`` says whose work the scaling and casting of ``(m, k)`` is: the product's own,
    as most curves were measured, or another kernel's.

    Raises:
        SpecError: the device does not multiply this dtype.

    Cost: about 0.3 us a product.

    >>> h100 = find_device("h100-sxm")
    >>> timing = gemm_s(h100, 8192, 8192, 8192, "bf16")
    >>> round(2 * 8192**3 / float(timing.s) / 1e12), bool(timing.extrapolated)
    (783, False)
    """
    device.peak_flop_per_s(dtype)  # says which dtypes there are
    m, n, k = (np.asarray(size, dtype=np.float64) for size in (m, n, k))
    flop = 2.0 * m * n * k
    curve = gemm_curve(device, dtype, scaled)
    if curve is None:
        return _unmeasured(device, dtype, flop)
    grid, name, known = curve
    timing = grid.at(m, n, k)
    if _is_measured(device, name) and DTYPE_BYTES[known] == DTYPE_BYTES[dtype]:
        return timing.scaled(residual(device, "products"))
    base = find_device(name)
    elements = m * k + k * n + m * n
    ratio = _roofline_s(device, base, dtype, flop, elements * DTYPE_BYTES[dtype]) / _roofline_s(
        base, base, known, flop, elements * DTYPE_BYTES[known]
    )
    s = np.maximum(timing.s * ratio, grid.least_s())
    return Timing(s, np.ones(s.shape, dtype=bool))


def attention_s(
    device: DeviceSpec,
    doc_tokens: npt.ArrayLike,
    *,
    heads: int,
    kv_heads: int,
    head_width: int,
    dtype: Dtype = "bf16",
    backward: bool = False,
    pack_tokens: npt.ArrayLike | None = None,
    score_width: int | None = None,
) -> Timing:
    """Seconds of causal attention of each document of a pack; they add up to the pack's.

    Args:
        device: The device that computes.
        doc_tokens: Length of each document [tokens].
        heads: Query heads on this device.
        kv_heads: Key/value heads on this device.
        head_width: Width of one head; of its values, where scores are wider.
        dtype: Dtype of queries, keys and values.
        backward: Whether to price the backward instead of the forward.
        pack_tokens: Tokens of the whole pack; the documents' sum unless given. More documents
            fill a GPU better.
        score_width: Of a query and a key; ``head_width`` unless given.

    Raises:
        SpecError: heads do not divide, or the device does not multiply this dtype.

    Cost: about 0.5 us a document.

    >>> h100 = find_device("h100-sxm")
    >>> one = attention_s(h100, [8192], heads=16, kv_heads=2, head_width=128)
    >>> round(4 * 16 * 128 * 8192**2 / 2 / one.total_s / 1e12)
    617
    """
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise SpecError(
            f"{heads} query heads cannot share {kv_heads} key/value heads. Give a number of "
            f"query heads that {max(kv_heads, 1)} divides."
        )
    device.peak_flop_per_s(dtype)
    tokens = np.maximum(np.asarray(doc_tokens, dtype=np.float64), 1.0)
    whole = np.sum(tokens) if pack_tokens is None else np.asarray(pack_tokens, dtype=np.float64)
    mean_width, wider = head_width, 1.0
    if score_width is not None and score_width != head_width:
        mean_width = (score_width + head_width) // 2
        if device.is_here:  # measured at the mean width
            head_width = mean_width
        else:
            wider = mean_width / head_width
    flop = 4.0 * heads * mean_width * tokens * (tokens + 1) / 2
    times = _BACKWARD_OVER_FORWARD if backward else 1.0
    curves = attention_curves(device, dtype)
    if curves is None:
        return _unmeasured(device, dtype, flop * (2.5 if backward else 1.0))
    forward_curve, backward_curve, name = curves
    curve = forward_curve
    if backward and backward_curve is not None:
        curve, times = backward_curve, 1.0
    units = heads * np.maximum(whole / tokens, 1.0)
    timing = curve.unit_s(head_width, heads // kv_heads, tokens, units)
    timing = timing.scaled(heads * times * wider)
    if _is_measured(device, name):
        return timing.scaled(residual(device, "attention"))
    base = find_device(name)
    moved = 2.0 * tokens * mean_width * (heads + kv_heads) * 2
    ratio = _roofline_s(device, base, "bf16" if "bf16" in device.dtypes else "fp16", flop, moved)
    ratio = ratio / _roofline_s(base, base, "bf16", flop, moved)
    s = timing.s * ratio
    return Timing(s, np.ones(s.shape, dtype=bool))


def attention_slowdown(
    device: DeviceSpec, kernel: Attention, *, wider_scores: bool = False
) -> float:
    """Time of an attention kernel over that of the device's fastest, which was measured.

    Args:
        device: The device.
        kernel: A program's.
        wider_scores: Whether queries and keys are wider than values, as of latent attention.

    >>> attention_slowdown(find_device("h200"), "flash")
    1.0
    """
    if kernel == "flash-mx":
        return 1.0 / _MX_ATTENTION[wider_scores]
    is_fast = max(peak for dtype, peak in device.peaks if dtype in ("bf16", "fp16", "fp32")) > _FAST
    return 1.0 / _ATTENTION_SHARE.get((kernel, is_fast), 1.0)


def decode_attention_s(
    device: DeviceSpec,
    kv_tokens: npt.ArrayLike,
    *,
    sequences: npt.ArrayLike,
    heads: int,
    kv_heads: int,
    head_width: int,
) -> Timing:
    """Seconds of attention of one new token per sequence, on bf16 caches.

    Args:
        device: The device that computes.
        kv_tokens: Tokens in each sequence's cache; all equal.
        sequences: Number of sequences.
        heads: Query heads on this device.
        kv_heads: Key/value heads on this device.
        head_width: Width of one head; bytes scale with it from the measured 128.
    """
    tokens = np.asarray(kv_tokens, dtype=np.float64)
    units = np.asarray(sequences, dtype=np.float64) * kv_heads
    curve = decode_curve(device)
    if curve is None:
        return stream_s(device, 4.0 * tokens * units * head_width)
    grid, name = curve
    timing = grid.at(heads / kv_heads, np.maximum(tokens, 1.0), units)
    ratio = head_width / 128
    if name != device.name:
        ratio *= find_device(name).memory_bytes_per_s / device.memory_bytes_per_s
    if ratio == 1.0:
        return timing
    s = np.maximum(timing.s * ratio, grid.least_s())
    return Timing(s, np.ones(s.shape, dtype=bool))


def stream_s(device: DeviceSpec, size_bytes: npt.ArrayLike) -> Timing:
    """Seconds of a kernel that mostly reads and writes ``size_bytes``.

    >>> round(float(stream_s(find_device("a100-80"), 2.039e9).s) * 1e3, 3)
    1.253
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    # Where the rate was measured, it is STREAM's, and no peak.
    share = 1.0 if device.is_here else _STREAM_EFFICIENCY
    s = size / (device.memory_bytes_per_s * share) * residual(device, "moves")
    if device.name != THIS_CPU:
        s = s + _LAUNCH_S * (size > 0)
    return Timing(s, np.zeros(s.shape, dtype=bool))


def _unmeasured(device: DeviceSpec, dtype: Dtype, flop: Floats) -> Timing:
    return counted(flop / (device.peak_flop_per_s(dtype) * UNMEASURED_EFFICIENCY))
