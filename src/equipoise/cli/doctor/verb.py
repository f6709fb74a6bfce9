"""``equipoise doctor``: what of this machine would break a run, and what to do about it."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import LayoutError
from equipoise.base.read import real_path
from equipoise.cli.asked_run import add_asked_arguments, asked_from, cluster_from
from equipoise.cli.counts import MOST_SHARING

if TYPE_CHECKING:
    from equipoise.launch.doctor.facts import LinkFacts

HELP = "say what of this machine would break a run, and what to do about it"

EXAMPLES = """\
examples:
  equipoise doctor                                  the default run, on this machine
  equipoise doctor run.toml --port 29400 --folder /data/runs
  equipoise doctor runs/demo --ranks 4              also start 4 ranks: links and clocks
  srun equipoise doctor runs/demo --cluster h100-sxm:64
                                                    each node of a job looks at itself

Exit code 5 where something would break the run, else 0.
--json prints {"verdict", "rows": [{"what", "found", "verdict", "why", "fix"}]}; a verdict is ok,
  warn or breaks.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_asked_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="start N ranks here, and measure links and clocks between them",
    )
    parser.add_argument("--port", type=int, metavar="N", help="is this port free?")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where the run is written (default: its folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Check this machine, and print a row for each check."""
    from equipoise.cli.doctor.table import MARKS, print_rows
    from equipoise.launch.doctor.checks import conclusion, examine, would_break
    from equipoise.launch.doctor.facts import Facts
    from equipoise.launch.doctor.gather import read_folder, read_machine, read_network
    from equipoise.launch.doctor.needs import needs_of
    from equipoise.launch.forms import place_on

    _judge(args)
    cluster = cluster_from(args)
    asked = asked_from(args, cluster)
    nodes = place_on(cluster, asked.ranks, sharing=asked.spec.layout.sharing)
    needs = needs_of(asked.spec, asked.model, asked.ranks, nodes, cluster)
    facts = Facts(
        machine=read_machine(),
        network=read_network(args.port),
        folder=read_folder(real_path(args.folder or asked.folder)),
        links=None if args.ranks is None else _links(args.ranks),
    )
    rows = examine(facts, needs)
    if args.json:
        worst = max((row.verdict for row in rows), key=list(MARKS).index)
        answer = {"verdict": worst, "rows": [dataclasses.asdict(row) for row in rows]}
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
    else:
        print_rows([row for row in rows if not args.quiet or row.verdict != "ok"])
        if not args.quiet:
            sys.stdout.write(f"\n{conclusion(rows, needs)}\n")
    return 5 if would_break(rows) else 0


def _judge(args: argparse.Namespace) -> None:
    if args.ranks is not None and args.ranks < 2:
        raise LayoutError(
            f"--ranks {args.ranks}: links are between two ranks or more. Give --ranks 2."
        )
    if args.ranks is not None and args.ranks > MOST_SHARING:
        raise LayoutError(
            f"--ranks {args.ranks:,} is more than {MOST_SHARING:,} processes of one machine. Give "
            f"{MOST_SHARING:,} or less."
        )
    if args.port is not None and not 0 < args.port < 65_536:
        raise LayoutError(f"--port must be between 1 and 65535, not {args.port}.")


def _links(ranks: int) -> "LinkFacts":
    from equipoise.cli.doctor.links import measure_links
    from equipoise.comm.local import run_ranks

    return run_ranks(ranks, measure_links)[0]
