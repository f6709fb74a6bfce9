"""Attention of documents that are divided over the micro-batches of one pipeline.

Why
    A document too long for one micro-batch can be cut into slices that follow each other
    through the same stages. That needs no messages: a slice's queries read the keys of earlier
    slices where those were computed, on the same rank, in the same layer::

        micro-batch        0        1        2
        document 7    |-- 0:6 --|-- 6:9 --|-- 9:12 --|     forward, left to right
        keys read         0:6       0:9       0:12         backward, right to left

What it decides
    Keys and values of a divided document stay from the forward of their slice to its backward,
    with buffers for their gradients, to which the backward of every later slice adds. So backwards
    run in reverse, within a schedule's units. A whole document keeps nothing.

    A layer that recomputes its forward reuses its own keys.

Kept true (tests/unit/parallel/test_pipeline_slices.py)
    Loss and every gradient equal one rank's on whole documents, however they are cut, recomputed
    or not; at the end of a step nothing is kept.

Sources
    Resident keys of slices in a pipeline: TeraPipe, arXiv:2102.07988; backward in reverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equipoise.base.errors import LayoutError
from equipoise.nn.attention import Attend, PackAttention
from equipoise.nn.tile import attend_tile, attend_tile_backward, merge_tile_, sum_dtype
from equipoise.spec.pack import MicroBatch

_Piece = tuple[int, int, int, int]
"""Document, start, stop, first token that it reads."""


@dataclass(frozen=True, slots=True)
class Slices:
    """A micro-batch's pieces, some of which read earlier micro-batches of the same step."""

    pieces: tuple[_Piece, ...]

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> "Slices":
        """Pieces of a micro-batch, as the packer divided them."""
        starts = micro_batch.begins
        rows = zip(micro_batch.pieces.tolist(), starts.tolist(), strict=True)
        return cls(tuple((d, start, stop, first) for (d, start, stop), first in rows))

    @property
    def tokens(self) -> int:
        """Tokens of all pieces."""
        return sum(stop - start for _, start, stop, _ in self.pieces)

    @property
    def reads(self) -> tuple[_Piece, ...]:
        """Pieces that read tokens before their own."""
        return tuple(piece for piece in self.pieces if piece[3] < piece[1])


@dataclass(slots=True, eq=False)
class _Held:
    """Keys and values of one slice in one layer, and their gradients from later slices."""

    stop: int
    k: Tensor
    v: Tensor
    grad_k: Tensor | None = None
    grad_v: Tensor | None = None

    def add(self, grad_k: Tensor, grad_v: Tensor) -> None:
        if self.grad_k is None or self.grad_v is None:
            wide = sum_dtype(grad_k.dtype)
            self.grad_k, self.grad_v = grad_k.to(wide), grad_v.to(wide)
        else:
            self.grad_k += grad_k
            self.grad_v += grad_v


_Layer = dict[tuple[int, int], _Held]
"""What one layer holds, by document and start."""


@dataclass(slots=True, eq=False)
class Resident:
    """Keys and values of divided documents on one rank, in one step."""

    divided: frozenset[int]
    """Documents that some micro-batch reads in another."""
    layers: dict[int, _Layer] = field(default_factory=dict)

    @classmethod
    def of(cls, packs: Sequence[object]) -> "Resident":
        """Room for the divided documents of these micro-batches."""
        sliced = [pack for pack in packs if isinstance(pack, Slices)]
        return cls(frozenset(piece[0] for pack in sliced for piece in pack.reads))

    def attention(self, slices: Slices, device: torch.device) -> "LayerAttention":
        """How a micro-batch attends in any layer."""
        spans = [torch.arange(start, stop, device=device) for _, start, stop, _ in slices.pieces]
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return LayerAttention(torch.cat([nothing, *spans]), slices, self)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not any(self.layers.values())


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """Attention that differs by layer."""

    positions_T: Tensor
    slices: Slices
    resident: Resident

    def in_layer(self, layer: int) -> PackAttention:
        """Attention of these tokens in one layer of the decoder."""
        held = self.resident.layers.setdefault(layer, {})
        attend: Attend = partial(
            _attend, slices=self.slices, held=held, divided=self.resident.divided
        )
        return PackAttention(self.positions_T, attend)


