"""Causal attention over packed documents, one document at a time, never a dense mask.

Why
    A pack of documents ``[3000, 40, 900]`` needs ``sum(l * (l + 1) / 2)`` query-key pairs;
    a mask over the whole pack pays for ``T * T``. On CPU the loop over documents is 9 to 19
    times faster than the mask, and the only form with a cheap backward.

What it decides
    Which operator runs: on CPU the flash operator of aten, document by document; on CUDA
    the variable-length operator over all documents at once, in bf16 and fp16. Callers see one name.
    A decoder takes a ``PackAttention``: code that puts only some of a pack's tokens on this rank
    passes their positions and how they attend. Under ``torch.autocast`` inputs are cast as torch's
    own attention casts them.

Kept true (tests/unit/nn/test_attention.py, tests/unit/nn/test_attention_inputs.py)
    Equal to a masked softmax in float64, forward and backward, whatever the strides; no
    document sees another; packs and documents of zero tokens are legal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.nn.device.send import send
from equipoise.nn.tile_plain import backward_plain, forward_plain
from equipoise.spec.mask import CAUSAL, Mask

FLASH_DTYPES = (torch.bfloat16, torch.float16)
"""What flash operators of CUDA take; everything else is computed by ``nn.tile_plain``."""

_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """What a layer's attention computes besides a causal softmax."""

    mask: Mask = CAUSAL
    """Which keys of its document a query reads."""
    softcap: float = 0.0
    """Scores are ``softcap * tanh(score / softcap)``; 0 leaves them as they are."""
    sinks_H: Tensor | None = None
    """A score in each head's denominator that belongs to no key, [query heads]."""

    @property
    def is_plain(self) -> bool:
        """Whether it is the causal softmax alone."""
        return self.mask == CAUSAL and not self.softcap and self.sinks_H is None


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries, keys and values of some tokens to their outputs; differentiable."""

AttendScored = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]
"""The same, for layers that differ in their heads and in what they compute."""


@dataclass(frozen=True, slots=True, eq=False)
class PackAttention:
    """What a decoder must know about a pack: its tokens' positions, and how they attend."""

    positions_T: Tensor
    """Position of each token in its document, int64 [T]."""
    attend: Attend
    """Called once in each layer's forward pass, and again if the layer is recomputed."""
    attend_scored: AttendScored | None = None
    """The same attention for layers of other models."""
    longest_tokens: int = 0
    """Length of the longest document of the whole pack, wherever it lies [tokens]."""


