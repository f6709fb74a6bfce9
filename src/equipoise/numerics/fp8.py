"""Matrix products of float8 numbers with a scale for each row.

Why
    Tensor cores multiply e4m3 numbers twice as fast as bf16. e4m3 has 4 significant bits and
    reaches from 2^-9 to 448, so each row of an operand is scaled to fill that range.

What it decides
    The scale of a row is a power of two, the largest with which no element exceeds 448. Scaling is
    then exact, and how an element is rounded does not depend on its neighbours: only what is
    2^-14 of its row's largest element or smaller is rounded to coarser steps. So packs and layouts
    that put other tokens into a row change rounding of the smallest elements alone.

Kept true (tests/unit/numerics/test_fp8.py)
    A product equals that of the rounded operands in fp32, up to the rounding of sums. Rows with an
    element that is not finite give NaN.

Sources
    Recipe "rowwise" of torchao.float8: every operand in e4m3, scales along the contracted dim,
    floored to powers of two, fast accumulation in the forward alone. e4m3: arXiv:2209.05433.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from equipoise.base.errors import LayoutError

MULTIPLE = 16
"""Both sides of a weight must divide by it: kernels of devices read 16 bytes at once."""

_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_SMALLEST_ROW = 1e-12
"""Rows whose elements are all smaller are scaled as if this were their largest."""

_PRODUCT_ERROR = 2.0**-7
"""Rounding of a product's output to bf16, and of the sums of fast accumulation."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundedRows:
    """A matrix [rows, inner] in e4m3, with a scale for each row."""

    values: Tensor
    scale: Tensor
    """What the values are multiplied by, fp32 [rows, 1]."""

    def restore(self) -> Tensor:
        """The rounded numbers, in fp32 [rows, inner]."""
        return self.values.float() * self.scale


def round_rows(x: Tensor) -> RoundedRows:
    """Round each row to e4m3 under a scale of its own.

    Args:
        x: [rows, inner], in fp32 or bf16, in any memory order. May have no rows or be transposed.

    >>> rounded = round_rows(torch.tensor([[3.1, -900.0], [0.0, 0.0]]))
    >>> rounded.restore().tolist(), rounded.scale.flatten().tolist()[0]
    ([[3.25, -896.0], [0.0, 0.0]], 4.0)
    """
    if x.shape[1] == 0:
        largest = x.new_zeros(len(x), 1, dtype=torch.float32)
    else:
        largest = x.abs().amax(1, keepdim=True).float()
    _, exponent = torch.frexp(_LARGEST / largest.clamp_min(_SMALLEST_ROW))
    one = torch.ones_like(largest)
    # A product with a power of two is exact in x's own dtype.
    values = (x * torch.ldexp(one, exponent - 1).to(x.dtype)).to(_E4M3)
    scale = torch.ldexp(one, 1 - exponent)
    # e4m3 has no infinity, so what is not finite makes the whole row not a number.
    return RoundedRows(values.contiguous(), scale.where(largest.isfinite(), torch.nan))


def multiply_rows(
    left: RoundedRows, right: RoundedRows, dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """``left @ right.T`` [M, N], accumulated in fp32.

    Args:
        left: [M, inner].
        right: [N, inner].
        dtype: Of the output.
        is_fast: Whether tensor cores may keep fewer bits of a sum. CPUs keep all of fp32.
    """
    left_MK, right_NK = left.values, right.values
    if left_MK.shape[0] == 0 or left_MK.shape[1] == 0:
        return left.scale.new_zeros(len(left_MK), len(right_NK), dtype=dtype)
    short = -left_MK.shape[1] % MULTIPLE
    if short:  # of tokens, where these are contracted
        raw = (each.view(torch.uint8) for each in (left_MK, right_NK))
        left_MK, right_NK = (pad(each, (0, short)).view(_E4M3) for each in raw)
    on_device = left_MK.device.type == "cuda"  # whose kernels write bf16 alone
    out: Tensor = scaled_mm(
        left_MK,
        right_NK.t(),
        left.scale,
        ScalingType.RowWise,
        right.scale.t(),
        ScalingType.RowWise,
        output_dtype=torch.bfloat16 if on_device else dtype,
        use_fast_accum=is_fast,
    )
    return out.to(dtype)


MultiplyRows = Callable[[RoundedRows, RoundedRows, torch.dtype], Tensor]
"""As ``multiply_rows``."""


def require_fp8(device: torch.device, multiply: MultiplyRows = multiply_rows) -> None:
    """Multiply once, and compare with the rounded operands' product in fp32.

    Args:
        device: Where a run will multiply.
        multiply: What multiplies there.

    Raises:
        LayoutError: the device or this torch has no such product, or it is wrong.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 6, 48).unsqueeze(1)
    left, right = (
        round_rows((torch.randn(48, 37, generator=generator) * sizes).bfloat16().to(device))
        for _ in range(2)
    )
    expected = left.restore() @ right.restore().t()
    try:
        error = (multiply(left, right, torch.bfloat16).float() - expected).abs()
    except (RuntimeError, NotImplementedError, ValueError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise LayoutError(
            f'train.precision = "fp8" needs a product of float8 rows, which torch '
            f'{torch.__version__} does not have on {device} ({reason}). Set "bf16".'
        ) from None
    # Relative to the product of the rows' largest elements: a sum may cancel.
    room = left.restore().norm(dim=1, keepdim=True) * right.restore().norm(dim=1)
    worst = float((error / room).max())
    if not worst <= _PRODUCT_ERROR:
        raise LayoutError(
            f'train.precision = "fp8" was tried on {device}, and a product of float8 rows is off '
            f"by {worst:.1e} of its operands, where rounding explains {_PRODUCT_ERROR:.1e}. Set "
            f'"bf16".'
        )
