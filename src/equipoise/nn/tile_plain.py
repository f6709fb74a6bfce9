"""Tiles in plain products of matrices: capped scores, and dtypes that no flash operator takes.

Why
    The flash operators have no place between scores and softmax, and Gemma 2 caps its scores
    there, ``c * tanh(score / c)``. Those of CUDA take no fp32, in which a layout is proven.

What it decides
    A tile is computed some queries at a time, so that their scores against all keys of the tile
    take ``_CHUNK_BYTES`` at most: no matrix of tokens by tokens exists. Arithmetic is in fp32
    (fp64 if the tensors are).

Kept true (tests/unit/nn/test_tile.py)
    Parts merged equal one masked softmax in float64, capped or not, forward and backward.

Sources
    Capped scores: Gemma 2, arXiv:2408.00118, section 2.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK_BYTES = 16 << 20


def _chunks(
    queries: int, keys: int, heads: int, itemsize: int, *, is_causal: bool
) -> Iterator[tuple[slice, slice]]:
    """Runs of queries, each with the keys that some of them reads."""
    size = max(1, _CHUNK_BYTES // max(1, keys * heads * itemsize))
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield slice(start, stop), slice(0, stop if is_causal else keys)


def _grouped(x_tHE: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[t, H, E] as [G, t * H / G, E]: a matrix for each key/value head."""
    x_GrE: Tensor = x_tHE.to(dtype).unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    return x_GrE


def _ungrouped(x_GrE: Tensor, queries: int) -> Tensor:
    x_tHE: Tensor = x_GrE.unflatten(1, (queries, -1)).transpose(0, 1).flatten(1, 2)
    return x_tHE


def _scores(
    q_GrE: Tensor, k_GEs: Tensor, queries: slice, softcap: float, *, is_causal: bool
) -> Tensor:
    """Scores [G, rows, keys], minus infinity where a query does not read a key."""
    scores = (q_GrE @ k_GEs).mul_(q_GrE.shape[2] ** -0.5)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if is_causal:
        device = scores.device
        rows = torch.arange(queries.start, queries.stop, device=device)
        rows = rows.repeat_interleave(scores.shape[1] // len(rows))
        keys = torch.arange(scores.shape[2], device=device)
        scores.masked_fill_(keys > rows.unsqueeze(1), float("-inf"))
    return scores


def forward_plain(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    """Output [queries, heads, width] and log-sum-exp [queries, heads] of one tile.

    Args:
        q: Queries [queries, heads, width].
        k: Keys [keys, key/value heads, width].
        v: Values, shaped like the keys.
        is_causal: Query r reads keys 0 to r; as many keys as queries.
        softcap: The scores' limit; 0 for none.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.empty(q.shape, dtype=wide, device=q.device)
    lse = o.new_empty(q.shape[:2])
    heads, kv_heads = q.shape[1], k.shape[1]
    k_GEs, v_GsE = k.to(wide).permute(1, 2, 0), v.to(wide).transpose(0, 1)
    for rows, keys in _chunks(len(q), len(k), heads, wide.itemsize, is_causal=is_causal):
        queries = rows.stop - rows.start
        q_GrE = _grouped(q[rows], kv_heads, wide)
        scores = _scores(q_GrE, k_GEs[:, :, keys], rows, softcap, is_causal=is_causal)
        lse_Gr1 = scores.logsumexp(2, keepdim=True)
        o[rows] = _ungrouped(scores.sub_(lse_Gr1).exp_() @ v_GsE[:, keys], queries)
        lse[rows] = _ungrouped(lse_Gr1, queries).squeeze(2)
    return o, lse


def backward_plain(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    is_causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one tile, given output and log-sum-exp over all keys."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_q = torch.empty(q.shape, dtype=wide, device=q.device)
    heads, kv_heads, scale = q.shape[1], k.shape[1], q.shape[2] ** -0.5
    k_GsE, v_GsE = (x.to(wide).transpose(0, 1) for x in (k, v))
    grad_k, grad_v = torch.zeros_like(k_GsE), torch.zeros_like(v_GsE)
    for rows, keys in _chunks(len(q), len(k), heads, wide.itemsize, is_causal=is_causal):
        queries = rows.stop - rows.start
        q_GrE, o_GrE, grad_GrE = (_grouped(x[rows], kv_heads, wide) for x in (q, o, grad_o))
        lse_Gr1 = _grouped(lse[rows].unsqueeze(2), kv_heads, wide)
        scores = _scores(q_GrE, k_GsE[:, keys].mT, rows, softcap, is_causal=is_causal)
        shares = (scores - lse_Gr1).exp_()
        grad_v[:, keys] += shares.mT @ grad_GrE
        grad_scores = grad_GrE @ v_GsE[:, keys].mT
        grad_scores.sub_((grad_GrE * o_GrE).sum(2, keepdim=True)).mul_(shares)
        if softcap:
            # Where a query does not read a key its share is 0, and its score would make 0 * inf.
            slope = scores.div_(softcap).square_().neg_().add_(1).masked_fill_(shares == 0, 0)
            grad_scores.mul_(slope)
        grad_scores.mul_(scale)
        grad_q[rows] = _ungrouped(grad_scores @ k_GsE[:, keys], queries)
        grad_k[:, keys] += grad_scores.mT @ q_GrE
    return grad_q, grad_k.transpose(0, 1), grad_v.transpose(0, 1)
