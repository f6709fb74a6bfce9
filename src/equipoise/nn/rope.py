"""Rotary positions: angles in float32, rotation in the dtype of the heads.

Kept true (tests/unit/nn/test_rope.py)
    Half-split pairs, as Llama and Qwen weights on disk expect; the backward is the rotation
    by the opposite angle.

Sources
    arXiv:2104.09864; Llama 3.1's frequency scaling as its config.json names it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from equipoise.spec.model.presets import ModelSpec


def rotary_frequencies(model: ModelSpec, *, device: torch.device | None = None) -> Tensor:
    """Radians per token of each pair of a head [E/2], float32, Llama 3.1 scaling applied."""
    half = model.head_width // 2
    steps = torch.arange(half, dtype=torch.float32, device=device) * 2 / model.head_width
    frequency = 1.0 / model.rope_theta**steps
    if (scaling := model.rope_scaling) is None:
        return frequency
    longest = scaling.original_tokens / scaling.low_freq_factor
    shortest = scaling.original_tokens / scaling.high_freq_factor
    wavelength = 2 * math.pi / frequency
    blend = (scaling.original_tokens / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * frequency / scaling.factor + blend * frequency
    scaled = torch.where(wavelength > longest, frequency / scaling.factor, between)
    return torch.where(wavelength < shortest, frequency, scaled)


def rotary_table(frequency: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of every position [2, T, 1, E/2]."""
    angles = positions_T.to(torch.float32)[:, None] * frequency
    return torch.stack((angles.cos(), angles.sin()))[:, :, None].to(dtype)


def _rotate(x_THE: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x_THE.shape[-1] // 2
    first, second = x_THE[..., :half], x_THE[..., half:]
    out = torch.empty_like(x_THE)
    torch.mul(first, cos, out=out[..., :half])
    out[..., :half].addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:])
    out[..., half:].addcmul_(first, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THE: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _rotate(x_THE, table[0], table[1], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        return _rotate(grads[0], table[0], table[1], -1), None


def rotate(x_THE: Tensor, table: Tensor) -> Tensor:
    """Turn each pair ``(x[e], x[e + E/2])`` of every head by its position's angle."""
    out: Tensor = _Rotate.apply(x_THE, table)
    return out
