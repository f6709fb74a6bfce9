"""``equipoise simulate``: how long a step takes on a cluster that is not here, and does it fit."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.disk import writing
from equipoise.base.errors import SpecError
from equipoise.cli.recommend.simulate import simulate_recommend
from equipoise.cli.run_arguments import add_run_arguments, asks_recommender
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
from equipoise.cli.written import require_folder_of, require_kind

if TYPE_CHECKING:
    from equipoise.sim.answer import StepAnswer

HELP = "say how long a step, or a trace's requests, take on a cluster; needs no torch"

EXAMPLES = """\
examples:
  equipoise simulate --model llama3-405b --cluster h100-sxm:8192 \\
      --layout tp=8,cp=1,pp=16,dp=64 --context-tokens 8192 --step-sequences 2048
  equipoise simulate --model llama3-8b --cluster h100-sxm:64 --layout dp=64,zero=3 \\
      --context-tokens 8192 --step-sequences 128 --recompute full --json
  equipoise simulate --model llama3-405b --cluster h100-sxm:512 --layout tp=8,pp=8,cp=4,dp=2 \\
      --context-tokens 131072 --step-sequences 16 --program torchtitan --explain
  equipoise simulate --model llama3-70b --cluster h100-sxm:64 \\
      --layout tp=4,cp=2,pp=4,dp=2,virtual=5 --schedule interleaved \\
      --context-tokens 8192 --step-sequences 128 --trace step.json --plot step.svg
  equipoise simulate --model llama3-8b --cluster h100-sxm:64 --layout tp=2,cp=4,dp=8 \\
      --context-tokens 131072 --step-sequences 64 --lengths pretrain-128k --policy by-work
  equipoise simulate --model llama2-7b --cluster h100-sxm:64 --layout tp=8,cp=2,pp=4,virtual=2 \\
      --context-tokens 131072 --step-sequences 4 --lengths pretrain-128k \\
      --policy in-order,by-work,delayed,divided,gangs
  equipoise simulate --model layers=48,hidden=7168,heads=56,vocab=50368,gated=0 \\
      --cluster a100-80:128 --layout dp=128,zero=3 --context-tokens 2048 --step-sequences 1024
  equipoise simulate --model llama3-405b --cluster h100-sxm:8192 --layout tp=8,pp=16,dp=64 \\
      --context-tokens 8192 --step-sequences 2048 --jitter 0.05 --mtbf-hours 50000 \\
      --checkpoint-s 20 --restart-s 600
  equipoise simulate --model llama3-405b --cluster h100-sxm:8192 --layout tp=8,pp=16,dp=64 \\
      --context-tokens 8192 --step-sequences 2048 \\
      --faults mtbf=50000h,checkpoint=5s,detect=10s,restart=300s,spares=16,repair=48h
  equipoise simulate --requests trace.jsonl --model llama3-8b --cluster h100-sxm:2 \\
      --layout dp=2 --slo ttft=0.5,tpot=0.03
  equipoise simulate --requests azure.csv --model llama3-70b --cluster h100-sxm:8 \\
      --layout tp=4,dp=2 --precision fp8 --fair vtc --json
  equipoise simulate --requests azure.csv --model llama3-70b --cluster h100-sxm:16 \\
      --layout tp=4,cp=2 --decode-layout tp=4,dp=2
  equipoise simulate --requests azure.csv --model mixtral-8x22b --cluster h100-sxm:16 \\
      --layout tp=8,pp=2,ep=8 --expert-skew 1.3

  equipoise simulate recipes/recommend/run.toml      a recommender: its step on this machine, beside
                                                     what the journal in runs/NAME measured

A trace has a line for each request, as {"arrival_s": 0.5, "tenant": "a", "prompt_tokens": 900,
"output_tokens": 120}; optional: most_tokens, prefix_group with prefix_tokens. Also read: JSON lines
with StartTimeOffset [ns], ContextTokens, GeneratedTokens, and CSV with TIMESTAMP, ContextTokens,
GeneratedTokens.

--json prints one document; for a trace see the page "Foresight for serving". For a step:
  step_s; tokens_per_s_per_device; tflops_per_device and mfu, counted as published figures are
    (every pair of a document, masked ones too); useful_tflops_per_device and useful_mfu (each
    causal pair once)
  memory_gib_max memory_gib capacity_gib fits; memory: GiB of the fullest stage by term;
    host_memory_gib_max host_capacity_gib: of a device's share of its host, by --offload
  terms: seconds by what they are spent on, of the rank that computes most; they add up to step_s
  stages: layers busy_s exposed_s bubble_s of each pipeline rank
  energy_j_per_step energy_j_per_token usd_per_step usd_per_million_tokens
  extrapolated: measured curves that were read beyond their sizes
  interval: low_s and high_s between which a share of such steps lie; spreads: curve terms seconds
    spread_s, what each curve adds to the step and by how much it is off; not on this machine
  doubts: sentences on this machine's curves: measured under load, or only in part
  jitter: mean and p95 of the step over the step without; with --jitter
  would_fit: where it does not fit, changes of one setting that do, fastest first
  goodput: share of the time that goes into steps that are kept, and where the rest goes; with
    --mtbf-hours
  days: a month of the run, with --faults: mean (goodput, steps, failures, seconds by what they go
    to), goodput_low goodput_high, expected, young_steps daly_steps, tokens, usd
  sources: where each number of the device, its links and its curves comes from

