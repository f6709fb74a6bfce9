"""Rows that are on their way while this rank computes, forward and backward.

Why
    A product of rows that wait for the last of them leaves the link idle, and the link leaves the
    product idle. In parts, the second part travels while the first is computed.

What it decides
    One part's way is two steps. ``start`` hands rows to the network and returns at once, ``finish``
    waits for them. The backward is the mirror image: that of ``finish`` hands gradients to the
    network, that of ``start`` waits for them. Autograd runs the newest step first, so the order in
    which a forward starts and finishes parts is, reversed, that of its backward, on every rank.

    What ``start`` returns has no values before ``finish``: nothing else may read it.

Kept true (tests/multi/parallel/test_overlap.py)
    Values and gradients are those of one exchange of all rows.

Sources
    T3 (track and trigger), arXiv:2401.16677: here in software, by parts instead of tiles.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class TravelWatch(Protocol):
    """Counts rows that leave and arrive."""

    def leave(self, row_bytes: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Rows of this size leave, ``sent`` to each rank, and ``received`` come from each."""

    def arrive(self, beside_s: float, waited_s: float) -> None:
        """They have come: the rank computed for ``beside_s``, and then waited."""


@dataclass(slots=True, eq=False)
class RowsTravel:
    """One part's way through a group."""

    group: dist.ProcessGroup | None
    """None for a rank alone, whose rows stay."""
    sent: list[int]
    """Rows to each rank, which lie in this order."""
    received: list[int]
    """Rows from each."""
    watch: "TravelWatch | None" = None
    _arriving: list[tuple[Tensor, Any, float]] = field(default_factory=list)

    def start(self, rows: Tensor) -> Tensor:
        """Hand rows to the network; the result is for ``finish`` alone."""
        out: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]
        return out

    def finish(self, started: Tensor) -> Tensor:
        """The rows that arrived."""
        out: Tensor = _Finish.apply(started, self)  # type: ignore[no-untyped-call]
        return out

    def launch(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Begin an exchange, to be awaited by ``arrive``."""
        if self.group is None:
            self._arriving.append((rows, None, 0.0))
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        if self.watch is not None:
            self.watch.leave(rows.element_size() * rows.shape[1:].numel(), sent, received)
        rows = rows.contiguous()
        work = dist.all_to_all_single(
            out, rows, list(received), list(sent), group=self.group, async_op=True
        )
        # What leaves must not be freed.
        self._arriving.append((out, (work, rows), time.perf_counter()))
        return out

    def arrive(self) -> Tensor:
        """Wait for what was launched."""
        out, going, left_s = self._arriving.pop()
        if going is not None:
            asked_s = time.perf_counter()
            going[0].wait()
            if self.watch is not None:
                self.watch.arrive(asked_s - left_s, time.perf_counter() - asked_s)
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: RowsTravel) -> Tensor:
        ctx.travel = travel
        started = travel.launch(rows, travel.sent, travel.received)
        return started.view_as(started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del grads  # of rows that had not arrived
        return ctx.travel.arrive(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, travel: RowsTravel) -> Tensor:
        ctx.travel = travel
        arrived = travel.arrive()
        return arrived.view_as(started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.travel.launch(grads[0], ctx.travel.received, ctx.travel.sent)
        return grads[0], None  # nobody reads it: ``_Start`` has what arrives
