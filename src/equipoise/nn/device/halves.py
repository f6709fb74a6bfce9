"""Whether a processor computes numbers of two bytes faster as they are, or widened to four.

What it decides
    An x86 processor without matrix units (AMX) has no faster instruction for bf16 or fp16 than for
    fp32, and torch's operators lose time on the way to it. So where there is enough to compute,
    numbers are widened first; the results are rounded once, as they would be anyway. AMD's
    processors with AVX512_BF16 multiply bf16 twice as fast as fp32.

    Measured on 2 cores, torch 2.13, in bf16 and widened. AVX512_BF16 of Intel without AMX: products
    of 256 rows 149 and 206 GFLOP/s, of 1,024 rows 151 and 269; flash attention of 2,048 tokens 125
    and 207. AMD Zen 4: products of 256 rows 371 and 153, of 1,024 rows 348 and 156; attention of
    2,048 tokens forward alike, backward 121 and 161 ms. Zen 4 kept to AVX2: products of 128 rows,
    one core, 19 and 80, of 4 rows 14 and 19; attention backward 1,011 and 145 ms.

Kept true (tests/unit/nn/device/test_halves.py)
    Results are at least as near to those in float64, on either kind of processor.
"""

import functools
import platform
from pathlib import Path

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
        and not (x.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported() and _is_amd())
    )


@functools.cache
def _is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether AMD made this machine's processors; False where the system does not say."""
    try:
        return "AuthenticAMD" in cpuinfo.read_text()
    except OSError:
        return False
