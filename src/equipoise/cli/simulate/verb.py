"""``equipoise simulate``: how long a step takes on a cluster that is not here, and does it fit."""

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from equipoise.base.units import GIB
from equipoise.cli.simulate.judge import judge_failures, judge_idle
from equipoise.cli.simulate.setting import (
    add_step_arguments,
    require_kernel_prices,
    require_no_offload,
    step_documents,
    step_options,
)
from equipoise.cli.written import require_folder_of, require_kind, writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.cost.step.request import StepOptions
    from equipoise.sim.step import StepRun
    from equipoise.spec.device.spec import DeviceSpec
    from equipoise.spec.layout import Layout
    from equipoise.spec.run.spec import Recompute

HELP = "say how long a step takes on another cluster, and whether it fits; needs no torch"

EXAMPLES = """\
examples:
  equipoise simulate --model llama3-405b --cluster h100-sxm:8192 \\
      --layout tp=8,cp=1,pp=16,dp=64 --context-tokens 8192 --step-sequences 2048
  equipoise simulate --model llama3-8b --cluster h100-sxm:64 --layout dp=64,zero=3 \\
      --context-tokens 8192 --step-sequences 128 --recompute full --json
  equipoise simulate --model llama3-70b --cluster h100-sxm:64 \\
      --layout tp=4,cp=2,pp=4,dp=2,virtual=5 --schedule interleaved \\
      --context-tokens 8192 --step-sequences 128 --trace step.json --plot step.svg
  equipoise simulate --model llama3-8b --cluster h100-sxm:64 --layout tp=2,cp=4,dp=8 \\
      --context-tokens 131072 --step-sequences 64 --lengths pretrain-128k --policy by-work
  equipoise simulate --model layers=48,hidden=7168,heads=56,vocab=50368,gated=0 \\
      --cluster a100-80:128 --layout dp=128,zero=3 --context-tokens 2048 --step-sequences 1024
  equipoise simulate --model llama3-405b --cluster h100-sxm:8192 --layout tp=8,pp=16,dp=64 \\
      --context-tokens 8192 --step-sequences 2048 --jitter 0.05 --mtbf-hours 50000 \\
      --checkpoint-s 20 --restart-s 600

--json prints one document:
  step_s; tokens_per_s_per_device; tflops_per_device and mfu, counted as published figures are
    (every pair of a document, masked ones too); useful_tflops_per_device and useful_mfu (each
    causal pair once)
  memory_gib_max memory_gib capacity_gib fits; memory: GiB of the fullest stage by term;
    host_memory_gib_max host_capacity_gib: of a device's share of its host, by --offload
  terms: seconds by what they are spent on, of the rank that computes most; they add up to step_s
  stages: layers busy_s exposed_s bubble_s of each pipeline rank
  energy_j_per_step energy_j_per_token usd_per_step usd_per_million_tokens
  extrapolated: measured curves that were read beyond their sizes
  jitter: mean and p95 of the step over the step without; with --jitter
  would_fit: where it does not fit, changes of one setting that do, fastest first
  goodput: share of the time that goes into steps that are kept, and where the rest goes; with
    --mtbf-hours
  sources: where each number of the device, its links and its curves comes from
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_step_arguments(parser)
    parser.add_argument(
        "--layout",
        required=True,
        metavar="WORDS",
        help="degrees, as tp=8,cp=1,pp=16,dp=64; also ep=, etp=, zero=, replicas=, virtual=",
    )
    parser.add_argument(
        "--layers",
        metavar="RUNS",
        help="strategies of layers, run after run, as 12:tp=2,dp=4,zero=1:full "
        "20:tp=1,dp=8,zero=1:none; what equipoise plan --layers own prints",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the step in time (.png, .svg or .pdf)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the step as a trace for https://ui.perfetto.dev (.json), with the memory of "
        "each rank at every moment",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        metavar="SHARE",
        help="standard deviation, over its mean, of the time that a stage takes for one pass of a "
        "micro-batch",
    )
    faults = parser.add_argument_group("failures")
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
    """Price one step and print it."""
    from equipoise.cli.simulate.table import print_step, step_row
    from equipoise.plan.layers.words import read_layers
    from equipoise.sim.machine import Machine
    from equipoise.sim.mixed.replay import run_layered, run_sites
    from equipoise.spec.cluster.file import read_cluster
    from equipoise.spec.words import read_layout, read_model

    _judge(args)
    model, words = read_model(args.model), read_layout(args.layout)
    judge_idle(args, experts=model.experts, cp=words.layout.cp)
    if args.order == "pp-dp":
        turned = dataclasses.replace(words.layout, order=("pp", "dp", "cp", "tp"))
        words = dataclasses.replace(words, layout=turned)
    machine = Machine(read_cluster(args.cluster))
    words.layout.require_world(machine.cluster.devices)
    options = step_options(args, words.virtual, machine.device)
    documents = step_documents(args, words.layout, options)
    price: Callable[[Layout, StepOptions], StepRun]
    price = partial(run_sites, model, machine, documents=documents)
    if args.layers is not None:
        require_kernel_prices(model, machine.cluster, args.precision)
        require_no_offload(args)
        layers = read_layers(args.layers, words.layout)
        price = partial(run_layered, model, machine, layers=layers, documents=documents)
    found = price(words.layout, options)
    noise = _noise(args, found, words.layout, machine.cluster.devices)
    if not found.price.fits and args.layers is None:
        noise["would_fit"] = _would_fit(price, words.layout, options, machine.device)
    title = f"{args.model} on {machine.cluster.name}, {args.layout}"
    if args.plot is not None or args.trace is not None:
        _draw(args, found, title)
    if args.json:
        import json

        from equipoise.cost.curves.sources import sources_of

        row = step_row(found, machine, options) | noise
        row["sources"] = sources_of(machine.cluster, options.precision)
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
        return 0
    print_step(found, machine, options, title, noise, is_quiet=args.quiet)
    if not args.quiet:
        for file in (args.plot, args.trace):
            if file is not None:
                sys.stdout.write(f"{file}\n")
    return 0


def _judge(args: argparse.Namespace) -> None:
    judge_failures(args)
    require_kind("plot", args.plot, "picture")
    require_kind("trace", args.trace, "trace")
    for flag in ("plot", "trace"):
        require_folder_of(flag, getattr(args, flag))


def _draw(args: argparse.Namespace, found: "StepRun", title: str) -> None:
    from equipoise.cli.simulate.table import add_counters
    from equipoise.dash.pipeline_plot import plot_pipeline, write_trace

    named = dataclasses.replace(found.slowest.timeline, name=title)
    if args.plot is not None:
        with writing("plot", args.plot):
            plot_pipeline(args.plot, [named])
    if args.trace is not None:
        with writing("trace", args.trace):
            write_trace(args.trace, [named], found.slowest.schedule)
            add_counters(args.trace, found)


_ZERO: "tuple[Literal[2, 3], ...]" = (2, 3)

_SPARING: "tuple[Recompute, ...]" = ("attention", "every-2", "selective", "full")
"""Recomputation, from what costs least time to what saves most memory."""


def _would_fit(
    price: "Callable[[Layout, StepOptions], StepRun]",
    layout: "Layout",
    options: "StepOptions",
    device: "DeviceSpec",
) -> list[dict[str, Any]]:
    """Of changes to one setting those that fit, fastest first."""
    from equipoise.spec.device.spec import THIS_CPU
    from equipoise.spec.offload import OFFLOADS

    changed = [
        (f"zero={zero}", dataclasses.replace(layout, zero=zero), options)
        for zero in _ZERO
        if zero > layout.zero and layout.zero_ranks > 1
    ]
    changed += [
        (f"--recompute {name}", layout, dataclasses.replace(options, recompute=name))
        for name in _SPARING
        if options.recompute == "none"
    ]
    changed += [
        (f"--offload {name}", layout, dataclasses.replace(options, offload=name))
        for name in OFFLOADS[1:]
        if options.offload == "none" and device.name != THIS_CPU
    ]
    found = []
    for change, other, asked in changed:
        tried = price(other, asked).price
        if tried.fits:
            gib = float(tried.memory_bytes.max()) / GIB
            found.append({"change": change, "memory_gib_max": gib, "step_s": tried.step_s})
    return sorted(found, key=lambda each: each["step_s"])


_CHECKPOINT_S, _RESTART_S = 30.0, 600.0

_FAULT_STEPS = 100_000
"""Long enough that goodput no longer moves in its third digit."""


def _noise(
    args: argparse.Namespace, found: "StepRun", layout: "Layout", devices: int
) -> dict[str, Any]:
    """What jitter and failures make of the step, as far as they are asked for."""
    from equipoise.sim.faults import FaultOptions, run_with_faults
    from equipoise.sim.jitter import run_with_jitter

    noise: dict[str, Any] = {}
    step_s = found.price.step_s
    if args.jitter is not None:
        shaken = run_with_jitter(found.slowest, layout.dp, args.jitter, seed=args.seed)
        noise["jitter"] = dataclasses.asdict(shaken)
        step_s *= shaken.mean
    if args.mtbf_hours is not None:
        checkpoint_s, restart_s = (
            usual if given is None else given
            for given, usual in ((args.checkpoint_s, _CHECKPOINT_S), (args.restart_s, _RESTART_S))
        )
        faults = FaultOptions(
            args.mtbf_hours * 3600, checkpoint_s, restart_s, args.checkpoint_steps
        )
        run = run_with_faults(step_s, devices, faults, steps=_FAULT_STEPS, seed=args.seed)
        noise["goodput"] = dataclasses.asdict(run)
    return noise
