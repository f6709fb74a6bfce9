"""Redistribute a tensor between ranks, as a ``BoxingSchedule`` says.

Why
    Whatever a tensor's parts are and shall be, one executor moves them: each rank sends the
    boxes that others need of it, and puts together, or adds up, what arrives.

What it decides
    Nothing: the schedule is the same on every rank and says all. Boxes that are one run of
    memory are sent from where they are and received where they belong; others are packed, those
    for several ranks by one copy where they lie regularly (``blocks``). Parts of a sum are
    added in the order of ranks and in the tensor's own dtype, so every rank has the same bits, on
    every run.

    The gradient goes the way back: split as the tensor is, a sum of parts where the tensor is
    copied, copied where it is a sum of parts.

Kept true (tests/multi/parallel/test_boxing.py, tests/multi/parallel/test_boxing_in_process.py)
    Every transition equals the dense tensor, forward and gradient; the bytes in the ledger are
    those of the schedule, link by link.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.comm.mail import Mail, Parcel
from equipoise.parallel.boxing.blocks import How, block_of, pack, put, unpack, view_of
from equipoise.schedule.block import Block, Box
from equipoise.schedule.boxing.exchange import RankExchange, exchange_of, filling_of, flat_exchanges
from equipoise.schedule.boxing.path import BoxingSchedule, conjugate
from equipoise.schedule.boxing.placement import Partial, write_placements
from equipoise.schedule.boxing.step import BoxingStep


def redistribute(
    local: Tensor,
    schedule: BoxingSchedule,
    mail: Mail,
    *,
    backward: BoxingSchedule | None = None,
) -> Tensor:
    """This rank's part of a tensor after its redistribution.

    To be called by all ranks of the mesh with the same schedules.

    Args:
        local: This rank's part before, of any strides.
        schedule: From ``plan_boxing``.
        mail: Between the ranks of the mesh, numbered along it; its ledger counts every byte.
        backward: How the gradient goes back, from ``plan_boxing`` of ``transposed``; without it
            none does.

    Returns:
        This rank's part after; ``local`` itself if there is nothing to do.

    Raises:
        LayoutError: the part, its dtype or the ranks are not those of the schedule, or
            ``backward`` does not lead back.
    """
    _require_ranks(mail.ranks, schedule)
    _require(local, schedule, mail.rank)
    if backward is None:
        return _run(local.detach(), schedule, mail)
    back = conjugate(schedule.after), conjugate(schedule.before)
    if (backward.on, backward.before, backward.after) != (schedule.on, *back):
        raise LayoutError(
            f"The gradient goes from {write_placements(back[0])} to {write_placements(back[1])}, "
            f"and the schedule for it from {write_placements(backward.before)} to "
            f"{write_placements(backward.after)}. Plan it of transposed(request)."
        )
    out: Tensor = _Redistribute.apply(local, schedule, backward, mail)  # type: ignore[no-untyped-call]
    return out


def play_boxing(parts: Sequence[Tensor], schedule: BoxingSchedule) -> list[Tensor]:
    """``redistribute`` with all ranks in this process.

    Args:
        parts: Of each rank.
        schedule: What is played.

    Returns:
        Each rank's part after.
    """
    _require_ranks(len(parts), schedule)
    for rank, part in enumerate(parts):
        _require(part, schedule, rank)
    runs = [_steps(part, schedule, rank) for rank, part in enumerate(parts)]
    done: dict[int, Tensor] = {}
    while len(done) < len(runs):
        turns: dict[int, _Turn] = {}
        for rank, run in enumerate(runs):
            try:
                turns[rank] = next(run)
            except StopIteration as end:
                done[rank] = end.value
        for rank, turn in turns.items():
            for peer, arrived in turn.receives:
                sent = [data for to, data in turns[peer].sends if to == rank]
                arrived.copy_(sent[0])
    return [done[rank] for rank in range(len(runs))]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, schedule: BoxingSchedule, backward: BoxingSchedule, mail: Mail
    ) -> Tensor:
        ctx.way_back = (backward, mail)
        out = _run(local, schedule, mail)
        return out.view_as(out) if out is local else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _run(grads[0], *ctx.way_back), None, None, None


def _require_ranks(ranks: int, schedule: BoxingSchedule) -> None:
    if ranks != schedule.on.ranks:
        raise LayoutError(
            f"A schedule of {schedule.on.ranks} ranks cannot run on {ranks}. Let the ranks of its "
            f"mesh run it."
        )


def _require(local: Tensor, schedule: BoxingSchedule, rank: int) -> None:
    held = schedule.on.boxes(schedule.before)[rank]
    shape = (held[:, 1] - held[:, 0]).tolist()
    if list(local.shape) != shape or local.element_size() != schedule.element_bytes:
        raise LayoutError(
            f"Rank {rank} has a part of {list(local.shape)}, {local.element_size()} bytes an "
            f"element, and the schedule is for {shape} of {schedule.element_bytes}. Plan it for "
            f"the tensor that there is."
        )


def _run(local: Tensor, schedule: BoxingSchedule, mail: Mail) -> Tensor:
    steps = _steps(local, schedule, mail.rank)
    try:
        while True:
            turn = next(steps)
            sends, receives = (
                [Parcel(peer, 0, data.view(torch.uint8), 0) for peer, data in ends]
                for ends in (turn.sends, turn.receives)
            )
            mail.post(sends, receives)
            mail.wait(0)
    except StopIteration as end:
        out: Tensor = end.value
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """Messages of one rank that must have left and arrived before it goes on."""

    sends: list[tuple[int, Tensor]]
    receives: list[tuple[int, Tensor]]


_Steps = Generator[_Turn, None, Tensor]


def _steps(local: Tensor, schedule: BoxingSchedule, rank: int) -> _Steps:
    """Yields this rank's messages turn by turn; returns its part."""
    on = schedule.on
    for priced in schedule.steps:
        step = priced.step
        if step.kind == "fill":
            local = _fill(local, schedule, step, rank)
        elif step.kind == "exchange":
            local = yield from _exchange(local, exchange_of(on, step, rank))
        else:
            shape = local.shape
            local = local.reshape(-1)
            for each in flat_exchanges(on, step, rank):
                local = yield from _exchange(local, each)
            local = local.view(shape)
    return local


