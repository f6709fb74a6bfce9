"""``equipoise explain traffic``: what rings get of a two-level network, by hashes and by a plan."""

import argparse
from typing import TYPE_CHECKING

from equipoise.base.units import format_bytes
from equipoise.cli.console import make_console
from equipoise.cli.explain import asked
from equipoise.cli.table import Column, print_columns

if TYPE_CHECKING:
    from equipoise.sim.traffic.request import TrafficAnswer, WayOfTraffic

HELP = "show what concurrent rings get of a network: hashed paths beside planned ones"

EXAMPLES = """\
examples:
  equipoise explain traffic --cluster h100-sxm:512 --leaf-nodes 8
  equipoise explain traffic --cluster h100-sxm:512 --leaf-nodes 8 --ring-nodes 2 --flows 4
  equipoise explain traffic --cluster h100-sxm:512 --leaf-nodes 8 --lost-spines 4 --json

--json prints {"leaves", "leaf_nodes", "spines", "nics", "oversubscription", "rings", "flows",
  "limit_bytes_per_s" (what a node's cards send), "ways": [{"name", "draws", "mean_bytes_per_s",
  "slowest_bytes_per_s", "fastest_bytes_per_s", "fullest_flows", "fullest_flows_max"}], "gain"}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME:N|FILE",
        help="whose nodes and network cards, as h100-sxm:512, or a cluster.toml",
    )
    parser.add_argument(
        "--leaf-nodes",
        type=int,
        required=True,
        metavar="N",
        help="nodes of each leaf switch",
    )
    parser.add_argument(
        "--ring-nodes",
        type=int,
        metavar="N",
        help="nodes of each ring, every one in another leaf (default: one of each leaf)",
    )
    parser.add_argument(
        "--oversubscription",
        type=float,
        default=1.0,
        metavar="R",
        help="what a leaf's nodes can send, over what its cables to spines carry (default: 1)",
    )
    parser.add_argument(
        "--lost-spines",
        type=int,
        default=0,
        metavar="N",
        help="spine switches that have failed (default: 0)",
    )
    parser.add_argument(
        "--flows",
        type=int,
        default=1,
        metavar="N",
        help="flows of each connection, each with a path of its own (default: 1)",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=100,
        metavar="N",
        help="how often hashes are drawn (default: 100)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the first draw (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate both, and print them."""
    from equipoise.sim.traffic.request import TrafficRequest, simulate_traffic

    answer = simulate_traffic(
        TrafficRequest(
            args.cluster,
            args.leaf_nodes,
            args.ring_nodes,
            args.oversubscription,
            args.lost_spines,
            args.flows,
            args.draws,
            args.seed,
        )
    )
    asked.answer(
        args,
        rows=answer.as_row,
        lines=lambda: _print_gain(answer),
        tables=lambda: _show(args.cluster, answer),
    )
    return 0


def _print_gain(answer: "TrafficAnswer") -> None:
    make_console().print(
        f"Planned paths give {answer.rings} rings {answer.gain:.2f} times what hashed ones do "
        f"(simulated).",
        soft_wrap=True,
    )


def _show(cluster: str, answer: "TrafficAnswer") -> None:
    from equipoise.sim.traffic.request import PUBLISHED

    clos, console = answer.clos, make_console()
    console.print(
        f"{cluster}: {clos.nodes} nodes of {clos.nics} network cards on {clos.leaves} leaves and "
        f"{clos.spines} spines (oversubscription {clos.oversubscription:.2g}), {answer.rings} "
        f"rings of {clos.nodes // answer.rings} nodes, {answer.flows:,} flows.",
        soft_wrap=True,
    )
    columns = (
        Column("paths", is_left=True),
        Column("a ring, mean"),
        Column("slowest ring"),
        Column("fastest ring", goes=2),
        Column("of a node's cards"),
        Column("flows on the fullest cable", goes=1),
    )
    print_columns(console, columns, [_cells(answer, each) for each in _ways(answer)])
    _print_gain(answer)
    console.print(
        "Simulated: bandwidth of a node in a ring all-reduce, max-min fair between rings; means "
        f"over {len(answer.hashed.rates)} draws of hashes. Latency, and loss by congestion, are "
        f"not in it. {PUBLISHED}",
        style="dim",
        soft_wrap=True,
    )


def _ways(answer: "TrafficAnswer") -> "tuple[WayOfTraffic, WayOfTraffic]":
    return answer.hashed, answer.planned


def _cells(answer: "TrafficAnswer", way: "WayOfTraffic") -> tuple[str, ...]:
    mean = way.rates.mean()
    rates = mean, way.rates.min(axis=1).mean(), way.rates.max(axis=1).mean()
    return (
        way.name,
        *(f"{format_bytes(int(rate))}/s" for rate in rates),
        f"{mean / answer.limit_bytes_per_s:.0%}",
        f"{way.fullest.mean():.3g}",
    )
