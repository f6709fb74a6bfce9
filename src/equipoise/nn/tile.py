"""Attention of a run of queries to a run of keys, with its log-sum-exp, and its gradients.

Why
    Attention over several ranks is computed in parts: outputs over some of the keys, merged by
    their log-sum-exp. The backward pass of a part is exact by itself if it gets the output and
    the log-sum-exp over *all* keys.

What it decides
    Which operator computes a part: on CPU the flash operator of aten, in fp32 where that is faster
    (``nn.device.halves``), on CUDA that of ``nn.tile_cuda``, in bf16 and fp16; everything else is
    computed by ``nn.tile_plain``. A tile is
    full, or a square in which query r reads keys 0 to r (``causal``) or keys from r on
    (``anticausal``, which is causal with queries and keys in reverse order). So every row has a
    key: for a row without one the operator returns a log-sum-exp of 0 instead of minus infinity,
    and merges would be silently wrong.

Kept true (tests/unit/nn/test_tile.py)
    Parts merged equal one masked softmax in float64, forward and backward.

Sources
    Merging by log-sum-exp: online softmax, arXiv:1805.02867; its use on parts:
    FlashAttention-2, arXiv:2307.08691.
"""

from typing import Protocol

import torch
from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.nn.attention import FLASH_DTYPES, lead_heads
from equipoise.nn.device.halves import widens
from equipoise.nn.tile_cuda import TileRuns, backward_cuda, forward_cuda
from equipoise.nn.tile_plain import backward_plain, forward_plain
from equipoise.schedule.attention.schedule import TileKind

