"""A function of rows between gathering them and summing its outputs back, part by part.

What it decides
    With d parts, while ``f`` computes part k, part k + 1 is gathered, and the sums of part k - 1
    travel back::

        link     gather 0 | gather 1 | gather 2, sums 0 | gather 3, sums 1 | ...
        rank              | f of 0   | f of 1           | f of 2           | ...

    A part has rows of every rank, in the order of ranks. ``f`` must treat every row for itself.

Kept true (tests/multi/parallel/test_overlap.py)
    Outputs and gradients equal those of one part; sums are taken in the order of ranks.

Sources
    T3, arXiv:2401.16677; all-gather with product, product with reduce-scatter in parts: Wang et
    al., ASPLOS 2023, "Overlap communication with dependent computation via decomposition".
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from equipoise.comm.mesh import Peers
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
    counts = [len(rows_of(tokens, ranks=peers.count, rank=rank)) for rank in range(peers.count)]
    table = part_rows(np.array(counts), parts)
    mine = table[:, peers.rank].tolist()
    rows = x_tD.split(mine)
    gathering = [
        RowsTravel(peers.group, [own] * peers.count, table[k].tolist())
        for k, own in enumerate(mine)
    ]
    summing = [
        RowsTravel(peers.group, table[k].tolist(), [own] * peers.count)
        for k, own in enumerate(mine)
    ]
    started = [_start(gathering[0], rows[0], peers.count)]
    leaving = []
    for k in range(parts):
        if k + 1 < parts:
            started.append(_start(gathering[k + 1], rows[k + 1], peers.count))
        outputs = f(gathering[k].finish(started[k]))
        leaving.append(summing[k].start(outputs))
    sums = [
        travel.finish(each).unflatten(0, (peers.count, own)).sum(0)
        for travel, each, own in zip(summing, leaving, mine, strict=True)
    ]
    return torch.cat(sums)


def _start(travel: RowsTravel, rows: Tensor, ranks: int) -> Tensor:
    """Send rows to every rank."""
    return travel.start(rows.expand(ranks, *rows.shape).reshape(-1, *rows.shape[1:]))
