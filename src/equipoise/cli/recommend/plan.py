"""``equipoise plan`` of a recommender: where its tables lie, and what its parts will take."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from equipoise.cli.recommend.asked import PlacedRun, read_asked

if TYPE_CHECKING:
    from equipoise.cost.recommend import StepRates

UNMEASURED = (
    "No rates of recommenders were measured on this machine, so no seconds are predicted. Measure "
    "them: equipoise calibrate run.toml."
)


def plan_recommend(
    args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> int:
    """Print the placement and the predicted seconds of each rank."""
    from equipoise.recsys.foresight.forecast import (
        count_dense,
        count_step,
        predict_first_hits,
        read_rates,
    )
    from equipoise.recsys.place import predict_traffic
    from equipoise.recsys.tiers.run import predict_bytes
    from equipoise.schedule.tables.traffic import across_hosts

    asked, rates = read_asked(args, add_arguments), read_rates()
    counts = count_step(asked.spec, asked.samples, asked.answer)
    parts = None if rates is None else [rates.price(each) for each in counts]
    weights, flop = count_dense(asked.spec, asked.samples, asked.answer)
    held = predict_bytes(asked.spec, asked.samples, asked.answer.plan)
    sent = predict_traffic(asked.spec, asked.samples, asked.answer.plan)["bytes"]
    rows = {
        "tables": [
            {
                "name": each.table.name,
                "rows": each.table.rows,
                "width": each.table.width,
                "ids_per_sample": each.table.ids_per_sample,
                "kind": each.kind,
                "ranks": list(each.ranks),
                "buckets": each.buckets if each.row_shards > 1 else None,
                "columns": list(each.column_edges) if each.kind == "column" else None,
            }
            for each in asked.answer.plan.placements
        ],
        "ranks": [
            {
                "rank": rank,
                "held_bytes": int(held[rank]),
                "sent_bytes": round(each.sent_bytes),
                **({} if parts is None else {f"{k}_s": v for k, v in parts[rank].items()}),
            }
            for rank, each in enumerate(counts)
        ],
        "hosts": asked.answer.plan.hosts,
        "across_bytes": across_hosts(asked.answer.plan, sent),
        "towers": [
            {"columns": list(each.tables), "host": each.host, "vectors": each.vectors}
            for each in asked.answer.plan.towers
        ],
        "architecture": asked.spec.model.architecture,
        "dense_weights": weights,
        "forward_flop_per_sample": flop,
        "step_s": None if parts is None else max(sum(each.values()) for each in parts),
        "rates": None if rates is None else origin_of(rates),
        "skew": asked.answer.skew,
        "gap": asked.answer.gap,
        "placed_by": asked.rates.words,
        "hit_rates": predict_first_hits(asked.spec, asked.samples, asked.answer.plan),
    }
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    else:
        _print(args, asked, rows, rates)
    return 0


def _print(
    args: argparse.Namespace, asked: PlacedRun, rows: Mapping[str, Any], rates: "StepRates | None"
) -> None:
    from equipoise.base.units import format_bytes
    from equipoise.cli.console import make_console
    from equipoise.cli.table import Column, print_columns

    console = make_console()
    console.print(
        f"{asked.title}; max/mean {rows['skew']:.3f}, at most {100 * rows['gap']:.1f}% above the "
        f"best possible by {asked.rates.words}.",
        soft_wrap=True,
    )
    if not args.quiet:
        columns = [
            Column("table", is_left=True),
            Column("rows"),
            Column("ids a sample", goes=1),
            Column("lies", is_left=True),
            Column("on ranks", is_left=True),
        ]
        cells = [
            [
                each["name"],
                f"{each['rows']:,}",
                f"{each['ids_per_sample']:.2f}",
                each["kind"] if each["buckets"] is None else f"{each['kind']}, {each['buckets']}",
                ", ".join(map(str, each["ranks"])),
            ]
            for each in rows["tables"]
        ]
        print_columns(console, columns, cells)
        for at, each in enumerate(rows["towers"], start=1):
            console.print(
                f"Tower {at} on host {each['host']}: {', '.join(each['columns'])}; "
                f"{each['vectors']} vectors leave it for each sample.",
                soft_wrap=True,
            )
        print_ranks(rows["ranks"])
        if rates_of := rows["hit_rates"]:
            shares = ", ".join(f"{name} {100 * share:.1f}%" for name, share in rates_of.items())
            console.print(
                f"Rows that caches will have in the first epoch: {shares}.",
                soft_wrap=True,
                markup=False,
            )
    console.print(
        f"Dense part {rows['architecture']}: {rows['dense_weights']:,} weights, "
        f"{rows['forward_flop_per_sample'] / 1e3:,.1f} kFLOP a sample forward.",
        soft_wrap=True,
    )
    sent = sum(each["sent_bytes"] for each in rows["ranks"])
    across = (
        f", {format_bytes(rows['across_bytes'])} of it between {rows['hosts']} hosts"
        if rows["hosts"] > 1
        else ""
    )
    console.print(f"Ranks send {format_bytes(sent)} a step{across}.", soft_wrap=True)
    if rates is None:
        console.print(UNMEASURED, soft_wrap=True)
    else:
        console.print(
            f"A step takes {1e3 * rows['step_s']:.2f} ms, predicted by {describe(rates)}.",
            soft_wrap=True,
        )


def origin_of(rates: "StepRates") -> dict[str, object]:
    """When rates were measured, under which load, and how far they are off."""
    return {"date": rates.date, "error": rates.error, "load": rates.load}


def describe(rates: "StepRates") -> str:
    """The same as words."""
    return (
        f"rates of {rates.date} that were {100 * rates.error:.0f}% off in runs they were not "
        f"fitted to (load average {rates.load:.1f})"
    )


def print_ranks(rows: list[dict[str, Any]]) -> None:
    """A row for each rank: its seconds where they are known, its bytes."""
    from equipoise.base.units import format_bytes
    from equipoise.cli.console import make_console
    from equipoise.cli.table import Column, print_columns
    from equipoise.cost.recommend import PARTS

    known = [part for part in PARTS if f"{part}_s" in rows[0]]
    columns = [Column("rank"), *(Column(f"{part} [ms]") for part in known)]
    columns += [Column("sent", goes=2), Column("rows and state", goes=1)]
    cells = [
        [
            str(each["rank"]),
            *(f"{1e3 * each[f'{part}_s']:.2f}" for part in known),
            format_bytes(each["sent_bytes"]),
            format_bytes(each["held_bytes"]),
        ]
        for each in rows
    ]
    print_columns(make_console(), columns, cells)
