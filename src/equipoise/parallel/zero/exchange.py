"""How CPU ranks gather weights and scatter gradients: by exchanging parts, each sent once.

Why
    Gloo reduces and scatters by reducing all of a copy everywhere, and gathers in a ring through
    buffers of its own. Sending each rank its part alone moves as many bytes and copies fewer.

What it decides
    ::

        reduce-scatter   rank 0    a0 b0 | a1 b1         rank 0 has the first part of every rank,
                         rank 1    c0 d0 | c1 d1         a0 + c0, b0 + d0, added by number of rank

    Two ranks swap what the other lacks, and nothing passes through a message to oneself. More of
    them gather as gloo does: an exchange would have to lay out a copy for each.

Kept true (tests/multi/parallel/test_zero.py)
    What gloo's own collectives give, for two ranks and for more; a second time bit for bit.

Sources
    torch 2.13, ``FSDPModule.set_custom_all_gather``; ``bench/peers/zero.py`` for seconds.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from equipoise.comm.meter import WaitMeter

NotePart = Callable[[Tensor, dist.ProcessGroup], object]
"""Takes a part that goes to each other rank of a group, and the group, before it goes."""


class _Exchange:
    """One of the two, on a rank.

    Args:
        meter: Of the time that this rank waits.
        note: Counts what is sent; nothing does unless given.
    """

    def __init__(self, meter: WaitMeter, note: NotePart = lambda *_: None) -> None:
        self._meter, self._note = meter, note

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer that is not filled."""
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangeGather(_Exchange, AllGather):
    """All parts on every rank."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output`` with every rank's ``input``, in order."""
        self._note(input_tensor, group)
        if group.size() != 2:
            with self._meter.wait():
                work: dist.Work | None = dist.all_gather_single(
                    output_tensor, input_tensor, group=group, async_op=async_op
                )
            return work
        parts = output_tensor.chunk(2)
        mine, other = parts[group.rank()], parts[1 - group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        with self._meter.wait():
            return _swap(other, mine, group, async_op=async_op)


class ExchangeReduce(_Exchange, ReduceScatter):
    """The sum over ranks of this rank's part."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill ``output`` with the sum of every rank's part of this rank's number, and wait for it.

        Raises:
            ValueError: another reduction than a sum.
        """
        del async_op
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"Gradients are summed, and {op} was asked for: force a sum.")
        self._note(output_tensor, group)
        if group.size() == 2:
            parts = input_tensor.chunk(2)
            came = torch.empty_like(output_tensor)
            with self._meter.wait():
                _swap(came, parts[1 - group.rank()], group)
            torch.add(parts[group.rank()], came, out=output_tensor)
            return
        came = torch.empty_like(input_tensor)
        with self._meter.wait():
            dist.all_to_all_single(came, input_tensor, group=group)
        torch.sum(came.view(group.size(), -1), 0, out=output_tensor)


def _swap(
    came: Tensor, sent: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Exchange with the other of two ranks, and with oneself nothing."""
    sizes = [0, 0]
    sizes[1 - group.rank()] = len(sent)
    work: dist.Work | None = dist.all_to_all_single(
        came, sent, sizes, sizes, group=group, async_op=async_op
    )
    return work