def _exchange(local: Tensor, exchange: RankExchange) -> _Steps:
    out = local.new_empty(exchange.shape)
    sends = [(each.peer, block_of(local, each.box)) for each in exchange.sends]
    direct = [(peer, view_of(local, block)) for peer, block in sends if block.is_run]
    strided = [(peer, block) for peer, block in sends if not block.is_run]
    packed = pack(local, [block for _, block in strided]) if strided else local
    parts = packed.split([block.elements for _, block in strided]) if strided else ()
    direct += [(peer, part) for (peer, _), part in zip(strided, parts, strict=True)]
    receives: list[tuple[int, Tensor]] = []
    layers: list[tuple[Tensor, list[Block]]] = []  # of one turn of a sum each, those to unpack
    for turn in range(exchange.parts):
        into = [(e.peer, block_of(out, e.box)) for e in exchange.receives if e.turn == turn]
        runs = [(peer, block) for peer, block in into if turn == 0 and block.is_run]
        receives += [(peer, view_of(out, block)) for peer, block in runs]
        others = [each for each in into if each not in runs]
        buffer = local.new_empty(sum(block.elements for _, block in others))
        pieces = buffer.split([block.elements for _, block in others]) if others else ()
        receives += [(peer, part) for (peer, _), part in zip(others, pieces, strict=True)]
        layers.append((buffer, [block for _, block in others]))
    yield _Turn(direct, receives)
    for turn, (buffer, blocks) in enumerate(layers):
        how: How = "copy" if turn == 0 else exchange.reduce
        if exchange.own is not None and exchange.own.turn == turn:
            put(_part(local, exchange.own.source), _part(out, exchange.own.target), how)
        if blocks:
            unpack(buffer, out, blocks, how)
    return out


def _fill(local: Tensor, schedule: BoxingSchedule, step: BoxingStep, rank: int) -> Tensor:
    """This rank's part of a partial tensor whose value it holds, whole or in part."""
    after = step.after[step.axes[0]]
    reduce = after.reduce if isinstance(after, Partial) else "sum"
    filling = filling_of(schedule.on, step, rank)
    if filling.is_whole:
        return local
    out = local.new_full(filling.shape, _identity(local.dtype, reduce))
    if filling.box is not None:
        _part(out, filling.box).copy_(local)
    return out


def _part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(first, stop) for first, stop in box)]


def _identity(dtype: torch.dtype, reduce: str) -> float | int:
    """The value that leaves a sum, or a maximum, as it is."""
    if reduce == "sum":
        return 0
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
