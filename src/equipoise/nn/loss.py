"""Cross-entropy of a vocabulary head, in chunks of tokens, with no logits kept.

Why
    Logits of 4,096 tokens over 128,256 words take 2 GiB in fp32, and their gradient as much.
    Here each chunk of tokens fits the cache, or is 128 of them if the vocabulary is large: its
    logits give the loss and gradients, and are freed.

What it decides
    Gradients are computed in the forward, because the loss is a plain sum: dividing it by the
    count of labels only scales both gradients in the backward.

    On a CPU only tokens with a label are multiplied by the head where an eighth or more have none,
    as in conversations of which answers are learned. Elsewhere the host would wait for the device
    to know which they are.

    Ranks that split the vocabulary exchange, for each token, the largest logit, the sum of
    exponentials and the logit of the label, which only one rank has: no rank sees all logits.

Kept true (tests/unit/nn/test_loss.py, tests/multi/parallel/test_tensor.py)
    Equal to ``cross_entropy(x @ w.T, labels, reduction="sum")`` in float64. Without a valid label
    loss and gradients are zero. The chunk size, leaving out tokens without a label, and splitting
    the vocabulary change only rounding.
"""

from typing import Any

import torch
from torch import Tensor

from equipoise.nn.tensor import Alone, TensorRanks, part_of

IGNORED = -1
"""Label of a token without a next one."""

_CHUNK_BYTES = 8 << 20
_FEWEST_ROWS = 128
"""A chunk reads the head's weights twice and adds to their gradient once. With fewer rows that
takes longer than what the cache saves: 850 rows of 49,152 words took 1.8 s in chunks of 42 rows,
1.2 s in chunks of 170."""
_FEWEST_LEFT_OUT = 8
"""At least one token in eight must be without a label before these are left out: gathering the
others takes longer otherwise."""


def _labelled_rows(labels_T: Tensor) -> Tensor | None:
    """The rows with a label, or None to take them all."""
    if labels_T.device.type != "cpu":
        return None
    rows = torch.nonzero(labels_T != IGNORED).squeeze(1)
    left_out = len(labels_T) - len(rows)
    return rows if left_out * _FEWEST_LEFT_OUT >= len(labels_T) else None


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        head_VD: Tensor,
        labels_T: Tensor,
        words: int,
        tensor: TensorRanks,
        scale: float,
        softcap: float,
    ) -> Tensor:
        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        own = part_of(words, ranks=tensor.ranks, rank=tensor.rank)
        # Sized for the longest share, so that all ranks meet in the same chunks.
        chunk = max(_FEWEST_ROWS, _CHUNK_BYTES // (wide.itemsize * -(-words // tensor.ranks)))
        total = x_TD.new_zeros((), dtype=wide)
        every_TD, rows = x_TD, _labelled_rows(labels_T)
        if rows is not None:
            x_TD, labels_T = x_TD[rows], labels_T[rows]
        needs_x, needs_head = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_TD) if needs_x else None
        grad_head = torch.zeros_like(head_VD, dtype=wide) if needs_head else None
        for start in range(0, x_TD.shape[0], chunk):
            x_CD, labels_C = x_TD[start : start + chunk], labels_T[start : start + chunk]
            valid_C = labels_C != IGNORED
            here_C = valid_C
            if tensor.ranks > 1:
                here_C = (labels_C >= own.start) & (labels_C < own.stop)
            target_C1 = (labels_C - own.start).masked_fill_(~here_C, 0).unsqueeze(1)
            logits_CV = (x_CD @ head_VD.t()).to(wide)
            slope_CV = _bend_(logits_CV, scale, softcap)
            logits_CV.sub_(tensor.max_(logits_CV.amax(1, keepdim=True)))
            target = logits_CV.gather(1, target_C1)
            sums_C1 = logits_CV.exp_().sum(1, keepdim=True)
            if tensor.ranks > 1:
                both = torch.cat((sums_C1, target.masked_fill_(~here_C.unsqueeze(1), 0)), 1)
                sums_C1, target = tensor.sum_(both).split(1, 1)
            total += (sums_C1.log() - target).squeeze(1).masked_fill_(~valid_C, 0).sum()
            if grad_x is None and grad_head is None:
                continue
            grad_CV = logits_CV.mul_(valid_C.unsqueeze(1) / sums_C1)
            grad_CV.scatter_add_(1, target_C1, -here_C.unsqueeze(1).to(wide))
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            narrow_CV = grad_CV.to(x_TD.dtype)
            if grad_x is not None:
                torch.mm(narrow_CV, head_VD, out=grad_x[start : start + chunk])
            if grad_head is not None and wide == x_TD.dtype:
                grad_head.addmm_(narrow_CV.t(), x_CD)
            elif grad_head is not None:
                grad_head += narrow_CV.t() @ x_CD
            del logits_CV, grad_CV, narrow_CV, slope_CV  # freed before the next chunk's are made
        if grad_x is not None and rows is not None:
            grad_x = torch.zeros_like(every_TD).index_copy_(0, rows, grad_x)
        ctx.grads = (grad_x, grad_head)
        ctx.dtype = head_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = ctx.grads
        ctx.grads = None
        (scale,) = grads
        return (
            None if grad_x is None else grad_x.mul_(scale.to(grad_x.dtype)),
            None if grad_head is None else grad_head.mul_(scale).to(ctx.dtype),
            *[None] * 5,
        )


def _bend_(logits_CV: Tensor, scale: float, softcap: float) -> Tensor | float | None:
    """Scale and cap logits in place; the slope of that, or None where nothing changes."""
    if scale != 1.0:
        logits_CV.mul_(scale)
    if not softcap:
        return None if scale == 1.0 else scale
    logits_CV.div_(softcap).tanh_()
    slope_CV = logits_CV.square().neg_().add_(1.0).mul_(scale)
    logits_CV.mul_(softcap)
    return slope_CV


_ALONE = Alone()


def head_loss(
    x_TD: Tensor,
    head_VD: Tensor,
    labels_T: Tensor,
    *,
    words: int | None = None,
    tensor: TensorRanks = _ALONE,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """Sum over tokens of the cross-entropy of ``x @ head.T`` against the labels.

    Args:
        x_TD: Last hidden states [T, D], the same on ranks that split the vocabulary.
        head_VD: Head weights [V, D], or this rank's rows of them.
        labels_T: Next token of each, or ``IGNORED``, int64 [T].
        words: V, if it is split.
        tensor: The ranks that split it.
        scale: Factor of the logits.
        softcap: Scaled logits are ``softcap * tanh(logit / softcap)``; 0 leaves them as they are.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs), the same on each of those ranks; differentiable
        once. The gradient of ``x`` is this rank's partial sum, from its own rows. Under
        ``torch.no_grad`` no gradient is computed.
    """
    words = head_VD.shape[0] if words is None else words
    if not torch.is_grad_enabled():  # a function's own forward cannot tell
        x_TD, head_VD = x_TD.detach(), head_VD.detach()
    out: Tensor = _HeadLoss.apply(x_TD, head_VD, labels_T, words, tensor, scale, softcap)
    return out
