"""``equipoise plan``: which layout trains a model, or a run.toml, or serves a trace, best."""

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.disk import writing
from equipoise.base.errors import SpecError
from equipoise.cli.recommend.plan import plan_recommend
from equipoise.cli.run_arguments import add_run_arguments, asks_recommender, run_from
from equipoise.cli.step_arguments import (
    SERVING,
    SHARED,
    add_serving_arguments,
    add_sources_argument,
    add_step_arguments,
    require_of_serving,
    say_forecast,
    serving_of,
)

if TYPE_CHECKING:
    from equipoise.plan.request import PlanAnswer, PlanRequest, RunPlanRequest

HELP = "search the layout that trains a model, or serves a trace, best; needs no torch"

EXAMPLES = """\
examples:
  equipoise plan run.toml                            this machine; writes plan.lock beside it
  equipoise train run.toml --plan plan.lock          obeys it
  equipoise plan run.toml --ranks 2 --layout.zero 3 --out plans/zero-3
  equipoise plan run.toml --measure                  trains choices for some steps, and writes
                                                     plan.lock of the fastest; needs torch
  equipoise plan recipes/recommend/run.toml          a recommender: where its tables lie, and what
                                                     lookups, exchange and dense part will take
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
  equipoise explain plan plans/70b/plan.lock
  equipoise plan --requests trace.jsonl --model llama3-70b --cluster h100-sxm:8 \\
      --slo ttft=0.5,tpot=0.03
  equipoise plan --requests trace.jsonl --model mixtral-8x7b --cluster h100-sxm:16 \\
      --layout tp=4 --precision fp8 --json
  equipoise plan --model llama3-70b --cluster h100-sxm:64 --context-tokens 8192 \\
      --step-sequences 128 --export megatron

--requests searches the replicas that serve a trace best: tp, cp, pp, ep and dp, all replicas alike
or some for prompts and some for generation. Best is what refuses fewest requests, then what meets
most objectives, then what has the least mean latency. --layout fixes degrees of every replica.

A run.toml is planned for this machine's cores, with its own corpus and keys; a key that it gives is
not searched. Without one, --model and --cluster describe what is planned.
--out FOLDER keeps plan.lock, and search.jsonl, from which the same command goes on; --json prints
plan.lock:
  best and runners_up: words, flags of equipoise simulate; price, what simulate --json prints;
    loses_by, seconds of each term beyond the best's; keys, of run.toml; stages, of its pipeline:
    where layers are cut (edges), and which rank has each stage (ranks)
  bound_s gap: no choice takes less than bound_s; gap is the best's step_s / bound_s - 1, or null
  without_offload: of a best that offloads, its step_s and memory_gib_max without
  listed priced: choices in the space, and those that were replayed, or of --measure trained
  measured_s: in a price of --measure, what a step took; bound_s is then 0, and there is no flip
  wall: what no longer fits when it grows and the layout stays; flip: the term that, slower by
    times, makes the first runner-up the best
  remarks: sentences about published recipes, programs that run the schedule, and distant sites
  nodes: of a cluster.toml with measured pairs, which node stands in which place
  asked read version: the words, digests of all that was read, the form of the file
  sources: where each number of the cluster, its links and its curves comes from
With --requests:
  best and runners_up: words and flags of equipoise simulate; latency_s, the mean of a request, and
    its parts, which add up to it; bounded_by; price, what simulate --requests --json prints
  listed unfit left_out simulated: choices in the space, and what became of them
  is_whole bound_s gap: whether there was time for all; no choice has less latency than bound_s
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
    add_serving_arguments(parser)
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
        "has a gap to the lower bound (default: 30; with --requests 60)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="keep plan.lock and the search's state there (default: of a run.toml, plan.lock "
        "beside it)",
    )
    add_sources_argument(parser)
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
    """Search and print the plan; of a recommender, where its tables lie."""
    if asks_recommender(args):
        return plan_recommend(args, add_arguments)
    if args.requests is not None:
        return _serve(args)
    for name in SERVING:
        if getattr(args, name) is not None:
            raise SpecError(f"--{name} needs --requests. Give both or neither.")
    if args.measure:
        return _measure(args)
    if args.trial_seconds is not None:
        raise SpecError("--trial-seconds needs --measure. Give both or neither.")
    from equipoise.cli.console import make_progress
    from equipoise.plan.request import plan
    from equipoise.spec.plan import LOCK

    request = _cluster_request(args) if args.run_toml is None else _run_request(args)
    if args.run_toml is None:
        say_forecast(args)
    answer = plan(
        request,
        progress=make_progress(args.quiet or args.json or args.export is not None),
        say=lambda line: None if args.quiet else _warn(line),
    )
    if not args.quiet:
        _say_what_is_missing(request.seconds, answer)
    folder = args.out if args.run_toml is None else args.out or args.run_toml.parent
    if folder is not None:
        with writing("out", folder):
            answer.lock.write(folder / LOCK)
    if args.export is not None:
        sys.stdout.write(answer.export(args.export))
    elif args.json:
        sys.stdout.write(json.dumps(answer.as_row(), indent=1) + "\n")
    else:
        _print(args, answer, folder / LOCK if folder is not None else None)
    return 0


def _serve(args: argparse.Namespace) -> int:
    """Search the replicas that serve a trace best, and print them."""
    from equipoise.cli.console import make_progress
    from equipoise.cli.plan.serving_table import print_serving_plan
    from equipoise.plan.serving.request import SECONDS, ServingPlanRequest, plan_serving

    require_of_serving(args, add_arguments, (*SERVING, *SHARED, "seconds"))
    own = [f"--{name}" for name, _ in args.overrides]
    if own:
        raise SpecError(f"{own[0]} is a key of run.toml, which --requests does not read.")
    missing = [f"--{name}" for name in ("model", "cluster") if getattr(args, name) is None]
    if missing:
        raise SpecError(
            f"--requests needs {' and '.join(missing)}. Say what serves the trace, and on which "
            "devices."
        )
    request = ServingPlanRequest(
        args.requests,
        args.model,
        args.cluster,
        args.layout,
        **serving_of(args),
        seconds=SECONDS if args.seconds is None else args.seconds,
    )
    say_forecast(args)
    answer = plan_serving(request, progress=make_progress(args.quiet or args.json))
    if args.json:
        sys.stdout.write(json.dumps(answer.as_row(), indent=1) + "\n")
        return 0
    words = ["--requests", str(args.requests), "--model", args.model, "--cluster", args.cluster]
    words += ["--precision", args.precision] if args.precision != "bf16" else []
    words += [] if args.fair is None else ["--fair", args.fair]
    words += [word for each in args.slo or [] for word in ("--slo", each)]
    words += ["--expert-skew", f"{args.expert_skew:g}"] if args.expert_skew != 1.0 else []
    command = shlex.join(["equipoise", "simulate", *words])
    print_serving_plan(answer, command, is_quiet=args.quiet)
    return 0


def _measure(args: argparse.Namespace) -> int:
    """Train choices and print the fastest."""
    from equipoise.cli.console import make_progress
    from equipoise.cli.plan.measure_table import command_of, print_search
    from equipoise.launch.trial import run_trial
    from equipoise.plan.measured.request import LIMIT_S, measure
    from equipoise.spec.plan import LOCK

    _require_measure_flags(args)
    answer = measure(
        _run_request(args),
        run_trial,
        limit_s=LIMIT_S if args.trial_seconds is None else args.trial_seconds,
        progress=make_progress(args.quiet or args.json),
        say=lambda line: None if args.quiet else _warn(line),
    )
    lock = (args.out or args.run_toml.parent) / LOCK
    if answer.lock is not None:
        answer.lock.write(lock)
    if args.json:
        row = answer.as_row() | {"lock": None if answer.lock is None else str(lock)}
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
        return 0
    print_search(answer, is_quiet=args.quiet)
    if answer.lock is None:
        command = command_of(answer.run.words(answer.best.choice))
        sys.stdout.write(f"No price knows it, so there is no plan.lock. Train it: {command}\n")
    else:
        words = [*answer.run.given_words, "--plan", str(lock)]
        sys.stdout.write(f"Wrote {lock}. Train by it: {command_of(words)}\n")
    return 0


def _require_measure_flags(args: argparse.Namespace) -> None:
    """Refuse flags that a measured search does not read."""
    if args.run_toml is None:
        raise SpecError(
            "--measure trains a run.toml, and none is given. Write one: equipoise init; then "
            "equipoise plan run.toml --measure."
        )
    for flag in ("export", "seconds"):
        if getattr(args, flag) is not None:
            raise SpecError(
                f"--{flag} belongs to a search by prices; --measure times runs of train and ends "
                f"after a quarter of all trials. Leave --{flag} out."
            )
    if args.trial_seconds is not None and not args.trial_seconds > 0:
        raise SpecError(f"--trial-seconds is {args.trial_seconds:g}. Give a time above 0.")


def _print(args: argparse.Namespace, answer: "PlanAnswer", lock: Path | None) -> None:
    from equipoise.cli.show import print_plan, print_sources

    print_plan(answer.lock, is_quiet=args.quiet)
    if args.quiet:
        return
    lock_ = answer.lock
    print_sources(lock_.best.price["extrapolated"], lock_.sources, is_listed=args.sources)
    if args.run_toml is not None:
        sys.stdout.write(
            f"Wrote {lock}. Train by it: equipoise train {args.run_toml} --plan {lock}\n"
        )


def _say_what_is_missing(seconds: float, answer: "PlanAnswer") -> None:
    """What there was no time for."""
    if not answer.is_whole:
        _warn(
            f"On several sites, or with layers of their own, only the {answer.listed:,} choices "
            f"that published recipes differ in were searched. A faster one may be among the "
            f"others. Fix more of the layout to search all."
        )
    if answer.is_late:
        _warn(
            f"--seconds {seconds:g} ended before everything was priced, so runners-up and the "
            f"nearest wall may be missing. Give more --seconds."
        )


def _warn(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _cluster_request(args: argparse.Namespace) -> "PlanRequest":
    """A model on a described cluster."""
    from equipoise.plan.request import PlanRequest

    needed = ("model", "cluster", "context_tokens", "step_sequences")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(args, name) is None]
    if missing:
        raise SpecError(
            f"equipoise plan: needs {', '.join(missing)}; or a "
            f'run.toml, which says them itself. See "equipoise plan --help".'
        )
    own = [f"--{name}" for name, _ in args.overrides]
    own += [f"--{name}" for name in ("ranks", "name") if getattr(args, name) is not None]
    if own:
        raise SpecError(
            f"equipoise plan: {', '.join(own)} {'needs' if len(own) == 1 else 'need'} a run.toml, "
            f"and none is given. Give one, or words of --layout."
        )
    names = [each.name for each in dataclasses.fields(PlanRequest)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return PlanRequest(**given)


def _run_request(args: argparse.Namespace) -> "RunPlanRequest":
    """A run.toml on this machine."""
    from equipoise.plan.request import RunPlanRequest

    _require_own_flags(args)
    keys = tuple(args.overrides)
    if args.measure and args.name is not None:  # trials are given the run's name, too
        keys += (("name", args.name),)
    given = {} if args.seconds is None else {"seconds": args.seconds}
    return RunPlanRequest(
        run_from(args), args.run_toml, keys, ranks=args.ranks, out=args.out, **given
    )


def _require_own_flags(args: argparse.Namespace) -> None:
    """Refuse flags that only a described cluster needs."""
    from equipoise.plan.request import PlanRequest

    shared = ("seconds", "out", "export")
    wrong = [
        each.name
        for each in dataclasses.fields(PlanRequest)
        if each.name not in shared and getattr(args, each.name) not in (None, each.default)
    ]
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise SpecError(
            f"{args.run_toml} is planned by its own keys on this machine, and {flags} "
            f"{'describes' if len(wrong) == 1 else 'describe'} a model on a cluster. Give keys "
            f"instead, as in --layout.tp 2."
        )
