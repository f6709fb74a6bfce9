"""Whether a processor computes numbers of two bytes faster as they are, or widened to four.

What it decides
    An x86 processor without matrix units (AMX) has no faster instruction for bf16 or fp16 than for
    fp32, and torch's operators lose time on the way to it. So where there is enough to compute,
    numbers are widened first; the results are rounded once, as they would be anyway.

    Measured on 2 cores with AVX512_BF16 and no AMX, torch 2.13: products of 256 rows 149 GFLOP/s
    in bf16 and 206 widened, of 1,024 rows 151 and 269; flash attention of 2,048 tokens 125 and 207.

Kept true (tests/unit/nn/device/test_halves.py)
    Results are at least as near to those in float64, on either kind of processor.
"""

import platform

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of two bytes."""

_X86 = ("x86_64", "AMD64")


def widens(x: Tensor) -> bool:
    """Whether a large operator on this tensor is faster in fp32."""
    return (
        x.is_cpu
        and x.dtype in HALVES
        and platform.machine() in _X86
        and not torch.cpu._is_amx_tile_supported()
    )
