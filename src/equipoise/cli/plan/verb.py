"""``equipoise plan``: which layout trains a model, or a run.toml, fastest, and why."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import FitError, SpecError
from equipoise.base.read import parse_json
from equipoise.cli.run_arguments import add_run_arguments
from equipoise.cli.simulate.setting import add_step_arguments
from equipoise.cli.written import writing

if TYPE_CHECKING:
    from equipoise.cli.plan.lock import Inputs
    from equipoise.plan.search.deadline import Deadline
    from equipoise.plan.search.incumbent import Outcome
    from equipoise.plan.search.search import Search

_SECONDS = 30.0
"""A plan's budget unless one is given."""

_SEARCH_SHARE = 0.8
"""The search's share of the time; the rest is for pricing the best and the next whole."""

HELP = "search the layout that trains a model fastest on a cluster; needs no torch"

EXAMPLES = """\
examples:
  equipoise plan run.toml                            this machine; writes plan.lock beside it
  equipoise train run.toml --plan plan.lock          obeys it
  equipoise plan run.toml --ranks 2 --layout.zero 3 --out plans/zero-3
  equipoise plan run.toml --measure                  trains choices for some steps, and writes
                                                     plan.lock of the fastest; needs torch
  equipoise plan --model llama3-405b --cluster h100-sxm:16384 \\
      --context-tokens 8192 --step-sequences 2048 --lengths pretrain-128k
  equipoise plan --model llama3-8b --cluster h100-sxm:64 --context-tokens 8192 \\
      --step-sequences 256 --lengths pretrain-128k --policy any
  equipoise plan --model llama3-70b --cluster h100-sxm:64 --context-tokens 8192 \\
      --step-sequences 128 --layout tp=4 --recompute none --out plans/70b
  equipoise plan --model mixtral-8x7b --cluster h100-sxm:128 --context-tokens 4096 \\
      --step-sequences 256 --json
  equipoise plan --model llama3-70b --cluster a100-80:64 --context-tokens 8192 \\
      --step-sequences 128 --layers own
  equipoise explain --plan plans/70b/plan.lock
  equipoise plan --model llama3-70b --cluster h100-sxm:64 --context-tokens 8192 \\
      --step-sequences 128 --export megatron

A run.toml is planned for this machine's cores, with its own corpus and keys; a key that it gives is
not searched. Without one, --model and --cluster describe what is planned.
--out FOLDER keeps plan.lock, and search.jsonl, from which the same command goes on; --json prints
plan.lock:
  best and runners_up: words, flags of equipoise simulate; price, what simulate --json prints;
    loses_by, seconds of each term beyond the best's; keys, of run.toml
  bound_s gap: no choice takes less than bound_s; gap is the best's step_s / bound_s - 1, or null
  without_offload: of a best that offloads, its step_s and memory_gib_max without
  listed priced: choices in the space, and those that were replayed, or of --measure trained
  measured_s: in a price of --measure, what a step took; bound_s is then 0, and there is no flip
  wall: what no longer fits when it grows and the layout stays; flip: the term that, slower by
    times, makes the first runner-up the best
  nodes: of a cluster.toml with measured pairs, which node stands in which place
  asked read version: the words, digests of all that was read, the form of the file
  sources: where each number of the cluster, its links and its curves comes from
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="of a run.toml: ranks that it will have (default: what its layout says, else a core "
        "each)",
    )
    add_step_arguments(parser, is_searched=True)
    parser.add_argument(
        "--layout",
        metavar="WORDS",
        help="degrees that are not to be searched, as tp=8,zero=1",
    )
    parser.add_argument(
        "--layers",
        choices=["alike", "own"],
        help="own: let each layer have its own degrees, ZeRO stage and recomputation, where that "
        "is faster (default: alike)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="the most to list, search and price, the program's own start left out; the answer "
        "says what may be left to gain (default: 30)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="keep plan.lock and the search's state there (default: of a run.toml, plan.lock "
        "beside it)",
    )
    parser.add_argument(
        "--export",
        choices=["torchtitan", "megatron"],
        help="print the best that the program can do as flags of torchtitan or Megatron-LM, and "
        "nothing else",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="of a run.toml: train choices for some steps each, a quarter of all at most, and "
        "write plan.lock of the fastest; --out keeps it and the trials (default: plan.lock beside "
        "the run.toml, trials in runs/NAME-measured)",
    )
    parser.add_argument(
        "--trial-seconds",
        type=float,
        metavar="S",
        help="the most that a trial of --measure may take (default: 600)",
    )


def run(args: argparse.Namespace) -> int:
    """Search and print the plan."""
    from equipoise.cli.console import make_progress
    from equipoise.cli.plan.lock import decide, digest_inputs
    from equipoise.cli.plan.table import print_plan, print_sources
    from equipoise.plan.export.settings import EXPORTS
    from equipoise.plan.search.deadline import Deadline
    from equipoise.spec.plan import LOCK

    if args.measure:
        from equipoise.cli.plan.measure import measure

        return measure(args)
    if args.trial_seconds is not None:
        raise SpecError(
            f"--trial-seconds {args.trial_seconds:g} is of --measure. Give both, or none."
        )
    seconds = _SECONDS if args.seconds is None else args.seconds
    if not seconds > 0:
        raise SpecError(f"--seconds is {seconds:g}. Give a time above 0.")
    due = Deadline.after(seconds)
    inputs = _read_inputs(args, due)
    search = inputs.search
    if args.run_toml is not None:  # its corpus may have been made first
        due = Deadline.after(seconds)
    if args.out is not None:
        _resume(args.out, search, digest_inputs(inputs))
    progress = make_progress(args.quiet or args.json or args.export is not None)
    progress.start("search", 100)
    shown, searched = 0, due.part(_SEARCH_SHARE)

    def watch(_: object) -> None:
        nonlocal shown
        share = min(99, int(100 * (1.0 - searched.left_s / seconds)))
        progress.advance(max(0, share - shown))
        shown = max(share, shown)

    outcome = search.run(seconds=searched.left_s, watch=watch)
    outcome = inputs.go_on(outcome, seconds=searched.left_s, watch=watch)
    progress.advance(100 - shown)
    progress.finish()
    _require_some(seconds, inputs, outcome, due)
    finalists = inputs.finalists(outcome, due)
    if not finalists[0].run.price.fits:
        least = min(float(each.run.price.memory_bytes.max()) for each in finalists)
        raise _too_large(inputs, outcome.listed, least, due)
    plan = decide(inputs, outcome, finalists, due)
    if not args.quiet:
        _say_what_is_missing(seconds, inputs, due)
    folder = args.out if args.run_toml is None else args.out or args.run_toml.parent
    if folder is not None:
        with writing("out", folder):
            plan.write(folder / LOCK)
    if args.export is not None:
        best = finalists[0]
        _, write = EXPORTS[args.export]
        sys.stdout.write(write(search.model, best.choice, best.run.layers))
    elif args.json:
        sys.stdout.write(json.dumps(plan.as_row(), indent=1) + "\n")
    else:
        print_plan(plan, is_quiet=args.quiet)
        if not args.quiet:
            print_sources(plan)
        if args.run_toml is not None and not args.quiet:
            lock = folder / LOCK
            sys.stdout.write(
                f"Wrote {lock}. Train by it: equipoise train {args.run_toml} --plan {lock}\n"
            )
    return 0


def _say_what_is_missing(seconds: float, inputs: "Inputs", due: "Deadline") -> None:
    """What there was no time for."""
    if not inputs.is_whole:
        sys.stderr.write(
            f"Listing every choice takes longer than --seconds {seconds:g} allows, so only those "
            f"that follow published recipes were searched. A faster one may be among the others. "
            f"Give more --seconds, or fix more of the layout.\n"
        )
    if due.is_over():
        sys.stderr.write(
            f"--seconds {seconds:g} ended before everything was priced, so runners-up and the "
            f"nearest wall may be missing. Give more --seconds.\n"
        )


def _read_inputs(args: argparse.Namespace, due: "Deadline") -> "Inputs":
    """Of a run.toml, or of a described cluster."""
    if args.run_toml is not None:
        from equipoise.cli.plan.run import read_run_inputs

        found = read_run_inputs(args)
        if found.doubt and not args.quiet:
            sys.stderr.write(f"{found.doubt}\n")
        return found
    from equipoise.cli.plan.lock import read_inputs

    needed = ("model", "cluster", "context_tokens", "step_sequences")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(args, name) is None]
    if missing:
        raise SpecError(
            f"equipoise plan: the following arguments are required: {', '.join(missing)}; or a "
            f'run.toml, which says them itself. See "equipoise plan --help".'
        )
    own = [f"--{name}" for name, _ in args.overrides]
    own += [f"--{name}" for name in ("ranks", "name") if getattr(args, name) is not None]
    if own:
        raise SpecError(
            f"equipoise plan: {', '.join(own)} {'is' if len(own) == 1 else 'are'} of a run.toml, "
            f"and none is given. Give one, or words of --layout."
        )
    return read_inputs(args, due)


def _resume(folder: Path, search: "Search", digest: str) -> None:
    """Read what was priced before, and write down what is priced now."""
    from equipoise.plan.search.incumbent import Priced

    file = folder / "search.jsonl"
    with writing("out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
    header = json.dumps({"digest": digest})
    if lines and lines[0] == header:
        for line in lines[1:]:
            try:
                priced = Priced(**parse_json(line))
            except (ValueError, TypeError):  # the last line of a search that was killed
                continue
            search.known[priced.row] = priced
    known = "".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in search.known.values())
    with writing("out", folder):
        file.write_text(f"{header}\n{known}")

    def note(priced: Priced) -> None:
        with writing("out", folder), file.open("a") as opened:
            opened.write(json.dumps(dataclasses.asdict(priced)) + "\n")

    search.note = note


def _require_some(seconds: float, inputs: "Inputs", outcome: "Outcome", due: "Deadline") -> None:
    """Refuse to plan what fits nowhere."""
    if outcome.fitting:
        return
    if outcome.progress.bound_s < float("inf"):
        raise SpecError(
            f"Within {seconds:g} s no layout that fits was found among {outcome.listed:,}. "
            f"Give more --seconds, or fix more of the layout."
        )
    raise _too_large(inputs, outcome.listed, outcome.least_bytes, due)


def _too_large(inputs: "Inputs", listed: int, least_bytes: float, due: "Deadline") -> FitError:
    """Says how large a cluster would do."""
    from equipoise.base.units import GIB
    from equipoise.plan.answer.final import smallest_cluster

    search = inputs.search
    cluster, capacity = search.machine.cluster, search.machine.capacity_bytes
    name = cluster.classes[0].name
    devices, resort = None, inputs.last_resort
    if cluster.name == f"{name}:{cluster.devices}" and len(cluster.classes) == 1:
        base = search.space.base
        of_all = search.model, name, cluster.devices, base
        devices = due.attempt(lambda: smallest_cluster(*of_all, offload=resort))
    mend = (
        f"The smallest that would do, by doubling: {name}:{devices}."
        if devices
        else "Give more devices, shorter windows or a smaller model."
    )
    beside = "" if resort == "none" else f", with --offload {resort},"
    needs = f"needs {least_bytes / GIB:.1f} GiB on its fullest rank, which has {capacity / GIB:.1f}"
    if least_bytes == float("inf"):
        share = search.machine.host_capacity_bytes
        needs = f"needs more host memory than a device's share of it, {share / GIB:.1f} GiB"
    return FitError(
        f"{inputs.name} does not fit {cluster.name}: of {listed:,} layouts the smallest{beside} "
        f"{needs}. {mend}"
    )