def require_slices(packs: Sequence[object], units: Sequence[Sequence[int]]) -> None:
    """Refuse slices that read tokens which no earlier micro-batch of their unit has.

    Args:
        packs: How each micro-batch attends.
        units: Runs ``[first, stop)`` of micro-batches that share documents.

    Raises:
        LayoutError: a slice reads tokens that no slice holds, or a fraction of a slice.
    """
    for first, stop in units:
        ends: dict[tuple[int, int], int] = {}
        for at in range(first, stop):
            pack = packs[at]
            if not isinstance(pack, Slices):
                continue
            for document, start, end, reads in pack.pieces:
                if reads < start and ends.get((document, reads)) != start:
                    raise LayoutError(
                        f"Micro-batch {at} reads tokens {reads:,}:{start:,} of document "
                        f"{document}, which no earlier micro-batch of its unit holds. Schedule "
                        f"the units that macro_units finds in the pack."
                    )
                ends[document, reads] = end


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, slices: Slices, held: _Layer, divided: frozenset[int]
) -> Tensor:
    out: Tensor = _AttendSlices.apply(  # type: ignore[no-untyped-call]
        q, k, v, slices, held, divided
    )
    return out


class _AttendSlices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        held: _Layer,
        divided: frozenset[int],
    ) -> Tensor:
        o = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))
        for rows, piece in _rows_of(slices):
            document, start, stop, _ = piece
            if document in divided and (document, start) not in held:
                held[document, start] = _Held(stop, k[rows].detach(), v[rows].detach())
            part, part_lse = attend_tile(q[rows], k[rows], v[rows], "causal")
            earlier = _earlier(held, piece)
            if earlier:
                total = part.to(lse.dtype, copy=True)
                part_lse = part_lse.clone()
                for each in earlier:
                    merge_tile_(total, part_lse, *attend_tile(q[rows], each.k, each.v, "full"))
                part = total
            o[rows], lse[rows] = part, part_lse
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.slices, ctx.held = slices, held
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        grad_o = grad_o.contiguous()
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for rows, piece in reversed(_rows_of(ctx.slices)):
            mine = grad_o[rows], q[rows]
            whole = o[rows], lse[rows]
            grad_q, grad_k, grad_v = attend_tile_backward(*mine, k[rows], v[rows], *whole, "causal")
            grad_q = grad_q.to(lse.dtype, copy=True)
            for each in _earlier(ctx.held, piece):
                part_q, part_k, part_v = attend_tile_backward(*mine, each.k, each.v, *whole, "full")
                grad_q += part_q
                each.add(part_k, part_v)
            own = ctx.held.pop(piece[:2], None)
            if own is not None and own.grad_k is not None and own.grad_v is not None:
                grad_k, grad_v = own.grad_k.add_(grad_k), own.grad_v.add_(grad_v)
            for grad, part in zip(grads, (grad_q, grad_k, grad_v), strict=True):
                grad[rows] = part
        return (*grads, None, None, None)


def _rows_of(slices: Slices) -> list[tuple[slice, _Piece]]:
    """Rows of each piece that has a token."""
    rows, at = [], 0
    for piece in slices.pieces:
        tokens = piece[2] - piece[1]
        if tokens:
            rows.append((slice(at, at + tokens), piece))
        at += tokens
    return rows


def _earlier(held: _Layer, piece: _Piece) -> list[_Held]:
    """The earlier slices that a piece reads, in order."""
    document, start, _, reads = piece
    slices, at = [], reads
    while at < start:
        slices.append(held[document, at])
        at = slices[-1].stop
    return slices
