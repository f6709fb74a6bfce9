"""Which experts take which tokens: the choice, the rows sorted by expert, and the way back.

Why
    Experts compute fast on contiguous rows. A token becomes ``top_k`` rows, one for each expert it
    chose; rows are sorted by expert, computed, and summed back into their token.

    ::

        token      0     1     2            rows by expert   0: t0 t2 | 1: t1 | 2: t0 | 3: t1 t2
        chooses   0,2   1,3   0,3           place_TK         t0: 0, 3   t1: 2, 4   t2: 1, 5

What it decides
    Ties go to the expert with the lower number, an expert's rows are in the order of their
    tokens, and a token's experts are summed in its order of preference: the same bits on every
    run, forward and backward, without atomics.

    With a capacity an expert keeps its highest-scoring rows, the first among equals; a dropped row
    adds nothing to its token. The capacity follows from the tokens given here, a rank's
    micro-batch: which rows are dropped depends on how documents were packed, as in Switch and
    GShard, but not on where the experts live.

Kept true (tests/unit/nn/moe/test_route.py, by Hypothesis)
    Every row is either kept or dropped, once; an expert drops rows only when its capacity is full;
    spreading and gathering back with weights of 1 / top_k is the identity.

Sources
    Capacity: Switch Transformers, arXiv:2101.03961, section 2.2.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.moe.balance import count_choices


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """Tokens' choices as rows sorted by expert."""

    token_R: Tensor
    """The token of each row, int64 [R]."""
    slot_R: Tensor
    """The index of each row among all choices, ``token * top_k + preference``, int64 [R]."""
    place_TK: Tensor
    """The row of each choice, int64 [T, K]; R if it was dropped, or needs none."""
    counts_X: Tensor
    """Rows of each expert, int64 [X]."""
    is_whole: bool
    """Whether every choice has a row."""


def choose(scores_TX: Tensor, top_k: int) -> Tensor:
    """Each token's ``top_k`` experts with the highest scores, best first, int64 [T, K]."""
    order: Tensor = torch.sort(scores_TX, dim=1, descending=True, stable=True).indices
    return order[:, :top_k].clone()  # a view would keep a place of every expert for the backward


def chosen_experts(rows: ExpertRows) -> Tensor:
    """Each token's experts, best first, int64 [T, K]; every choice must have a row."""
    return torch.searchsorted(rows.counts_X.cumsum(0), rows.place_TK, right=True)


def capacity(tokens: int, *, top_k: int, experts: int, factor: float) -> int:
    """The most rows that one expert takes from ``tokens`` tokens, which choose it once each.

    >>> capacity(100, top_k=2, experts=8, factor=1.25), capacity(100, top_k=2, experts=8, factor=50)
    (32, 100)
    """
    return math.ceil(min(tokens, factor * tokens * top_k / experts))


def sort_rows(
    chosen_TK: Tensor, scores_TK: Tensor, *, experts: int, factor: float, identities: int = 0
) -> ExpertRows:
    """Sort choices by expert, and drop those beyond the capacity.

    Args:
        chosen_TK: Experts of each token, int64 [T, K].
        scores_TK: Their scores, by which rows are kept [T, K].
        experts: X.
        factor: Capacity over an even share; 0 keeps all.
        identities: Experts without weights, whose numbers follow; they compute no rows.

    Raises:
        ModelError: a token chose an expert that does not exist. On a device, whose choices the host
            would wait for, torch refuses it.
    """
    tokens, top_k = chosen_TK.shape
    flat = chosen_TK.reshape(-1)
    slots = torch.argsort(flat, stable=True)
    try:
        counts_X = count_choices(flat, experts + identities)
    except RuntimeError:
        wrong = flat[(flat < 0) | (flat >= experts + identities)]
        if not len(wrong):
            raise
        raise ModelError(
            f"A token chose expert {wrong[0]}, and a layer has {experts + identities}, from 0 on."
        ) from None
    most = capacity(tokens, top_k=top_k, experts=experts, factor=factor) if factor else tokens
    # Only these let the host wait: how many rows are kept depends on the scores.
    is_whole = not identities and (not factor or not bool((counts_X > most).any()))
    if not is_whole:
        keep = _best(flat, scores_TK.reshape(-1), counts_X, most) & (flat < experts)
        slots = slots[keep[slots]]
        counts_X = counts_X[:experts].clamp_max(most)
    place = torch.full_like(flat, len(slots))
    place[slots] = torch.arange(len(slots), device=flat.device)
    return ExpertRows(slots // top_k, slots, place.view(tokens, top_k), counts_X, is_whole)


def _best(flat: Tensor, scores: Tensor, counts_X: Tensor, most: int) -> Tensor:
    """Whether each choice is among the best ``most`` of its expert."""
    by_score = torch.argsort(scores, descending=True, stable=True)
    by_expert = by_score[torch.argsort(flat[by_score], stable=True)]
    begins = counts_X.cumsum(0) - counts_X
    rank = torch.arange(len(flat), device=flat.device) - begins[flat[by_expert]]
    keep = torch.empty_like(flat, dtype=torch.bool)
    keep[by_expert] = rank < most
    return keep


def _padded(rows_RD: Tensor, rows: ExpertRows) -> Tensor:
    """The rows, and a row of zeros for the choices that were dropped."""
    if rows.is_whole:
        return rows_RD
    return torch.cat((rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return x_TD[rows.token_R]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows: ExpertRows = ctx.rows
        padded = _padded(grads[0], rows)
        grad_TD = padded[rows.place_TK[:, 0]]
        for preference in range(1, rows.place_TK.shape[1]):
            grad_TD += padded[rows.place_TK[:, preference]]
        return grad_TD, None


def spread(x_TD: Tensor, rows: ExpertRows) -> Tensor:
    """The tokens as rows sorted by expert [R, D]."""
    out: Tensor = _Spread.apply(x_TD, rows)
    return out


class _GatherBack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, rows: ExpertRows
    ) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK)
        ctx.rows = rows
        padded = _padded(y_RD, rows)
        out_TD = residual_TD.clone()
        for preference in range(weights_TK.shape[1]):
            part = padded[rows.place_TK[:, preference]]
            out_TD.addcmul_(weights_TK[:, preference : preference + 1], part)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad_TD,) = grads
        y_RD, weights_TK = ctx.saved_tensors
        rows: ExpertRows = ctx.rows
        grad_RD = grad_TD[rows.token_R]
        products = torch.zeros_like(weights_TK).view(-1)
        products[rows.slot_R] = (grad_RD * y_RD).sum(1)
        grad_RD *= weights_TK.reshape(-1)[rows.slot_R].unsqueeze(1)
        return grad_TD, grad_RD, products.view_as(weights_TK), None


def gather_back(residual_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, rows: ExpertRows) -> Tensor:
    """``residual`` plus the weighted outputs of each token's experts [T, D]."""
    out: Tensor = _GatherBack.apply(residual_TD, y_RD, weights_TK, rows)
    return out
