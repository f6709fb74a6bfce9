"""``equipoise explain experts --run``: every policy on the loads that a run's own routers made."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import SpecError
from equipoise.cli.console import make_console
from equipoise.cli.explain import asked
from equipoise.cli.table import Column, print_columns

if TYPE_CHECKING:
    from equipoise.balance.expert.trace import TraceScore

_DRAWN = ("workload", "experts", "rows", "seed", "policy", "text", "model")
"""Flags of drawn workloads, which say nothing of a recorded one."""


def refuse_drawn(args: argparse.Namespace, defaults: argparse.ArgumentParser) -> None:
    """Refuse flags that a run's own loads leave no room for.

    Raises:
        SpecError: names them.
    """
    if given := _given(args, defaults, _DRAWN):
        raise SpecError(f"--run takes the run's own loads; remove {given}.")


def refuse_other(
    args: argparse.Namespace, defaults: argparse.ArgumentParser, *, used: Sequence[str], asked: str
) -> None:
    """Refuse flags that have no effect beside another one.

    Args:
        args: The parsed flags.
        defaults: Declares them.
        used: Flags that have one.
        asked: The other one.

    Raises:
        SpecError: names them.
    """
    declared = [each.dest for each in defaults._actions if each.dest not in ("help", *used)]
    if given := _given(args, defaults, declared):
        raise SpecError(f"{given} has no effect with {asked}. Give one or the other.")


def _given(
    args: argparse.Namespace, defaults: argparse.ArgumentParser, names: Sequence[str]
) -> str:
    """Those of some flags that were given."""
    given = [name for name in names if getattr(args, name) != defaults.get_default(name)]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def settle_slots(args: argparse.Namespace, experts: int) -> None:
    """Fill in --slots, and refuse more than a rank could use.

    Raises:
        SpecError: says how many it could.
    """
    from equipoise.balance.expert.auto import most_copies
    from equipoise.spec.model.experts import split_experts

    split_experts(experts, ranks=args.ranks)
    most = most_copies(experts, args.ranks)
    if args.slots is None:
        args.slots = min(1, most)
    if args.slots > most:
        raise SpecError(
            f"--slots {args.slots} is more than the {most} experts that a rank does not own. Give "
            f"{most} or less."
        )


def run(args: argparse.Namespace) -> int:
    """Score every policy on a run's loads."""
    from equipoise.balance.expert.price import RowPrices
    from equipoise.balance.expert.trace import TraceSetting, score_trace, trace_requests
    from equipoise.observe.experts import expert_loads
    from equipoise.observe.journal_lines import read_journals

    folder = Path(args.run)
    journals = read_journals(folder)
    zero = journals.get(0)
    model = zero.starts[-1].get("model", {}) if zero is not None and zero.starts else {}
    loads = {} if zero is None else expert_loads(zero.experts, model.get("experts"))
    if not loads:
        raise SpecError(
            f"{args.run}: its journal has no loads of experts. Give the folder of a run with "
            f"model.experts that has finished a step."
        )
    settle_slots(args, min(each.shape[1] for each in loads.values()))
    width = int(model.get("expert_ffn", 0)) or 1
    prices = RowPrices.of_width(args.least_rows, width)
    setting = TraceSetting(args.ranks, args.slots, args.least_rows, prices.row_cost)
    steps = None if args.step is None else [args.step]
    requests = list(trace_requests(loads, setting, steps))
    scores = score_trace(requests)
    count = 1 if steps else len(loads)
    if args.plot is not None:
        from equipoise.dash.expert.plot import plot_trace

        plot_trace(args.plot, scores, sorted(loads) if steps is None else steps, _title(args))
    asked.answer(
        args,
        rows=lambda: _rows(scores, args, count, len(requests)),
        lines=lambda: _print_lines(scores),
        tables=lambda: _print_tables(scores, args, count, len(requests)),
        schedules=(),
        files=(args.plot,),
    )
    return 0


def _title(args: argparse.Namespace) -> str:
    slots = f"{args.slots} slot{'s' * (args.slots != 1)}"
    name = Path(args.run).resolve().name
    return f"Loads of {name}, dealt to {args.ranks} ranks, {slots} for copies"


def _rows(
    scores: "list[TraceScore]", args: argparse.Namespace, steps: int, layers: int
) -> dict[str, Any]:
    return {
        "run": args.run,
        "ranks": args.ranks,
        "slots": args.slots,
        "steps": steps,
        "schedules": layers,
        "policies": [dataclasses.asdict(each) for each in scores],
    }


def _print_lines(scores: "list[TraceScore]") -> None:
    for each in scores:
        make_console().print(
            f"{each.policy}: max/mean {each.mean_skew:.3f} on average, {each.worst_skew:.3f} at "
            f"worst, {each.copies:.1f} copies.",
            soft_wrap=True,
        )


def _print_tables(
    scores: "list[TraceScore]", args: argparse.Namespace, steps: int, layers: int
) -> None:
    console = make_console()
    columns = (
        Column("policy", is_left=True),
        Column("max/mean"),
        Column("worst"),
        Column("above bound", goes=2),
        Column("copies", goes=3),
        Column("price", goes=1),
    )
    cells = [
        (
            each.policy,
            f"{each.mean_skew:.3f}",
            f"{each.worst_skew:.3f}",
            f"{each.gap:.1%}",
            f"{each.copies:.1f}",
            f"{each.price:,.0f}",
        )
        for each in scores
    ]
    each = layers // steps
    console.print(
        f"{_title(args)}: {steps:,} step{'s' * (steps != 1)}, {each} sparse layer"
        f"{'s' * (each != 1)}.",
        soft_wrap=True,
    )
    print_columns(console, columns, cells, title="Rows of the fullest rank over the mean")
    console.print(
        "Copies and price: of a layer and step, on average. Price: rows that the slowest rank "
        "could compute meanwhile, at --least-rows for a copy.",
        style="dim",
    )
