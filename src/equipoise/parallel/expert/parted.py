"""Expert parallelism in parts: rows of one part travel while those of another are computed.

What it decides
    Of the rows that a rank has for an expert, each part has as many as the others, or one more.
    All ranks exchange counts once, from which each knows every part. While experts compute part k,
    the rows of part k + 1 come, and the outputs of part k - 1 go back.

Kept true (tests/multi/parallel/test_overlap.py)
    Loss and every gradient equal one rank's; the bytes sent are those of one part.

Sources
    Adaptive pipelining: Tutel, arXiv:2206.03382, section 3.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.base.arrays import Ints
from equipoise.nn.moe.layer import ExchangeSteps, Experts, run_steps
from equipoise.nn.moe.matmul import expert_swiglu
from equipoise.nn.shuffle import permute_rows
from equipoise.parallel.expert.exchange import ExpertExchange, sort_arrivals
from equipoise.parallel.overlap.parts import PartedSites, part_rows
from equipoise.parallel.overlap.travel import RowsTravel
from equipoise.spec.run.resolved import PartMachine


@dataclass(frozen=True, slots=True, eq=False)
class PartedExchange:
    """Sends rows to the ranks of their experts in parts, and their outputs back."""

    base: ExpertExchange
    sites: PartedSites
    ffn: int
    """Hidden units of an expert."""

    def __call__(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> Tensor:
        """Outputs [R, D]; rows are sorted by expert, ``counts_X`` rows each."""
        return run_steps(self.steps(x_RD, counts_X, experts))

    def steps(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> ExchangeSteps:
        """As ``__call__``, in steps: parts travel beside one another, and one beside the caller."""
        parts = self._choose(x_RD)
        if parts == 1:
            return (yield from self.base.steps(x_RD, counts_X, experts))
        yield
        y_RD = self._run(x_RD, counts_X, experts, parts)
        yield
        return y_RD

    def _run(self, x_RD: Tensor, counts_X: Tensor, experts: Experts, parts: int) -> Tensor:
        base = self.base
        here = part_rows(base.tell(counts_X).numpy(force=True), parts)
        leaving = part_rows(counts_X.numpy(force=True), parts)
        ends = np.cumsum(base.experts)[:-1]
        sent = [[int(each.sum()) for each in np.split(part, ends)] for part in leaving]
        received = here.sum(axis=2).tolist()
        order = torch.from_numpy(deal_parts(leaving)).to(x_RD.device)
        out = [base.way(*way) for way in zip(sent, received, strict=True)]
        back = [base.way(*way) for way in zip(received, sent, strict=True)]

        def products(
            x_RD: Tensor, _counts: Tensor, gate: Tensor, up: Tensor, down: Tensor
        ) -> Tensor:
            rows = permute_rows(x_RD, order).split(leaving.sum(axis=1).tolist())

            def part(k: int, arrived: Tensor) -> Tensor:
                here_NX = torch.from_numpy(np.ascontiguousarray(here[k])).to(x_RD.device)
                by_expert = sort_arrivals(here_NX, len(arrived))
                ends = here_NX.sum(0).cumsum(0).to(torch.int32)
                y_SD = expert_swiglu(permute_rows(arrived, by_expert), ends, gate, up, down)
                return permute_rows(y_SD, torch.argsort(by_expert))

            return run_parts(rows, out, back, part)

        # Inside of the experts' forward, so that ZeRO gathers their weights once.
        return permute_rows(experts(x_RD, counts_X, products), torch.argsort(order))

    def _choose(self, x_RD: Tensor) -> int:
        """Parts for the rank with most rows, which all ranks must know where it is left open."""
        peers, most, width = self.base.peers, len(x_RD), x_RD.shape[1]
        if isinstance(self.sites.parts, PartMachine) and peers.count > 1:
            own = torch.tensor([most], device=x_RD.device)
            every = own.new_empty(peers.count)
            dist.all_gather_single(every, own, group=peers.group)
            most = int(every.max())
        sent = 2 * most * width * x_RD.element_size() * (peers.count - 1) / peers.count
        return self.sites.choose(flop=6.0 * most * width * self.ffn, moved_bytes=sent)


def run_parts(
    rows: Sequence[Tensor],
    out: Sequence[RowsTravel],
    back: Sequence[RowsTravel],
    compute: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Outputs of this rank's rows, part after part; one travels while another is computed.

    Args:
        rows: Of each part, as they leave.
        out: Their ways to the ranks that compute them.
        back: And back.
        compute: From a part's number and the rows that arrived to their outputs.
    """
    parts = len(rows)
    started, returning = [out[0].start(rows[0])], []
    for k in range(parts):
        if k + 1 < parts:
            started.append(out[k + 1].start(rows[k + 1]))
        returning.append(back[k].start(compute(k, out[k].finish(started[k]))))
    return torch.cat([way.finish(each) for way, each in zip(back, returning, strict=True)])


def deal_parts(leaving: Ints) -> Ints:
    """The order in which rows sorted by expert leave: by part, then by expert.

    Args:
        leaving: Rows of each part for each expert, int64 [parts, X].

    >>> deal_parts(np.array([[1, 1], [2, 0]])).tolist()
    [0, 3, 1, 2]
    """
    totals = leaving.sum(axis=0)
    starts = np.cumsum(totals) - totals + np.cumsum(leaving, axis=0) - leaving
    runs = [
        np.arange(start, start + count)
        for start, count in zip(
            starts.reshape(-1).tolist(), leaving.reshape(-1).tolist(), strict=True
        )
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *runs]).astype(np.int64)
