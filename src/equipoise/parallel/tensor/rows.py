"""Rows of tokens between ranks: all of them to each, and sums of them back; any numbers of rows.

What it decides
    Both directions are one all-to-all. Sums add the parts of the ranks in their order, so they
    are bitwise the same on every run; no row is padded, and a rank may have none.

Kept true (tests/multi/parallel/test_tensor.py)
    Gathered rows are the rows, sums are sums, each is the other's backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.comm.mesh import Peers
from equipoise.spec.layout import rows_of


def _counts(tokens: int, peers: Peers) -> list[int]:
    return [len(rows_of(tokens, ranks=peers.count, rank=rank)) for rank in range(peers.count)]


def gather_rows(x_tD: Tensor, tokens: int, peers: Peers) -> Tensor:
    """Every rank's rows, in the order of ranks [tokens, ...]."""
    counts = _counts(tokens, peers)
    rows = x_tD.new_empty(tokens, *x_tD.shape[1:])
    if min(counts) == max(counts):
        dist.all_gather_single(rows, x_tD.contiguous(), group=peers.group)
        return rows
    sent = x_tD.repeat(peers.count, *(1 for _ in x_tD.shape[1:]))
    dist.all_to_all_single(rows, sent, counts, [len(x_tD)] * peers.count, group=peers.group)
    return rows


def sum_rows(partial_TD: Tensor, peers: Peers) -> Tensor:
    """This rank's rows of the sum of every rank's tensor."""
    counts = _counts(len(partial_TD), peers)
    own = counts[peers.rank]
    parts = partial_TD.new_empty(peers.count * own, *partial_TD.shape[1:])
    dist.all_to_all_single(
        parts, partial_TD.contiguous(), [own] * peers.count, counts, group=peers.group
    )
    summed: Tensor = parts.unflatten(0, (peers.count, own)).sum(0)
    return summed


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, tokens: int, peers: Peers) -> Tensor:
        ctx.peers = peers
        return gather_rows(x_tD, tokens, peers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(grads[0], ctx.peers), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_TD: Tensor, peers: Peers) -> Tensor:
        ctx.peers, ctx.tokens = peers, len(partial_TD)
        return sum_rows(partial_TD, peers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_rows(grads[0], ctx.tokens, ctx.peers), None


def enter(x_tD: Tensor, tokens: int, peers: Peers) -> Tensor:
    """``gather_rows``, differentiable: the backward is ``sum_rows``."""
    rows: Tensor = _GatherRows.apply(x_tD, tokens, peers)  # type: ignore[no-untyped-call]
    return rows


def leave(partial_TD: Tensor, peers: Peers) -> Tensor:
    """``sum_rows``, differentiable: the backward is ``gather_rows``."""
    rows: Tensor = _Sum.apply(partial_TD, peers)  # type: ignore[no-untyped-call]
    return rows
