"""``equipoise explain tables``: where embedding tables lie, what each rank does for them, and why.

What it decides
    Rates come from the device and its links, or from flags. Beside the plan stand the two that
    people use: dealt round, and whole tables by storage, priced alike.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.base.shown import counted
from equipoise.cli.console import make_console
from equipoise.cli.counts import require_counts
from equipoise.cli.explain import asked
from equipoise.cli.table import Column, print_columns
from equipoise.cli.written import require_folder_of, require_kind
from equipoise.spec.limits import MOST_SIZE

if TYPE_CHECKING:
    from equipoise.balance.tables.baseline import NamedLoads
    from equipoise.balance.tables.plan import TableAnswer

HELP = "show where embedding tables lie, and what each rank looks up and sends"

EXAMPLES = """\
examples:
  equipoise explain tables                            MLPerf's DLRM-DCNv2 on 8 h100-sxm
  equipoise explain tables criteo-kaggle --ranks 4 --kinds table
  equipoise explain tables synthetic:1000 --ranks 128 --ranks-per-host 8 --plot tables.svg
  equipoise explain tables tables.csv --capacity 4 --optimizer adam
                                                      columns name,rows,width,ids_per_sample
  equipoise explain tables --ranks 16 --towers 2 --tower-width 64
                                                      each tower on a host, which sends half

