"""A function of rows between gathering them and summing its outputs, or beside one, by parts.

What it decides
    With d parts, while ``f`` computes part k, part k + 1 is gathered, and the sums of part k - 1
    travel back::

        link     gather 0 | gather 1 | gather 2, sums 0 | gather 3, sums 1 | ...
        rank              | f of 0   | f of 1           | f of 2           | ...

    A part has rows of every rank, in the order of ranks. ``f`` must treat every row for itself.
    ``gather_in_parts`` is the left half of this alone, ``sum_in_parts`` the right one: attention
    needs all rows between the two.

Kept true (tests/multi/parallel/test_overlap.py)
    Outputs and gradients equal those of one part; sums are taken in the order of ranks.

Sources
    T3, arXiv:2401.16677; all-gather with product, product with reduce-scatter in parts: Wang et
    al., ASPLOS 2023, "Overlap communication with dependent computation via decomposition".
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.comm.mesh import Peers
from equipoise.nn.shuffle import permute_rows
from equipoise.parallel.overlap.parts import part_rows
from equipoise.parallel.overlap.travel import RowsTravel
from equipoise.spec.layout import rows_of


def feed_in_parts(
    x_tD: Tensor, tokens: int, f: Callable[[Tensor], Tensor], peers: Peers, parts: int
) -> Tensor:
    """This rank's rows of the sum over ranks of ``f`` of all ranks' rows, [t, D].

    Args:
        x_tD: This rank's rows.
        tokens: Rows of all ranks.
        f: From rows [R, D] to this rank's part of their outputs [R, D].
        peers: The ranks, which all call it.
        parts: At least 1, and no more than the fewest rows of a rank.
    """
    table = _parts_of_ranks(tokens, peers, parts)
    gathering = _Gathering.begin(x_tD, table, peers)
    summing = _sums(table, peers)
    leaving = [summing[k].start(f(gathering.take(k))) for k in range(parts)]
    return _finish_sums(summing, leaving, table, peers)


def gather_in_parts(
    x_tD: Tensor,
    tokens: int,
    f: Callable[[Tensor], tuple[Tensor, ...]],
    peers: Peers,
    parts: int,
) -> tuple[Tensor, ...]:
    """``f`` of all ranks' rows, in the order of ranks, each part computed while the next one comes.

    Args:
        x_tD: This rank's rows.
        tokens: Rows of all ranks.
        f: From rows [R, D] to tensors of as many rows.
        peers: The ranks, which all call it.
        parts: As for ``feed_in_parts``.
    """
    table = _parts_of_ranks(tokens, peers, parts)
    gathering = _Gathering.begin(x_tD, table, peers)
    outputs = [f(gathering.take(k)) for k in range(parts)]
    back = torch.from_numpy(np.argsort(_by_part(table))).to(x_tD.device)
    return tuple(permute_rows(torch.cat(each), back) for each in zip(*outputs, strict=True))


def sum_in_parts(x_TC: Tensor, f: Callable[[Tensor], Tensor], peers: Peers, parts: int) -> Tensor:
    """This rank's rows of the sum over ranks of ``f``, whose parts leave while others are computed.

    Args:
        x_TC: Rows of all ranks' tokens, in the order of ranks; every rank has other columns.
        f: From rows [R, C] to this rank's part of their outputs [R, D].
        peers: The ranks, which all call it.
        parts: As for ``feed_in_parts``.
    """
    table = _parts_of_ranks(len(x_TC), peers, parts)
    order = torch.from_numpy(_by_part(table)).to(x_TC.device)
    rows = permute_rows(x_TC, order).split(table.sum(axis=1).tolist())
    summing = _sums(table, peers)
    leaving = [summing[k].start(f(rows[k])) for k in range(parts)]
    return _finish_sums(summing, leaving, table, peers)


def _parts_of_ranks(tokens: int, peers: Peers, parts: int) -> Ints:
    """Rows of each rank in each part, int64 [parts, ranks]."""
    counts = [len(rows_of(tokens, ranks=peers.count, rank=rank)) for rank in range(peers.count)]
    return part_rows(np.array(counts), parts)


def _by_part(table: Ints) -> Ints:
    """Rows that lie by rank, in the order of parts and then of ranks.

    >>> _by_part(np.array([[1, 1], [1, 2]])).tolist()
    [0, 2, 1, 3, 4]
    """
    totals = table.sum(axis=0)
    starts = np.cumsum(totals) - totals + np.cumsum(table, axis=0) - table
    runs = zip(starts.reshape(-1).tolist(), table.reshape(-1).tolist(), strict=True)
    return np.concatenate([np.arange(start, start + count) for start, count in runs])


@dataclass(slots=True, eq=False)
class _Gathering:
    """Parts of all ranks' rows, the next one always on its way."""

    rows: tuple[Tensor, ...]
    """This rank's rows, by part."""
    ways: list[RowsTravel]
    started: list[Tensor]
    ranks: int

    @classmethod
    def begin(cls, x_tD: Tensor, table: Ints, peers: Peers) -> "_Gathering":
        """Send the first part."""
        mine = table[:, peers.rank].tolist()
        ways = [
            RowsTravel(peers.group, [own] * peers.count, table[k].tolist())
            for k, own in enumerate(mine)
        ]
        rows = x_tD.split(mine)
        return cls(rows, ways, [_start(ways[0], rows[0], peers.count)], peers.count)

    def take(self, k: int) -> Tensor:
        """All ranks' rows of a part, in the order of ranks; the next part is sent before."""
        if k + 1 < len(self.ways):
            self.started.append(_start(self.ways[k + 1], self.rows[k + 1], self.ranks))
        return self.ways[k].finish(self.started[k])


def _sums(table: Ints, peers: Peers) -> list[RowsTravel]:
    """The ways of each part's outputs to the ranks of their rows."""
    return [
        RowsTravel(peers.group, rows.tolist(), [int(rows[peers.rank])] * peers.count)
        for rows in table
    ]


def _finish_sums(
    summing: list[RowsTravel], leaving: list[Tensor], table: Ints, peers: Peers
) -> Tensor:
    """This rank's rows of the sums, in the order of ranks."""
    mine = table[:, peers.rank].tolist()
    sums = [
        travel.finish(each).unflatten(0, (peers.count, own)).sum(0)
        for travel, each, own in zip(summing, leaving, mine, strict=True)
    ]
    return torch.cat(sums)


def _start(travel: RowsTravel, rows: Tensor, ranks: int) -> Tensor:
    """Send rows to every rank."""
    return travel.start(rows.expand(ranks, *rows.shape).reshape(-1, *rows.shape[1:]))
