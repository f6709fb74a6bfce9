"""``equipoise pack`` of a recommender: how evenly placements share its batches' lookups."""

import argparse
import json
import sys
from collections.abc import Callable

from equipoise.cli.recommend.asked import read_asked
from equipoise.cli.written import require_folder_of, require_kind

COLUMNS = ("placement", "max/mean", "worst batch", "sent a step")


def pack_recommend(
    args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> int:
    """Print a row for each placement."""
    from equipoise.base.units import format_bytes
    from equipoise.cli.console import make_console
    from equipoise.cli.table import Column, print_columns
    from equipoise.recsys.foresight.evenness import measure_evenness, named_plans

    require_kind("plot", args.plot, "picture")
    require_folder_of("plot", args.plot)
    asked = read_asked(args, add_arguments, ("steps", "plot"))
    plans = named_plans(asked.spec, asked.samples, asked.answer, asked.rates)
    rows = [
        measure_evenness(name, plan, asked.spec, asked.samples, steps=args.steps)
        for name, plan in plans.items()
    ]
    if args.plot is not None:
        from equipoise.dash.recommend.plot import plot_evenness

        plot_evenness(args.plot, [(each.name, each.loads) for each in rows], asked.title)
    if args.json:
        shown = [
            {
                "placement": each.name,
                "skew": each.skew,
                "worst_skew": each.worst_skew,
                "sent_bytes": each.sent_bytes,
                "loads": list(each.loads),
            }
            for each in rows
        ]
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
        return 0
    console = make_console()
    if args.quiet:
        return 0
    console.print(f"{asked.title}. Floats looked up by ranks:", soft_wrap=True)
    columns = [Column(COLUMNS[0], is_left=True), *map(Column, COLUMNS[1:3]), Column(COLUMNS[3])]
    cells = [
        [each.name, f"{each.skew:.3f}", f"{each.worst_skew:.3f}", format_bytes(each.sent_bytes)]
        for each in rows
    ]
    print_columns(console, columns, cells)
    if args.plot is not None:
        console.print(str(args.plot), soft_wrap=True)
    return 0
