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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.nn.device.send import send

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, slots=True, eq=False)
class TileRuns:
    """Lengths of several tiles whose queries lie one after another, and their keys too."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_bounds: Tensor
    """Where each begins and ends, int32 [tiles + 1], on the tensors' device."""
    key_bounds: Tensor

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> "TileRuns":
        """TileRuns of these lengths, each >= 1."""
        bounds = [
            send(torch.tensor([0, *each]).cumsum(0).to(torch.int32), device)
            for each in (queries, keys)
        ]
        return cls(tuple(queries), tuple(keys), *bounds)


def _bounds(x_tHE: Tensor) -> Tensor:
    """The two ends of one sequence, int32 [2], made on the device: nothing is copied to it."""
    tokens = len(x_tHE)
    return torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=x_tHE.device)


def _sizes(q: Tensor, k: Tensor, runs: TileRuns | None) -> tuple[Tensor, Tensor, int, int]:
    """Bounds of queries and keys, and the longest run of each."""
    if runs is None:
        return _bounds(q), _bounds(k), len(q), len(k)
    return runs.query_bounds, runs.key_bounds, max(runs.queries), max(runs.keys)


def forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, runs: TileRuns | None = None
) -> tuple[Tensor, Tensor]:
    """Output [queries, heads, width] and log-sum-exp [queries, heads] of one tile, or of several.

    Args:
        q: Queries [queries, heads, width], in bf16 or fp16.
        k: Keys.
        v: Values.
        is_causal: Whether each query reads the keys up to its own place in its tile.
        runs: The tiles; one unless given.
    """
    out, lse, *_ = _forward(
        *(x.contiguous() for x in (q, k, v)),
        *_sizes(q, k, runs),
        0.0,
        is_causal,
        False,
    )
    return out, lse.view(q.shape[1], len(q)).t()


def backward_cuda(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse_tH: Tensor,
    is_causal: bool,
    runs: TileRuns | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one tile, or of several, given output and log-sum-exp over all keys."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grad_q, grad_k, grad_v = _backward(
        *(x.contiguous() for x in (grad_o, q, k, v, o, lse_tH.t())),
        *_sizes(q, k, runs),
        0.0,
        is_causal,
        no_dropout,
        q.new_empty(0),
    )
    return grad_q, grad_k, grad_v