--json prints {"tables": [...], "ranks": [...], "skew", "gap", "bound_s", "slowest_s", "beside"}.
"""

_MOST_RANKS = 4096
_MOST = 1_000_000_000
"""GiB, or GB/s: beyond any device, and far from where their bytes overflow a float."""
_SHOWN = 12
_KINDS = "table,row,table-row,column,data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "tables",
        nargs="?",
        default="mlperf-dcnv2",
        metavar="TABLES",
        help="criteo-kaggle, mlperf-dcnv2, synthetic:N, or a CSV file (default: mlperf-dcnv2)",
    )
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="devices (default: 8)")
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="devices of a host (default: 8, or all)"
    )
    parser.add_argument(
        "--batch", type=int, default=2048, metavar="N", help="samples of a rank (default: 2048)"
    )
    parser.add_argument(
        "--kinds", default=_KINDS, metavar="LIST", help=f"kinds of sharding (default: {_KINDS})"
    )
    parser.add_argument(
        "--optimizer",
        default="row-wise-adagrad",
        metavar="NAME",
        help="sgd, adagrad, row-wise-adagrad or adam: its state takes memory",
    )
    parser.add_argument(
        "--wire", default="fp32", metavar="NAME", help="fp32, bf16, fp16 or int8 between ranks"
    )
    parser.add_argument(
        "--device", default="h100-sxm", metavar="NAME", help="whose memory (default: h100-sxm)"
    )
    parser.add_argument(
        "--capacity", type=float, metavar="GIB", help="memory of a rank for tables (default: all)"
    )
    parser.add_argument(
        "--host-link",
        type=float,
        default=450.0,
        metavar="GB",
        help="assumed GB/s between devices of a host (default: 450)",
    )
    parser.add_argument(
        "--link",
        type=float,
        default=50.0,
        metavar="GB",
        help="assumed GB/s of a device to other hosts (default: 50)",
    )
    parser.add_argument(
        "--towers",
        type=int,
        metavar="N",
        help="deal tables of equal load to N towers, each on one host",
    )
    parser.add_argument(
        "--tower-width",
        type=int,
        metavar="N",
        help="floats to which towers cut each row before it leaves its host (default: the row's)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw each rank's load (.png, .svg or .pdf)"
    )


def run(args: argparse.Namespace) -> int:
    """Plan the tables, and show the plan."""
    counts = {"ranks": _MOST_RANKS, "ranks_per_host": _MOST_RANKS, "batch": MOST_SIZE}
    require_counts(args, counts | {"towers": MOST_SIZE, "tower_width": MOST_SIZE})
    if args.tower_width is not None and args.towers is None:
        raise SpecError("--tower-width needs --towers. Give both or neither.")
    require_kind("plot", args.plot, "picture")
    require_folder_of("plot", args.plot)
    for flag in ("capacity", "host_link", "link"):
        value = getattr(args, flag)
        if value is not None and not 0 < value <= _MOST:
            raise SpecError(
                f"--{flag.replace('_', '-')} {value:g} must be more than 0 and at most {_MOST:,}."
            )
    from equipoise.balance.tables.baseline import load_baselines

    answer, origin = _plan(args)
    beside = load_baselines([each.table for each in answer.plan.placements], answer.machine)
    if args.plot is not None:
        from equipoise.dash.recommend.plot import plot_tables

        plot_tables(args.plot, answer, beside, origin)
    asked.answer(
        args,
        rows=lambda: _rows(answer, beside),
        lines=lambda: make_console().print(_summary(answer), soft_wrap=True),
        tables=lambda: _show(answer, beside, origin),
        files=(args.plot,),
    )
    return 0


def _plan(args: argparse.Namespace) -> "tuple[TableAnswer, str]":
    from equipoise.balance.tables.plan import plan_tables
    from equipoise.balance.tables.price import TableMachine
    from equipoise.schedule.tables.traffic import WIRES
    from equipoise.spec.device.by_name import find_device
    from equipoise.spec.tables.read import read_tables
    from equipoise.spec.tables.table import SPARSE_OPTIMIZERS

    for flag, options in (("optimizer", SPARSE_OPTIMIZERS), ("wire", WIRES)):
        if getattr(args, flag) not in options:
            raise SpecError(
                f'--{flag}: "{getattr(args, flag)}" is not one of {", ".join(options)}.'
            )
    tables, origin = read_tables(args.tables)
    chip = find_device(args.device)
    capacity = chip.memory_bytes - chip.reserved_bytes
    per_host = args.ranks_per_host or (8 if args.ranks % 8 == 0 else args.ranks)
    machine = TableMachine(
        args.ranks,
        args.batch,
        chip.memory_bytes_per_s,
        1e9 * args.host_link,
        1e9 * args.link,
        min(per_host, args.ranks),
        capacity if args.capacity is None else round(args.capacity * 2**30),
        args.optimizer,
        args.wire,
    )
    kinds = tuple(word.strip() for word in args.kinds.split(","))
    if args.towers is not None:
        from equipoise.balance.tables.towers import plan_even_towers

        return plan_even_towers(tables, args.towers, args.tower_width, machine, kinds), origin
    return plan_tables(tables, machine, kinds=kinds), origin


def _summary(answer: "TableAnswer") -> str:
    return (
        f"slowest rank {1e3 * answer.load_s.max():.3f} ms, max/mean {answer.skew:.4f}, at most "
        f"{100 * answer.gap:.1f}% above the best possible"
    )


def _rows(answer: "TableAnswer", beside: "list[NamedLoads]") -> dict[str, object]:
    return {
        "tables": [
            {
                "name": each.table.name,
                "rows": each.table.rows,
                "width": each.table.width,
                "ids_per_sample": each.table.ids_per_sample,
                "kind": each.kind,
                "ranks": list(each.ranks) if each.kind != "data" else "all",
                "buckets": each.buckets if each.row_shards > 1 else None,
                "columns": list(each.column_edges) if each.kind == "column" else None,
            }
            for each in answer.plan.placements
        ],
        "ranks": [
            {"rank": rank, "compute_s": compute / 1e12, "exchange_s": sent / 1e12, "bytes": held}
            for rank, (compute, sent, held) in enumerate(
                zip(
                    answer.compute_ps.tolist(),
                    answer.exchange_ps.tolist(),
                    answer.held_bytes.tolist(),
                    strict=True,
                )
            )
        ],
        "towers": [
            {"tables": list(each.tables), "host": each.host, "width": each.width}
            for each in answer.plan.towers
        ],
        "across_bytes": _across(answer),
        "skew": answer.skew,
        "gap": answer.gap,
        "bound_s": answer.bound_ps / 1e12,
        "slowest_s": float(answer.load_s.max()),
        "beside": [{"name": each.name, "skew": each.skew} for each in beside],
    }


def _show(answer: "TableAnswer", beside: "list[NamedLoads]", origin: str) -> None:
    from equipoise.base.units import format_bytes

    console, plan = make_console(), answer.plan
    console.print(f"{origin} on {counted(plan.ranks, 'rank')}: {_summary(answer)}.", soft_wrap=True)
    heavy = sorted(
        plan.placements,
        key=lambda each: (-each.table.ids_per_sample * each.table.width, each.table.name),
    )
    columns = [
        Column("table", is_left=True),
        Column("rows"),
        Column("width", goes=3),
        Column("ids a sample", goes=2),
        Column("lies", is_left=True),
        Column("on ranks", is_left=True, goes=1),
    ]
    rows = [
        [
            each.table.name,
            f"{each.table.rows:,}",
            str(each.table.width),
            f"{each.table.ids_per_sample:g}",
            each.kind if each.row_shards == 1 else f"{each.kind}, {each.buckets}",
            _ranks(each.ranks, plan.ranks),
        ]
        for each in heavy[:_SHOWN]
    ]
    print_columns(console, columns, rows)
    if len(heavy) > _SHOWN:
        left = counted(len(heavy) - _SHOWN, "table")
        console.print(f"and {left} of less traffic (--json lists all)")
    order = (-answer.load_s).argsort(kind="stable")[:_SHOWN].tolist()
    columns = [
        Column("rank"),
        Column("lookups"),
        Column("exchange"),
        Column("load / mean"),
        Column("memory", goes=1),
    ]
    mean = float(answer.load_s.mean()) or 1.0
    rows = [
        [
            str(rank),
            f"{answer.compute_ps[rank] / 1e9:.3f} ms",
            f"{answer.exchange_ps[rank] / 1e9:.3f} ms",
            f"{answer.load_s[rank] / mean:.4f}",
            format_bytes(int(answer.held_bytes[rank])),
        ]
        for rank in order
    ]
    print_columns(console, columns, rows)
    if plan.hosts > 1:
        console.print(_crossing(answer), soft_wrap=True)
    for each in beside:
        console.print(f"{each.name}: max/mean {each.skew:.3f}", soft_wrap=True)


def _across(answer: "TableAnswer", *, is_flat: bool = False) -> int:
    """Bytes of pooled rows and their gradients that leave a host in a step, over all hosts."""
    from dataclasses import replace

    import numpy as np

    from equipoise.schedule.tables.traffic import across_hosts, count_traffic

    machine = answer.machine
    plan = replace(answer.plan, towers=()) if is_flat else answer.plan
    none = {
        each.table.name: np.zeros((plan.ranks, each.row_shards), dtype=np.int64)
        for each in plan.placements
    }
    wire, sizes = machine.wire, [machine.batch] * plan.ranks
    touched = {each.table.name: np.zeros(plan.ranks, dtype=np.int64) for each in plan.placements}
    sent = count_traffic(plan, sizes, none, touched, forward=wire, backward=wire)
    stages = ("pooled", "gradients")
    return sum(across_hosts(plan, sent[stage]) for stage in stages)


def _crossing(answer: "TableAnswer") -> str:
    from equipoise.base.units import format_bytes

    plan = answer.plan
    text = f"{format_bytes(_across(answer))} of rows and gradients cross {plan.hosts} hosts a step"
    if plan.towers:
        held = ", ".join(f"{len(each.tables)} on host {each.host}" for each in plan.towers[:8])
        more = ", ..." if len(plan.towers) > 8 else ""
        text += (
            f"; without what towers cut, {format_bytes(_across(answer, is_flat=True))}. Tables of "
            f"towers: {held}{more}"
        )
    return text + "."


def _ranks(ranks: tuple[int, ...], every: int) -> str:
    if len(ranks) == every and every > 1:
        return "all"
    return ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