def require_alike(q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor, *, cached: int = 0) -> None:
    """Refuse queries, keys and values that do not match; ``cached`` keys are of earlier tokens.

    Raises:
        LayoutError: their dimensions, tokens, heads, widths, dtypes or devices do not match.
    """
    q, k, v = q_tHE, k_tGE, v_tGE
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape:
        raise LayoutError(
            f"Queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} do not "
            f"match. Each must be [tokens, heads, width], keys and values of the same shape."
        )
    if (len(q) + cached, q.shape[2]) != (len(k), k.shape[2]):
        tokens = f"{len(q)} tokens" + (f", {cached} more are cached" if cached else "")
        raise LayoutError(
            f"Queries have {tokens} and width {q.shape[2]}, keys have {len(k)} tokens and "
            f"width {k.shape[2]}. Give them the same tokens and width."
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise LayoutError(
            f"Queries are {q.dtype} on {q.device}, keys {k.dtype} on {k.device} and values "
            f"{v.dtype} on {v.device}. All three must have the same dtype and device."
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise LayoutError(
            f"{q.shape[1]} query heads cannot be divided evenly among {k.shape[1]} key/value "
            f"heads. Give each key/value head the same number of query heads."
        )


def cast_as_autocast(*given: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as ``torch.autocast`` does for torch's own attention; float64 stays."""
    return tuple(
        x.to(torch.get_autocast_dtype(x.device.type))
        if torch.is_autocast_enabled(x.device.type)
        and x.is_floating_point()
        and x.dtype != torch.float64
        else x
        for x in given
    )


def lead_heads(x_tHE: Tensor) -> Tensor:
    """View ``x`` as aten's operators want it, [1, H, t, E]; copy it if its last stride is not 1.

    The flash operators on CPU take strides of heads and tokens, and read the width as if its
    stride were 1, whatever it is.
    """
    if x_tHE.shape[-1] > 1 and x_tHE.stride(-1) != 1:
        x_tHE = x_tHE.contiguous()
    return x_tHE.transpose(0, 1).unsqueeze(0)


def _spans(bounds: tuple[int, ...]) -> list[tuple[int, int]]:
    """Spans of the documents that are not empty: aten's operator divides by zero on empty ones."""
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]


def _forward_each(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [t, H, E] and log-sum-exp [t, H] of one document."""
    if not q.is_cpu:
        return forward_plain(q, k, v, True, 0.0)
    out, lse = _forward_cpu(lead_heads(q), lead_heads(k), lead_heads(v), 0.0, True)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def _backward_each(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of one document's queries, keys and values."""
    if not q.is_cpu:
        return backward_plain(grad_o, q, k, v, o, lse, True, 0.0)
    given = [lead_heads(x) for x in (grad_o, q, k, v, o)]
    parts = _backward_cpu(*given, lse.transpose(0, 1).unsqueeze(0), 0.0, True)
    return tuple(part.squeeze(0).transpose(0, 1) for part in parts)


class _AttendEach(torch.autograd.Function):
    """One document after another."""

    @staticmethod
    def forward(
        ctx: Any, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, bounds: tuple[int, ...]
    ) -> Tensor:
        o_THE = torch.empty_like(q_THE)
        wide = torch.promote_types(q_THE.dtype, torch.float32)
        lse_TH = q_THE.new_empty(q_THE.shape[:2], dtype=wide)
        for start, stop in _spans(bounds):
            o_THE[start:stop], lse_TH[start:stop] = _forward_each(
                *(x[start:stop] for x in (q_THE, k_TGE, v_TGE))
            )
        ctx.save_for_backward(q_THE, k_TGE, v_TGE, o_THE, lse_TH)
        ctx.bounds = bounds
        return o_THE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = ctx.saved_tensors
        grad_o_THE = grads[0].contiguous()
        grad_q, grad_k, grad_v = map(torch.empty_like, saved[:3])
        for start, stop in _spans(ctx.bounds):
            parts = _backward_each(*(x[start:stop] for x in (grad_o_THE, *saved)))
            for grad, part in zip((grad_q, grad_k, grad_v), parts, strict=True):
                grad[start:stop] = part
        return grad_q, grad_k, grad_v, None


def _attend_on_cuda(
    q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, bounds: Tensor, longest: int
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q_THE.contiguous(),
        k_TGE.contiguous(),
        v_TGE.contiguous(),
        bounds,
        bounds,
        longest,
        longest,
        window_size=(-1, 0),
        enable_gqa=q_THE.shape[1] != k_TGE.shape[1],
    )
    assert isinstance(out, Tensor)  # noqa: S101  a pair only where statistics are asked for
    return out


def attend_documents(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    doc_tokens: Sequence[int],
    *,
    bounds_D: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention inside each document of a pack.

    Args:
        q_THE: Queries [packed tokens, query heads, head width], of any strides.
        k_TGE: Keys; the number of key/value heads divides the number of query heads.
        v_TGE: Values, shaped like the keys.
        doc_tokens: Length of each document, in pack order [tokens]; they sum to T.
        bounds_D: Where documents begin and end, int32 [documents + 1], on a device that would
            otherwise be sent them in each call.

    Returns:
        ``o_THE``, differentiable in all three inputs.

    Raises:
        LayoutError: the tensors do not match.
        ValueError: the lengths do not sum to T, or one is negative.
    """
    q_THE, k_TGE, v_TGE = cast_as_autocast(q_THE, k_TGE, v_TGE)
    require_alike(q_THE, k_TGE, v_TGE)
    if min(doc_tokens, default=0) < 0:
        raise ValueError(f"A document has {min(doc_tokens)} tokens: lengths are 0 or more.")
    bounds = [0]
    for tokens in doc_tokens:
        bounds.append(bounds[-1] + tokens)
    if bounds[-1] != q_THE.shape[0]:
        raise ValueError(
            f"The {len(doc_tokens)} documents hold {bounds[-1]} tokens, the pack "
            f"{q_THE.shape[0]}: pass the length of every document of the pack."
        )
    if q_THE.is_cuda and q_THE.dtype in FLASH_DTYPES and len(q_THE):
        if bounds_D is None:
            bounds_D = send(torch.tensor(bounds, dtype=torch.int32), q_THE.device)
        return _attend_on_cuda(q_THE, k_TGE, v_TGE, bounds_D, max(doc_tokens))
    out: Tensor = _AttendEach.apply(q_THE, k_TGE, v_TGE, tuple(bounds))
    return out


def pack_attention(doc_tokens: Sequence[int], device: torch.device) -> PackAttention:
    """Attention inside each document of a pack that is whole on this rank.

    Args:
        doc_tokens: Length of each document, in pack order [tokens].
        device: Where the tokens are.

    >>> pack_attention([3, 2], torch.device("cpu")).positions_T.tolist()
    [0, 1, 2, 0, 1]
    """
    lengths_D = torch.tensor([0, *doc_tokens])
    bounds_D = lengths_D.cumsum(0)
    tokens = sum(doc_tokens)
    starts_T = torch.repeat_interleave(bounds_D[:-1], lengths_D[1:], output_size=tokens)
    positions_T = send(torch.arange(tokens) - starts_T, device)
    attend = partial(
        attend_documents,
        doc_tokens=tuple(doc_tokens),
        bounds_D=send(bounds_D.to(torch.int32), device),
    )
    return PackAttention(positions_T, attend)
