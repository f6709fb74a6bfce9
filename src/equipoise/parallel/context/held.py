"""Rows and heads that a rank holds during a pass: its own, and buffers for arriving ones."""

from torch import Tensor

from equipoise.parallel.context.program import Rows


def hold(x_tHE: Tensor, rows: Rows, count: int, heads: slice) -> Tensor:
    """A buffer for all held rows, with home rows filled in; ``x`` itself if it is all of them."""
    if count == len(x_tHE) and heads == slice(0, x_tHE.shape[1]):
        return x_tHE
    held = x_tHE.new_empty(count, heads.stop - heads.start, x_tHE.shape[2])
    held[rows] = x_tHE[:, heads]
    return held


def add_rows(x_tHE: Tensor, rows: Rows, heads: slice, part: Tensor) -> None:
    """Add to some rows and heads of a tensor, in place."""
    if isinstance(rows, slice):
        x_tHE[rows, heads] += part
    else:
        x_tHE[:, heads].index_add_(0, rows, part)
