"""Tiles on a CUDA device, by the flash operator for sequences of any length.

Why
    It is the only one of torch's CUDA operators that returns the log-sum-exp and takes another
    one, that over all keys, in its backward.

Kept true (tests/gpu/test_cuda.py)
    Merged parts equal the CPU's within bf16's precision.

Sources
    Arguments as ``torch.nn.attention.varlen`` passes them: log-sum-exp is [heads, queries], and
    the random state without dropout is two zeros.
"""

import torch
from torch import Tensor

from equipoise.base.errors import LayoutError

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def _bounds(x_tHE: Tensor) -> Tensor:
    """The two ends of one sequence, int32 [2], made on the device: nothing is copied to it."""
    tokens = len(x_tHE)
    return torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=x_tHE.device)


def forward_cuda(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Output [queries, heads, width] and log-sum-exp [queries, heads] of one tile.

    Raises:
        LayoutError: the tensors are in a dtype that the operator does not take.
    """
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise LayoutError(
            f"Attention in parts on {q.device} takes bf16 and fp16; the queries are "
            f'{q.dtype}. Set train.precision = "bf16".'
        )
    out, lse, *_ = _forward(
        *(x.contiguous() for x in (q, k, v)),
        _bounds(q),
        _bounds(k),
        len(q),
        len(k),
        0.0,
        is_causal,
        False,
    )
    return out, lse.view(q.shape[1], len(q)).t()


def backward_cuda(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_tH: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one tile, given output and log-sum-exp over all keys."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grad_q, grad_k, grad_v = _backward(
        *(x.contiguous() for x in (grad_o, q, k, v, o, lse_tH.t())),
        _bounds(q),
        _bounds(k),
        len(q),
        len(k),
        0.0,
        is_causal,
        no_dropout,
        q.new_empty(0),
    )
    return grad_q, grad_k, grad_v
