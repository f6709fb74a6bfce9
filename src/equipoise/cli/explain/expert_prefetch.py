"""``equipoise explain experts --memory-mib``: when layers are read and gathered, turn by turn."""

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import SpecError
from equipoise.base.units import format_bytes
from equipoise.cli.console import make_console
from equipoise.cli.counts import require_counts
from equipoise.cli.explain import asked
from equipoise.cli.explain.expert_trace import refuse_other
from equipoise.cli.table import Column, print_columns

if TYPE_CHECKING:
    from equipoise.schedule.expert.prefetch import Move, PrefetchSchedule, PrefetchTurn

_USED = ("model", "ranks", "experts", "memory_mib")
_SHOWN = 16
"""Most turns that a table shows."""
_BF16_BYTES = 2


def run(args: argparse.Namespace, defaults: argparse.ArgumentParser) -> int:
    """Show a training pass and an update of a preset's experts, sliced over ranks.

    Raises:
        SpecError: a flag that is wrong, or has no effect here.
        LayoutError: the memory does not hold two layers.
    """
    from equipoise.schedule.expert.prefetch import (
        Ahead,
        SliceBytes,
        schedule_prefetch,
        there_and_back,
        updates,
    )
    from equipoise.spec.model.presets import preset

    refuse_other(args, defaults, used=_USED, asked="--memory-mib")
    require_counts(args, {"ranks": 1 << 16, "experts": 4096})
    if not 0 < args.memory_mib < math.inf:
        raise SpecError(
            f"--memory-mib {args.memory_mib:g} is not a finite number above 0. Give MiB of a rank."
        )
    model = preset(args.model)
    if not model.experts:
        raise SpecError(
            f"--model {args.model} has no experts. Give one that has, as mixtral-8x7b or "
            f"qwen2-57b-a14b."
        )
    model = dataclasses.replace(model, experts=args.experts or model.experts)
    sizes = SliceBytes.of_model(model, ranks=args.ranks, gather_bytes=_BF16_BYTES)
    layers = model.sparse_layers
    capacity = int(args.memory_mib * 2**20)
    sizes.require(capacity, layers=layers, flag="--memory-mib")

    def plan(ahead: "Ahead | None") -> "tuple[PrefetchSchedule, PrefetchSchedule]":
        forth = schedule_prefetch(
            sizes, capacity, there_and_back(layers), later=updates(layers), ahead=ahead
        )
        back = schedule_prefetch(
            sizes,
            capacity,
            updates(layers),
            before=forth.after,
            later=there_and_back(layers),
            ahead=ahead,
        )
        return forth, back

    forth, back = plan(None)
    demanded = [each.demanded for each in plan(Ahead(0, 0))]
    asked.answer(
        args,
        rows=lambda: _rows(args, forth, back, demanded),
        lines=lambda: _print_totals(args, forth, back, demanded),
        tables=lambda: _print_tables(args, layers, forth, back, demanded),
        schedules=(),
        files=(),
    )
    return 0


def _rows(
    args: argparse.Namespace,
    forth: "PrefetchSchedule",
    back: "PrefetchSchedule",
    demanded: list[int],
) -> dict[str, Any]:
    sizes = forth.sizes
    return {
        "model": args.model,
        "ranks": args.ranks,
        "memory_bytes": forth.capacity,
        "least_bytes": sizes.least,
        "layer_bytes": dataclasses.asdict(sizes),
        **{
            name: {
                "gathers": plan.gathers,
                "gathered_bytes": _sent(args, plan),
                "read_bytes": plan.read_bytes,
                "written_bytes": plan.written_bytes,
                "peak_bytes": plan.peak_bytes,
                "demanded": plan.demanded,
                "demanded_without_prefetch": count,
                "turns": [_turn(turn) for turn in plan.turns],
            }
            for name, plan, count in (("pass", forth, demanded[0]), ("update", back, demanded[1]))
        },
    }


def _turn(turn: "PrefetchTurn") -> dict[str, Any]:
    moves = {"demand": turn.demand, "ahead": turn.ahead}
    return {"layer": turn.visit.layer} | {
        name: [[move.action, move.buffer.what, move.buffer.layer] for move in each]
        for name, each in moves.items()
    }


def _sent(args: argparse.Namespace, plan: "PrefetchSchedule") -> int:
    """Weights that a rank sends to others, in bf16."""
    sent: int = plan.gathers * (plan.sizes.whole // args.ranks) * (args.ranks - 1)
    return sent


def _print_totals(
    args: argparse.Namespace,
    forth: "PrefetchSchedule",
    back: "PrefetchSchedule",
    demanded: list[int],
) -> None:
    console = make_console()
    console.print(
        f"A rank reads {format_bytes(forth.read_bytes)} and sends "
        f"{format_bytes(_sent(args, forth))} in a forward and backward, then reads "
        f"{format_bytes(back.read_bytes)} and writes {format_bytes(back.written_bytes)} in the "
        f"update; at most {format_bytes(max(forth.peak_bytes, back.peak_bytes))} are in memory.",
        soft_wrap=True,
    )
    console.print(
        f"Turns ask for {forth.demanded + back.demanded} buffers themselves, "
        f"{sum(demanded)} if nothing is fetched ahead.",
        soft_wrap=True,
    )


def _print_tables(
    args: argparse.Namespace,
    layers: int,
    forth: "PrefetchSchedule",
    back: "PrefetchSchedule",
    demanded: list[int],
) -> None:
    console, sizes = make_console(), forth.sizes
    console.print(
        f"{args.model}: {layers} sparse layers on {args.ranks} ranks. Of a layer, a rank keeps "
        f"{format_bytes(sizes.slice)} of weights and {format_bytes(sizes.moments)} of moments in "
        f"a file; gathered, it is {format_bytes(sizes.whole)}. --memory-mib "
        f"{args.memory_mib:g}; it must be at least {sizes.least / 2**20:.4g}.",
        soft_wrap=True,
    )
    columns = (
        Column("turn", goes=3),
        Column("computes", is_left=True),
        Column("gathers", is_left=True),
        Column("reads", is_left=True),
        Column("in memory", goes=1),
    )
    for name, plan in (("forward and backward", forth), ("update", back)):
        held, cells = sum(map(sizes.of, plan.before)), []
        for number, turn in enumerate(plan.turns):
            moves = (*turn.demand, *turn.ahead)
            sign = {"read": 1, "gather": 1, "free": -1}
            held += sum(sign[move.action] * sizes.of(move.buffer) for move in moves)
            cells.append(
                (
                    str(number),
                    f"layer {turn.visit.layer}",
                    _named(moves, "gather"),
                    _named(moves, "read"),
                    format_bytes(held),
                )
            )
        print_columns(console, columns, cells[:_SHOWN], title=name[0].upper() + name[1:])
        if len(cells) > _SHOWN:
            console.print(f"and {len(cells) - _SHOWN:,} more turns", style="dim")
    _print_totals(args, forth, back, demanded)


def _named(moves: "tuple[Move, ...]", action: str) -> str:
    """Layers of the moves of one kind."""
    layers = dict.fromkeys(move.buffer.layer for move in moves if move.action == action)
    return ", ".join(map(str, layers))
