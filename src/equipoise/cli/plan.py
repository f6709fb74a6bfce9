"""``equipoise plan``: which layout trains a model fastest on a cluster, and why."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import FitError, SpecError
from equipoise.cli.simulate_setting import add_step_arguments

if TYPE_CHECKING:
    from equipoise.plan.outcome import Outcome
    from equipoise.plan.search import Search

HELP = "search the layout that trains a model fastest on a cluster; needs no torch"

EXAMPLES = """\
examples:
  equipoise plan --model llama3-405b --cluster h100-sxm:16384 \\
      --context-tokens 8192 --step-sequences 2048 --lengths pretrain-128k
  equipoise plan --model llama3-70b --cluster h100-sxm:64 --context-tokens 8192 \\
      --step-sequences 128 --layout tp=4 --recompute none --out plans/70b
  equipoise plan --model mixtral-8x7b --cluster h100-sxm:128 --context-tokens 4096 \\
      --step-sequences 256 --json
  equipoise explain --plan plans/70b/plan.lock
  equipoise plan --model llama3-70b --cluster h100-sxm:64 --context-tokens 8192 \\
      --step-sequences 128 --export megatron

--out FOLDER keeps plan.lock, and search.jsonl, from which the same command goes on; --json prints
plan.lock:
  best and runners_up: words, flags of equipoise simulate; price, what simulate --json prints;
    loses_by, seconds of each term beyond the best's
  bound_s gap: no choice takes less than bound_s, which is the share gap below the best's step_s
  listed priced: choices in the space, and those that were replayed
  wall: what no longer fits when it grows and the layout stays; flip: the term that, slower by
    times, makes the first runner-up the best
  nodes: of a cluster.toml with measured pairs, which node stands in which place
  asked read version: the words, digests of all that was read, the form of the file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_step_arguments(parser, is_searched=True)
    parser.add_argument(
        "--layout",
        metavar="WORDS",
        help="degrees that are not to be searched, as tp=8,zero=1",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="the most to search; the answer says what may be left to gain (default: 30)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep plan.lock and the search's state there"
    )
    parser.add_argument(
        "--export",
        choices=["torchtitan", "megatron"],
        help="print the best as torchtitan's TOML or Megatron-LM's flags, and nothing else",
    )


def run(args: argparse.Namespace) -> int:
    """Search and print the plan."""
    from equipoise.cli.console import make_progress
    from equipoise.cli.plan_lock import decide, read_inputs
    from equipoise.cli.plan_show import print_plan
    from equipoise.plan.export import EXPORTS

    if args.seconds <= 0:
        raise SpecError(f"--seconds is {args.seconds:g}. Give a time above 0.")
    inputs = read_inputs(args)
    search = inputs.search
    if args.out is not None:
        _resume(args.out, search, inputs.digest)
    progress = make_progress(args.quiet or args.json or args.export is not None)
    progress.start("search", 100)
    begin, shown = time.monotonic(), 0

    def watch(_: object) -> None:
        nonlocal shown
        share = min(99, int(100 * (time.monotonic() - begin) / args.seconds))
        progress.advance(share - shown)
        shown = share

    outcome = search.run(seconds=args.seconds, watch=watch)
    progress.advance(100 - shown)
    progress.finish()
    _require_some(args, search, outcome)
    plan, finalists = decide(args, inputs, outcome)
    if args.out is not None:
        plan.write(args.out / "plan.lock")
    if args.export is not None:
        sys.stdout.write(EXPORTS[args.export](search.model, finalists[0].choice))
    elif args.json:
        sys.stdout.write(json.dumps(plan.as_row(), indent=1) + "\n")
    else:
        print_plan(plan, is_quiet=args.quiet)
    return 0


def _resume(folder: Path, search: "Search", digest: str) -> None:
    """Read what was priced before, and write down what is priced now."""
    from equipoise.plan.outcome import Priced

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "search.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    header = json.dumps({"digest": digest})
    if lines and lines[0] == header:
        for line in lines[1:]:
            try:
                priced = Priced(**json.loads(line))
            except (ValueError, TypeError):  # the last line of a search that was killed
                continue
            search.known[priced.row] = priced
    known = "".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in search.known.values())
    file.write_text(f"{header}\n{known}")

    def note(priced: Priced) -> None:
        with file.open("a") as opened:
            opened.write(json.dumps(dataclasses.asdict(priced)) + "\n")

    search.note = note


def _require_some(args: argparse.Namespace, search: "Search", outcome: "Outcome") -> None:
    """Refuse to plan what fits nowhere; say how large a cluster would do."""
    if outcome.fitting:
        return
    if outcome.progress.bound_s < float("inf"):
        raise SpecError(
            f"Within {args.seconds:g} s no layout that fits was found among {outcome.listed:,}. "
            f"Give more --seconds, or fix more of the layout."
        )
    from equipoise.base.units import GIB
    from equipoise.plan.final import smallest_cluster

    cluster, capacity = search.machine.cluster, search.machine.capacity_bytes
    name = cluster.classes[0].name
    devices = None
    if cluster.name == f"{name}:{cluster.devices}" and len(cluster.classes) == 1:
        devices = smallest_cluster(search.model, name, cluster.devices, search.space.base)
    mend = (
        f"The smallest that would do, by doubling: {name}:{devices}."
        if devices
        else "Give more devices, shorter windows or a smaller model."
    )
    raise FitError(
        f"{args.model} does not fit {cluster.name}: of {outcome.listed:,} layouts the smallest "
        f"needs {outcome.least_bytes / GIB:.1f} GiB on its fullest rank, which has "
        f"{capacity / GIB:.1f}. {mend}"
    )
