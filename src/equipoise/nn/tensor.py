"""What a decoder needs from ranks that share its weights: tensor and sequence parallelism.

Why
    A block (attention, feed-forward, head) computes with a share of its weights on all tokens of
    a pack; between blocks each rank keeps a share of the tokens, so that norms and the residual
    stream are neither computed nor kept twice. Two conjugate exchanges separate the two::

        x [t, D]  --enter: all tokens-->  block with 1/n of its weights  --leave: sum-->  [t, D]
        backward  <--sum over ranks-----                                 <--all tokens--

What it decides
    Rank ``r`` of ``n`` keeps tokens ``T r // n`` to ``T (r + 1) // n`` of a pack of T; T may be
    smaller than ``n``. Weights are split into runs of ``ceil(size / n)``, as torch places them.
    Plain tensor parallelism, with all tokens on every rank between blocks, moves the same bytes and
    keeps more, so it is not offered.

Kept true (tests/multi/parallel/test_tensor.py)
    Loss and every gradient equal one rank's.

Sources
    Tensor parallelism: arXiv:1909.08053. Sequence parallelism: arXiv:2205.05198.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn.functional import embedding


class TensorRanks(Protocol):
    """The ranks that share the weights of this one's layers."""

    @property
    def ranks(self) -> int:
        """Their number."""

    @property
    def rank(self) -> int:
        """This rank's number among them."""

    def enter(self, x_tD: Tensor, tokens: int) -> Tensor:
        """All ranks' rows in order [T, D]; the backward sums the ranks' gradients of them.

        Args:
            x_tD: This rank's rows.
            tokens: T, the rows of all ranks together.
        """

    def leave(self, partial_TD: Tensor) -> Tensor:
        """This rank's rows [t, D] of the sum of all ranks' tensors; the conjugate of ``enter``."""

    def through(self, x_tD: Tensor, tokens: int, f: Callable[[Tensor], Tensor]) -> Tensor:
        """``leave(f(enter(x)))`` for an ``f`` that treats every row for itself, in parts or whole.

        Args:
            x_tD: This rank's rows.
            tokens: T, the rows of all ranks together.
            f: From rows [R, D] to this rank's part of their outputs [R, D].
        """

    def enter_through(
        self, x_tD: Tensor, tokens: int, f: Callable[[Tensor], tuple[Tensor, ...]], columns: int
    ) -> tuple[Tensor, ...]:
        """``f(enter(x))`` for an ``f`` that treats every row for itself, in parts or whole.

        Args:
            x_tD: This rank's rows.
            tokens: T, the rows of all ranks together.
            f: From rows [R, D] to tensors of R rows.
            columns: Of all of them.
        """

    def leave_through(self, x_TC: Tensor, f: Callable[[Tensor], Tensor], columns: int) -> Tensor:
        """``leave(f(x))`` for an ``f`` that treats every row for itself, in parts or whole.

        Args:
            x_TC: Rows of all ranks.
            f: From rows [R, C] to this rank's part of their outputs.
            columns: Of these.
        """

    def max_(self, x: Tensor) -> Tensor:
        """The largest over ranks, elementwise, in place; not differentiable."""

    def sum_(self, x: Tensor) -> Tensor:
        """The sum over ranks, bitwise the same on each, in place; not differentiable."""

    def join_columns(self, x_Tv: Tensor, columns: int) -> Tensor:
        """All ranks' columns side by side [T, columns]; not differentiable."""


class Alone:
    """A single rank, which holds every weight whole."""

    ranks = 1
    rank = 0

    def enter(self, x_tD: Tensor, tokens: int) -> Tensor:
        """The rows as they are."""
        del tokens
        return x_tD

    def leave(self, partial_TD: Tensor) -> Tensor:
        """The sum of one."""
        return partial_TD

    def through(self, x_tD: Tensor, tokens: int, f: Callable[[Tensor], Tensor]) -> Tensor:
        """The function of the rows."""
        del tokens
        return f(x_tD)

    def enter_through(
        self, x_tD: Tensor, tokens: int, f: Callable[[Tensor], tuple[Tensor, ...]], columns: int
    ) -> tuple[Tensor, ...]:
        """The function of the rows."""
        del tokens, columns
        return f(x_tD)

    def leave_through(self, x_TC: Tensor, f: Callable[[Tensor], Tensor], columns: int) -> Tensor:
        """The function of the rows."""
        del columns
        return f(x_TC)

    def max_(self, x: Tensor) -> Tensor:
        """The largest of one."""
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of one."""
        return x

    def join_columns(self, x_Tv: Tensor, columns: int) -> Tensor:
        """The columns of one."""
        del columns
        return x_Tv


def part_of(size: int, *, ranks: int, rank: int) -> range:
    """The run of a split dim that one of the ranks holds.

    >>> [list(part_of(5, ranks=3, rank=rank)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    longest = -(-size // ranks)
    return range(min(size, longest * rank), min(size, longest * (rank + 1)))


def look_up(tokens_T: Tensor, words_vD: Tensor, words: int, tensor: TensorRanks) -> Tensor:
    """Hidden states of this rank's tokens, from an embedding whose words are split over ranks.

    Args:
        tokens_T: Packed token ids of all ranks [T].
        words_vD: This rank's rows of the table.
        words: Rows of the whole table, V.
        tensor: The ranks.

    Returns:
        Hidden states [t, D]. Each is the sum of one row and zeros, so it is exact.
    """
    if tensor.ranks == 1:
        return embedding(tokens_T, words_vD)
    own = part_of(words, ranks=tensor.ranks, rank=tensor.rank)
    is_other = (tokens_T < own.start) | (tokens_T >= own.stop)
    found_TD = embedding((tokens_T - own.start).masked_fill_(is_other, 0), words_vD)
    return tensor.leave(found_TD.masked_fill(is_other[:, None], 0.0))