_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttendTile(Protocol):
    """``attend_tile``, or what computes the same in another way."""

    def __call__(
        self,
        q_tHE: Tensor,
        k_sGE: Tensor,
        v_sGE: Tensor,
        kind: TileKind,
        *,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Output over some keys, and its log-sum-exp."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which outputs and gradients are summed, and log-sum-exp is kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _takes_flash(q: Tensor, softcap: float) -> bool:
    """Whether the flash operator of CUDA takes such a tile."""
    return q.is_cuda and q.dtype in FLASH_DTYPES and not softcap


def _order(x_t: Tensor, kind: TileKind) -> Tensor:
    return x_t.flip(0) if kind == "anticausal" else x_t


def _widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All of them in fp32, if this processor is faster with it."""
    return tuple(x.float() if widens(x) else x for x in tensors)


def attend_tile(
    q_tHE: Tensor, k_sGE: Tensor, v_sGE: Tensor, kind: TileKind, *, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Softmax attention of some queries to some keys.

    Args:
        q_tHE: Queries [queries, query heads, head width], at least one.
        k_sGE: Keys; the number of key/value heads divides the number of query heads.
        v_sGE: Values, shaped like the keys.
        kind: ``full``; or, with as many keys as queries, ``causal`` or ``anticausal``.
        softcap: Scores are ``softcap * tanh(score / softcap)``; 0 leaves them as they are.

    Returns:
        ``o_tHE`` over these keys, in the queries' dtype or in fp32, and ``lse_tH``
        [queries, query heads] of their scores, in fp32 (fp64 if the queries are).

    Raises:
        LayoutError: the tensors are neither on a CPU nor on a CUDA device, or a tile that is not
            full is not square.
    """
    if q_tHE.device.type not in ("cpu", "cuda"):
        raise LayoutError(
            f"Attention in parts runs on CPU and CUDA; the queries are on {q_tHE.device}. Use data "
            f"parallelism on that device."
        )
    if kind != "full" and len(q_tHE) != len(k_sGE):
        raise LayoutError(
            f"Tiles of kind {kind} must be square, but this one has {len(q_tHE)} queries and "
            f"{len(k_sGE)} keys. Give it as many keys as queries."
        )
    q, k, v = (_order(x, kind) for x in (q_tHE, k_sGE, v_sGE))
    if _takes_flash(q, softcap):
        o_tHE, lse_tH = forward_cuda(q, k, v, kind != "full")
        return _order(o_tHE, kind), _order(lse_tH, kind)
    if softcap or not q.is_cpu:
        o_tHE, lse_tH = forward_plain(q, k, v, kind != "full", softcap)
        return _order(o_tHE, kind), _order(lse_tH, kind)
    q, k, v = _widen(q, k, v)
    out, lse = _forward_cpu(lead_heads(q), lead_heads(k), lead_heads(v), 0.0, kind != "full")
    o_tHE, lse_tH = (x.squeeze(0).transpose(0, 1) for x in (out, lse))
    return _order(o_tHE, kind), _order(lse_tH, kind)


def attend_tile_backward(
    grad_o_tHE: Tensor,
    q_tHE: Tensor,
    k_sGE: Tensor,
    v_sGE: Tensor,
    o_tHE: Tensor,
    lse_tH: Tensor,
    kind: TileKind,
    *,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """This tile's part of the gradients of attention over all keys.

    Args:
        grad_o_tHE: Gradient of the output over all keys.
        q_tHE: Queries of the tile.
        k_sGE: Keys of the tile.
        v_sGE: Values of the tile.
        o_tHE: Output over all keys, not over the tile's.
        lse_tH: Log-sum-exp over all keys.
        kind: As in the forward pass.
        softcap: Likewise.

    Returns:
        Gradients of the queries, the keys and the values, to be summed over tiles; in their dtype
        or in fp32.
    """
    grad_o, q, k, v, o, lse = (
        _order(x, kind) for x in (grad_o_tHE, q_tHE, k_sGE, v_sGE, o_tHE, lse_tH)
    )
    if _takes_flash(q, softcap) or softcap or not q.is_cpu:
        given = grad_o, q, k, v, o, lse
        grads = (
            backward_cuda(*given, kind != "full")
            if _takes_flash(q, softcap)
            else backward_plain(*given, kind != "full", softcap)
        )
        grad_q, grad_k, grad_v = (_order(each, kind) for each in grads)
        return grad_q, grad_k, grad_v
    grad_o, q, k, v, o = _widen(grad_o, q, k, v, o)
    parts = _backward_cpu(
        lead_heads(grad_o),
        lead_heads(q),
        lead_heads(k),
        lead_heads(v),
        lead_heads(o),
        lse.transpose(0, 1).unsqueeze(0),
        0.0,
        kind != "full",
    )
    grad_q, grad_k, grad_v = (_order(part.squeeze(0).transpose(0, 1), kind) for part in parts)
    return grad_q, grad_k, grad_v


def attend_tiles(
    q_tHE: Tensor, k_sGE: Tensor, v_sGE: Tensor, runs: TileRuns, *, is_causal: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    """``attend_tile`` of several tiles, each its own queries and keys; one call on CUDA.

    Args:
        q_tHE: Queries of all tiles, one after another.
        k_sGE: Keys likewise.
        v_sGE: Values likewise.
        runs: Lengths of the tiles.
        is_causal: Whether every tile is ``causal``; else every tile is ``full``.
        softcap: As for ``attend_tile``.
    """
    if _takes_flash(q_tHE, softcap):
        return forward_cuda(q_tHE, k_sGE, v_sGE, is_causal, runs)
    kind: TileKind = "causal" if is_causal else "full"
    parts = [
        attend_tile(q, k, v, kind, softcap=softcap)
        for q, k, v in zip(
            q_tHE.split(runs.queries), k_sGE.split(runs.keys), v_sGE.split(runs.keys), strict=True
        )
    ]
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])


def attend_tiles_backward(
    grad_o_tHE: Tensor,
    q_tHE: Tensor,
    k_sGE: Tensor,
    v_sGE: Tensor,
    o_tHE: Tensor,
    lse_tH: Tensor,
    runs: TileRuns,
    *,
    is_causal: bool,
    softcap: float,
) -> tuple[Tensor, ...]:
    """``attend_tile_backward`` of several tiles; one call on CUDA."""
    given = grad_o_tHE, q_tHE, k_sGE, v_sGE, o_tHE, lse_tH
    if _takes_flash(q_tHE, softcap):
        return backward_cuda(*given, is_causal, runs)
    kind: TileKind = "causal" if is_causal else "full"
    counts = runs.queries, runs.queries, runs.keys, runs.keys, runs.queries, runs.queries
    tiles = zip(*(x.split(each) for x, each in zip(given, counts, strict=True)), strict=True)
    parts = [
        attend_tile_backward(grad_o, q, k, v, o, lse, kind, softcap=softcap)
        for grad_o, q, k, v, o, lse in tiles
    ]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def merge_tile_(o_tHE: Tensor, lse_tH: Tensor, part_tHE: Tensor, part_lse_tH: Tensor) -> None:
    """Merge an output over further keys into the output so far, in place.

    Args:
        o_tHE: Output so far, in ``sum_dtype``; zeros where there is none.
        lse_tH: Log-sum-exp so far; minus infinity where there is no output.
        part_tHE: Output over the further keys; every row has at least one.
        part_lse_tH: Log-sum-exp over the further keys.
    """
    # The part's share of the sum of exponentials: exactly 1 where there is no output yet.
    share = torch.sigmoid(part_lse_tH - lse_tH).unsqueeze(-1)
    o_tHE.lerp_(part_tHE.to(o_tHE.dtype), share)
    lse_tH.copy_(torch.logaddexp(lse_tH, part_lse_tH))


def sink_tile_(o_tHE: Tensor, lse_tH: Tensor, sinks_H: Tensor) -> None:
    """Add a sink to the denominator of each head's softmax over all keys, in place.

    With the result, the backward passes of tiles are exact as they are: a sink has no value, so
    that it changes the shares of the keys and nothing else.

    Args:
        o_tHE: Output over all keys, in ``sum_dtype``.
        lse_tH: Log-sum-exp over all keys.
        sinks_H: The sink's score in each head, in the same dtype.
    """
    o_tHE.mul_(torch.sigmoid(lse_tH - sinks_H).unsqueeze(-1))
    lse_tH.copy_(torch.logaddexp(lse_tH, sinks_H))


def sink_gradient(grad_o_tHE: Tensor, o_tHE: Tensor, lse_tH: Tensor, sinks_H: Tensor) -> Tensor:
    """Gradient of the sinks [heads], from the queries whose output over all keys is here.

    The gradient of a score is its share times (the gradient of the share, minus their mean over
    all scores), and that of the sink's share is 0.

    Args:
        grad_o_tHE: Gradient of the output.
        o_tHE: Output over all keys and the sink.
        lse_tH: Log-sum-exp over all keys and the sink.
        sinks_H: The sinks' scores, in ``sum_dtype``.
    """
    mean_tH = (grad_o_tHE.to(sinks_H.dtype) * o_tHE.to(sinks_H.dtype)).sum(-1)
    return -((sinks_H - lse_tH).exp_().mul_(mean_tH)).sum(0)