Several policies are compared on equal content, each in its own layout of the same devices. --json
then prints rows, plain first: policy layout change slice_tokens seconds bound_s gain most_gain
tokens useful_flop memory_gib fits delay_mean_steps delay_most_steps extra_steps has_same_steps
terms; and steps tokens_per_step documents.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    add_step_arguments(parser, needs_any=False)
    add_sources_argument(parser)
    serving = add_serving_arguments(parser)
    serving.add_argument(
        "--decode-layout",
        metavar="WORDS",
        help="replicas that only generate, on devices of their own, as tp=2,dp=2; --layout then "
        "has those that compute prompts",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="of a recommender's run.toml: the folder whose journal stands beside the prediction "
        "(default: runs/NAME, if it is there)",
    )
    parser.add_argument(
        "--layout",
        metavar="WORDS",
        help="degrees, as tp=8,cp=1,pp=16,dp=64; also ep=, etp=, zero=, replicas=, virtual=; of "
        "serving dp replicas of tp x cp x pp devices",
    )
    parser.add_argument(
        "--layers",
        metavar="RUNS",
        help="strategies of layers, run after run, as 12:tp=2,dp=4,zero=1:full "
        "20:tp=1,dp=8,zero=1:none; what equipoise plan --layers own prints",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the step in time, or of --requests which share was how fast (.png, .svg or "
        ".pdf)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the step as a trace for https://ui.perfetto.dev (.json), with the memory of "
        "each rank at every moment",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also print how sure the step's time is, and of what",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        metavar="SHARE",
        help="standard deviation, over its mean, of the time that a stage takes for one pass of a "
        "micro-batch",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="with several policies, as --policy by-work,delayed,gangs: consecutive steps that "
        "each of them packs (default: 16)",
    )
    parser.add_argument(
        "--cut",
        choices=["windows", "documents"],
        help="with several policies: cut documents at every window's edge, as plain packing does, "
        "or only those longer than a window (default: windows)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="with several policies: most tokens of a micro-batch on one rank (default: a quarter "
        "more than an even share where documents are divided, or than a window)",
    )
    faults = parser.add_argument_group("failures")
    faults.add_argument(
        "--faults",
        metavar="WORDS",
        help="price a month: mtbf=50000h (of one device) and any of checkpoint=30s, detect=10s, "
        "restart=600s, steps=200 (between checkpoints), spares=4, repair=24h, days=30",
    )
    faults.add_argument(
        "--mtbf-hours",
        type=float,
        metavar="H",
        help="mean time between failures of one device",
    )
    faults.add_argument(
        "--checkpoint-s",
        type=float,
        metavar="S",
        help="for which a checkpoint holds training up (default: 30)",
    )
    faults.add_argument(
        "--checkpoint-steps",
        type=int,
        metavar="N",
        help="steps between checkpoints (default: Young's interval)",
    )
    faults.add_argument(
        "--restart-s",
        type=float,
        metavar="S",
        help="from a failure to the next step (default: 600)",
    )


def run(args: argparse.Namespace) -> int:
    """Price one step, or serve a trace, and print it; of a recommender, beside its journal."""
    if asks_recommender(args):
        return simulate_recommend(args, add_arguments)
    _require_no_run(args)
    from equipoise.cli.show import print_interval
    from equipoise.cli.simulate.table import print_step
    from equipoise.sim.request import StepRequest, simulate

    if args.requests is not None:
        return _serve(args)
    _require_step(args)
    _judge_files(args)
    if args.policy is not None and "," in args.policy:
        return _compare(args)
    for name in _SEVERAL:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise SpecError(
                f"{flag} {getattr(args, name)} is read where several policies are compared. Name "
                f"them with commas, as --policy by-work,delayed, or leave {flag} out."
            )
    given = {each.name for each in dataclasses.fields(StepRequest)} & vars(args).keys()
    answer = simulate(StepRequest(**{name: getattr(args, name) for name in given}))
    say_forecast(args)
    title = f"{args.model} on {answer.machine.cluster.name}, {args.layout}"
    if args.plot is not None or args.trace is not None:
        _draw(args, answer, title)
    if args.json:
        sys.stdout.write(json.dumps(answer.as_row(), indent=1) + "\n")
        return 0
    print_step(answer, title, is_quiet=args.quiet, sources_are_listed=args.sources)
    if args.explain and not args.quiet:
        print_interval(answer.as_row())
    if not args.quiet:
        for file in (args.plot, args.trace):
            if file is not None:
                sys.stdout.write(f"{file}\n")
    return 0


def _require_no_run(args: argparse.Namespace) -> None:
    """Refuse a run.toml that is not a recommender's, and a step that lacks its words."""
    if args.run_toml is not None or args.overrides or args.name or args.run:
        raise SpecError(
            "equipoise simulate reads a run.toml, its keys and --run only where model.kind = "
            '"recommend". Price other runs with equipoise plan run.toml, or describe the step by '
            "flags."
        )
    missing = [f"--{name}" for name in ("model", "cluster", "layout") if _is_missing(args, name)]
    if missing:
        raise SpecError(
            f'equipoise simulate: needs {", ".join(missing)}. See "equipoise simulate --help".'
        )


_SEVERAL = ("steps", "cut", "max_tokens")
"""Flags of a comparison of policies alone."""

_ONE_STEP = ("layers", "plot", "trace", "jitter", "faults", "mtbf_hours", "sources")
"""Flags that a comparison of policies does not read."""


def _compare(args: argparse.Namespace) -> int:
    """Price several policies on the same documents, and print them side by side."""
    from equipoise.cli.console import make_progress
    from equipoise.cli.simulate.policies_table import print_policies
    from equipoise.sim.policies.compare import compare_policies
    from equipoise.sim.policies.setting import CompareOptions
    from equipoise.sim.request import StepRequest

    for name in _ONE_STEP:
        if getattr(args, name):
            flag = name.replace("_", "-")
            raise SpecError(
                f"--{flag} reads one step of one policy, and --policy {args.policy} names several. "
                f"Name one, or leave --{flag} out."
            )
    given = {each.name for each in dataclasses.fields(StepRequest)} & vars(args).keys()
    request = StepRequest(**{name: getattr(args, name) for name in given - {"policy"}})
    policies = [name.strip() for name in args.policy.split(",")]
    progress = make_progress(args.quiet or args.json)
    steps = 16 if args.steps is None else args.steps
    how = CompareOptions(args.cut or "windows", args.max_tokens)
    answer = compare_policies(request, policies, steps=steps, how=how, progress=progress)
    say_forecast(args)
    if args.json:
        sys.stdout.write(json.dumps(answer.as_row(), indent=1) + "\n")
        return 0
    print_policies(answer, f"{args.model} on {args.cluster}", is_quiet=args.quiet)
    return 0


_SERVING = (*SERVING, "decode_layout")


def _require_step(args: argparse.Namespace) -> None:
    missing = [name for name in ("context_tokens", "step_sequences") if _is_missing(args, name)]
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise SpecError(
            f"A step needs {flags}. Give the sizes of a step, or --requests TRACE to serve one."
        )
    for name in _SERVING:
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise SpecError(f"--{flag} needs --requests. Give both or neither.")


def _is_missing(args: argparse.Namespace, name: str) -> bool:
    return getattr(args, name) is None


def _serve(args: argparse.Namespace) -> int:
    """Serve a trace and print what became of it."""
    from equipoise.cli.console import make_progress
    from equipoise.cli.simulate.nano import print_nano
    from equipoise.cli.simulate.serving_table import print_serving
    from equipoise.sim.serve.nano import forecast_nano
    from equipoise.sim.serve.request import ServingRequest, simulate_serving

    require_of_serving(args, add_arguments, (*_SERVING, *SHARED, "sources", "plot"))
    _judge_files(args)
    request = ServingRequest(
        args.requests,
        args.model,
        args.cluster,
        args.layout,
        decode_layout=args.decode_layout,
        **serving_of(args),
    )
    progress = make_progress(args.quiet or args.json)
    answer = simulate_serving(request, progress)
    if args.plot is not None:
        from equipoise.dash.serving.plot import plot_tenants

        with writing("plot", args.plot):
            plot_tenants(args.plot, answer)
    nano = forecast_nano(request, answer)
    say_forecast(args)
    if args.json:
        row = {**answer.as_row(), "nano": nano and nano.as_row()}
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
        return 0
    apart = "" if args.decode_layout is None else f" and {args.decode_layout} to generate"
    title = f"{args.model} on {args.cluster}, {args.layout}{apart}"
    print_serving(answer, title, is_quiet=args.quiet)
    if args.plot is not None and not args.quiet:
        sys.stdout.write(f"{args.plot}\n")
    if nano is not None and not args.quiet:
        print_nano(nano)
    return 0


def _judge_files(args: argparse.Namespace) -> None:
    require_kind("plot", args.plot, "picture")
    require_kind("trace", args.trace, "trace")
    for flag in ("plot", "trace"):
        require_folder_of(flag, getattr(args, flag))


def _draw(args: argparse.Namespace, answer: "StepAnswer", title: str) -> None:
    from equipoise.cli.simulate.table import add_counters
    from equipoise.dash.pipeline_plot import plot_pipeline, write_trace

    slowest = answer.run.slowest
    named = dataclasses.replace(slowest.timeline, name=title)
    if args.plot is not None:
        with writing("plot", args.plot):
            plot_pipeline(args.plot, [named])
    if args.trace is not None:
        with writing("trace", args.trace):
            write_trace(args.trace, [named], slowest.schedule)
            add_counters(args.trace, answer.run)
