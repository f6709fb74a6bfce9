"""Rows of a table in 8, 4 or 2 bits, each with its own scale and offset.

Why
    A row's update is often smaller than one level of its format. Rounded to the nearest level, the
    row then never moves; rounded up with the probability of the remainder, it moves by the update
    on average.

What it decides
    A row of W floats is ``offset + scale * level``, levels 0 to 2**bits - 1 packed from the low
    bits up::

        int8   W bytes               scale, offset fp32    W + 8 bytes
        int4   ceil(W / 2) bytes     scale, offset fp16    ceil(W / 2) + 4
        int2   ceil(W / 4) bytes     scale, offset fp16    ceil(W / 4) + 4

    fp16 scales and offsets are rounded outward, so a row's least and greatest float lie within its
    levels and nothing is clipped. A constant row has scale 0 where its offset is exact. Draws are a
    function of (key, row, column) alone, so no layout changes them.

Kept true (tests/unit/numerics/test_rows.py)
    Errors are within a level; stochastic rounding is unbiased within 4 deviations over 100,000
    draws; rounding to nearest stands still under updates of 0.3 levels.

Sources
    arXiv:2010.11305; the layouts are those of FBGEMM's fused row-wise formats.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from equipoise.base.errors import NonFiniteError

RowFormat = Literal["int8", "int4", "int2"]
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
_BITS = {"int8": 8, "int4": 4, "int2": 2}
_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""SplitMix64's constants as signed 64-bit numbers."""


def row_bytes(width: int, form: RowFormat) -> int:
    """Bytes of a packed row.

    >>> [row_bytes(128, form) for form in ("int8", "int4", "int2")]
    [136, 68, 36]
    """
    return -(-width * _BITS[form] // 8) + _head_bytes(form)


def pack_rows(rows: Tensor, form: RowFormat, draws: Tensor | None = None) -> Tensor:
    """Rows in a format.

    Args:
        rows: float32 [n, W].
        form: The format.
        draws: Uniform in [0, 1), float32 [n, W], to round stochastically; None: to nearest.

    Returns:
        uint8 [n, ``row_bytes(W, form)``].

    Raises:
        NonFiniteError: a row has a NaN, or exceeds what its scale and offset can hold.
    """
    bits, count = _BITS[form], len(rows)
    if not count:
        return rows.new_empty((0, row_bytes(rows.shape[1], form)), dtype=torch.uint8)
    most = (1 << bits) - 1
    low, high = torch.aminmax(rows, dim=1)
    if form == "int8":
        offset, scale = low, (high - low) / most
    else:
        offset = _round_down(low)
        scale = _round_up((high - offset.float()) / most)
    if not bool((torch.isfinite(offset) & torch.isfinite(scale)).all()):
        at = int(torch.nonzero(~(torch.isfinite(offset) & torch.isfinite(scale)))[0])
        raise NonFiniteError(
            f"Row {at} of {count:,} to pack as {form} spans {float(low[at]):g} to "
            f"{float(high[at]):g}, which its scale cannot hold. Lower the tables' learning rate."
        )
    step = scale.float().unsqueeze(1)
    place = torch.where(step > 0, (rows - offset.float().unsqueeze(1)) / step, 0.0)
    levels = (place + (0.5 if draws is None else draws)).floor_().clamp_(0, most).to(torch.uint8)
    head = torch.stack((scale, offset), dim=1).contiguous().view(torch.uint8)
    return torch.cat((_squeeze(levels, bits), head), dim=1)


def unpack_rows(packed: Tensor, width: int, form: RowFormat) -> Tensor:
    """Floats of packed rows, float32 [n, W]."""
    bits, head = _BITS[form], _head_bytes(form)
    body = packed[:, : packed.shape[1] - head]
    dtype = torch.float32 if form == "int8" else torch.float16
    tail = packed[:, packed.shape[1] - head :].clone(memory_format=torch.contiguous_format)
    tail = tail.view(dtype).float()
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        spread = (body.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
        body = spread.flatten(1)[:, :width]
    return torch.addcmul(tail[:, 1:], body.float(), tail[:, :1])


def draw_uniform(key: int, rows: Tensor, width: int) -> Tensor:
    """Uniform in [0, 1) for each column of some rows, a function of the arguments alone.

    Args:
        key: A 64-bit number: of the seed, the table and the step, say.
        rows: int64 [n].
        width: Columns.

    Returns:
        float32 [n, width].
    """
    columns = torch.arange(width, dtype=torch.int64, device=rows.device)
    start = key - (1 << 64) if key >= 1 << 63 else key
    mixed = _mix(_mix(rows * _GOLDEN + start).unsqueeze(1) + columns * _GOLDEN)
    return _shift(mixed, 40).float() / (1 << 24)


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shift(values, 30)) * _MIX_1
    values = (values ^ _shift(values, 27)) * _MIX_2
    return values ^ _shift(values, 31)


def _shift(values: Tensor, count: int) -> Tensor:
    """To the right without the sign."""
    return (values >> count) & ((1 << (64 - count)) - 1)


def _head_bytes(form: RowFormat) -> int:
    return 8 if form == "int8" else 4


def _squeeze(levels: Tensor, bits: int) -> Tensor:
    """Levels of some bits, several to a byte."""
    if bits == 8:
        return levels
    per_byte = 8 // bits
    fill = -levels.shape[1] % per_byte
    parts = torch.nn.functional.pad(levels, (0, fill)).view(len(levels), -1, per_byte)
    packed = parts[:, :, 0].clone()
    for place in range(1, per_byte):
        packed |= parts[:, :, place] << (bits * place)
    return packed


def _round_down(values: Tensor) -> Tensor:
    """The greatest fp16 that is not above each float."""
    near = values.to(torch.float16)
    bits = near.view(torch.int16)
    lower = torch.where(bits > 0, bits - 1, torch.where(bits == 0, bits - 32767, bits + 1))
    return torch.where(near.float() > values, lower.to(torch.int16).view(torch.float16), near)


def _round_up(values: Tensor) -> Tensor:
    """The least fp16 that is not below each float, none of which is negative."""
    near = values.to(torch.float16)
    upper = (near.view(torch.int16) + 1).to(torch.int16).view(torch.float16)
    return torch.where(near.float() < values, upper, near)
