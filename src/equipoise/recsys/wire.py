"""Rows of floats as they travel between ranks: fp32, bf16, fp16 or int8 with a scale.

What it decides
    A format is what is sent: nothing falls back to another. fp32 is exact. bf16 rounds to nearest,
    off by at most 2**-8 of the number; fp16 by 2**-11 of it, or by 2**-25 below 2**-14, and refuses
    what exceeds 65,504; int8 has a scale for each row, and is off by at most 1/254 of the row's
    largest magnitude. Gradients of a mean over many samples are tiny, so they travel as fp16 times
    a power of two near the number of bags, which changes no other format's numbers.

Kept true (tests/unit/recsys/test_wire.py, by Hypothesis)
    What comes back is within the bound of each format, and takes the bytes of the formula.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.base.errors import NonFiniteError
from equipoise.schedule.tables.traffic import Wire, wire_bytes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_ERROR = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 1 / 254}
"""Largest error: of a number, relative to it; int8: relative to the row's largest magnitude."""
_MOST_FP16 = 65_504.0


def encode(rows: Tensor, wire: Wire) -> Tensor:
    """Rows as bytes.

    Args:
        rows: float32 [rows, width].
        wire: The format.

    Returns:
        uint8 [rows x ``wire_bytes(width, wire)``].

    Raises:
        NonFiniteError: fp16 or int8 cannot hold a number.
    """
    if not rows.numel():
        return rows.new_empty(0, dtype=torch.uint8)
    rows = rows.contiguous()
    if wire == "int8":
        top = rows.abs().amax(dim=1, keepdim=True)
        if not bool(torch.isfinite(top).all()):
            raise NonFiniteError(
                "A pooled row or its gradient is not a number, which int8 cannot carry. Send fp32 "
                "to find where it comes from."
            )
        scale = torch.where(top > 0, top / 127, torch.ones_like(top))
        levels = torch.round(rows / scale).clamp(-127, 127).to(torch.int8)
        return torch.cat((levels.view(torch.uint8), scale.view(torch.uint8)), dim=1).flatten()
    if wire == "fp16" and float(rows.abs().max()) > _MOST_FP16:
        raise NonFiniteError(
            f"A pooled row, or a sample's gradient of one, has {float(rows.abs().max()):g}, which "
            "fp16 cannot carry (65,504 at most). Send bf16 or fp32."
        )
    return rows.to(_DTYPES[wire]).flatten().view(torch.uint8)


def gradient_gain(wire: Wire, sizes: Sequence[int]) -> float:
    """By what a table's gradients are multiplied while they travel: a power of two, 1 but for fp16.

    Args:
        wire: The format.
        sizes: Bags of each rank.

    >>> gradient_gain("fp16", [300, 300]), gradient_gain("bf16", [300, 300])
    (512.0, 1.0)
    """
    bags = sum(sizes) if wire == "fp16" else 0
    return float(1 << max(0, bags.bit_length() - 1))


def times(rows: Tensor, gain: float) -> Tensor:
    """Rows times a gain; the rows themselves where it is 1."""
    return rows if gain == 1 else rows * gain


def decode(data: Tensor, width: int, wire: Wire) -> Tensor:
    """Rows that ``encode`` made, float32 [rows, width]."""
    if wire == "int8":
        table = data.view(-1, wire_bytes(width, wire))
        scale = table[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return table[:, :width].contiguous().view(torch.int8).float() * scale
    return data.view(_DTYPES[wire]).view(-1, width).float()
