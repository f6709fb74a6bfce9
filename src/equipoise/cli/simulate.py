"""``equipoise simulate``: how long a step takes on a cluster that is not here, and does it fit."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError

if TYPE_CHECKING:
    from equipoise.cost.step import StepOptions
    from equipoise.sim.parts import PipelineRun
    from equipoise.sim.step import Documents
    from equipoise.spec.layout import Layout

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

--json prints one document:
  step_s; tokens_per_s_per_device; tflops_per_device and mfu, counted as published figures are
    (every pair of a window, masked ones too); useful_tflops_per_device and useful_mfu (each causal
    pair once, documents apart)
  memory_gib_max memory_gib capacity_gib fits; memory: GiB of the fullest stage by term
  terms: seconds by what they are spent on, of the rank that computes most; they add up to step_s
  stages: layers busy_s exposed_s bubble_s of each pipeline rank
  energy_j_per_step energy_j_per_token usd_per_step usd_per_million_tokens
  extrapolated: measured curves that were read beyond their sizes
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
        "--plot", type=Path, metavar="FILE", help="draw the step in time (.png, .svg or .pdf)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the step as a trace for https://ui.perfetto.dev (.json)",
    )


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what a step is, whoever lays it out."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|WORDS|FILE",
        help="a known model, layers=..,hidden=..,heads=..,vocab=.., or a config.json",
    )
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME:DEVICES|FILE",
        help="as h100-sxm:8192, or a cluster.toml",
    )
    parser.add_argument(
        "--context-tokens", type=int, required=True, metavar="N", help="tokens of a sequence"
    )
    parser.add_argument(
        "--step-sequences",
        type=int,
        required=True,
        metavar="N",
        help="sequences of one step, over all ranks",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=1,
        metavar="N",
        help="sequences of one micro-batch (default: 1)",
    )
    parser.add_argument(
        "--recompute",
        default="none",
        choices=["none", "attention", "selective", "every-2", "every-3", "every-4", "full"],
        help="what layers make again in the backward (default: none)",
    )
    parser.add_argument(
        "--precision",
        choices=["bf16", "fp8"],
        default="bf16",
        help="of matrix products (default: bf16)",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help="order of a pipeline's work, as equipoise explain --schedule lists them (default: "
        "1f1b, and interleaved where virtual is above 1)",
    )
    parser.add_argument(
        "--expert-skew",
        type=float,
        default=1.0,
        metavar="RATIO",
        help="rows of the expert rank that has most, over the mean (default: 1, balanced)",
    )
    parser.add_argument(
        "--lengths",
        metavar="NAME|FILE",
        help="document lengths: pretrain-128k, prolong, python-stdlib, wikipedia, or a file of "
        "lengths (default: full windows)",
    )
    parser.add_argument(
        "--policy",
        default="by-work",
        metavar="NAME",
        help="pack.policy, which makes micro-batches of documents; with --lengths (default: "
        "by-work)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the documents drawn (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Price one step and print it."""
    from equipoise.cli.simulate_show import print_step, step_row
    from equipoise.sim.machine import Machine
    from equipoise.sim.step import run_step
    from equipoise.spec.cluster_file import read_cluster
    from equipoise.spec.words import read_layout, read_model

    _judge(args)
    model, words = read_model(args.model), read_layout(args.layout)
    machine = Machine(read_cluster(args.cluster))
    words.layout.require_world(machine.cluster.devices)
    options = step_options(args, words.virtual)
    documents = step_documents(args, words.layout, options)
    found = run_step(model, machine, words.layout, options, documents=documents)
    title = f"{args.model} on {machine.cluster.name}, {args.layout}"
    if args.plot is not None or args.trace is not None:
        _draw(args, found.slowest, title)
    if args.json:
        import json

        sys.stdout.write(json.dumps(step_row(found, machine, options), indent=1) + "\n")
        return 0
    print_step(found, machine, options, title, is_quiet=args.quiet)
    if not args.quiet:
        for file in (args.plot, args.trace):
            if file is not None:
                sys.stdout.write(f"{file}\n")
    return 0


def _judge(args: argparse.Namespace) -> None:
    if args.plot is not None and args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise SpecError(
            f"--plot {args.plot}: a picture's name ends in .png, .svg or .pdf, not "
            f'"{args.plot.suffix}". Try {args.plot.with_suffix(".png")}.'
        )
    for flag in ("plot", "trace"):
        file: Path | None = getattr(args, flag)
        if file is not None and not file.parent.is_dir():
            raise SpecError(f"--{flag} {file}: there is no folder {file.parent}. Create it first.")


def _draw(args: argparse.Namespace, run: "PipelineRun", title: str) -> None:
    import dataclasses

    from equipoise.dash.pipeline_plot import plot_pipeline, write_trace

    named = dataclasses.replace(run.timeline, name=title)
    if args.plot is not None:
        plot_pipeline(args.plot, [named])
    if args.trace is not None:
        write_trace(args.trace, [named], run.schedule)


def step_options(args: argparse.Namespace, virtual: int) -> "StepOptions":
    """What the flags say about a step."""
    from equipoise.base.nearest import nearest
    from equipoise.cost.step import StepOptions
    from equipoise.schedule.pipeline_strategies import LOSSY, STRATEGIES

    schedule = args.schedule or ("interleaved" if virtual > 1 else "1f1b")
    known = [name for name in STRATEGIES if name not in LOSSY]
    if schedule not in known:
        raise SpecError(
            f'--schedule: "{schedule}" is not one of {", ".join(known)}. Nearest: '
            f'"{nearest(schedule, known)}".'
        )
    return StepOptions(
        args.context_tokens,
        args.step_sequences,
        micro_batch=args.micro_batch,
        virtual=virtual,
        schedule=schedule,
        recompute=args.recompute,
        precision=args.precision,
        expert_skew=args.expert_skew,
        policy=args.policy,
        seed=args.seed,
    )


def step_documents(
    args: argparse.Namespace, layout: "Layout", options: "StepOptions"
) -> "Documents | None":
    """Documents of one step, packed by the policy; None for full windows."""
    if args.lengths is None:
        return None
    from equipoise.balance.pack import ALL_POLICIES, pack_step
    from equipoise.base.nearest import nearest
    from equipoise.cost.curve import counted_curve
    from equipoise.data.stream import DocumentStream
    from equipoise.spec.run import PackSpec
    from equipoise.spec.words import read_model
    from equipoise.spec.workload import distribution_names, draw_lengths, read_lengths

    if options.policy not in ALL_POLICIES:
        raise SpecError(
            f'--policy: "{options.policy}" is not one of {", ".join(ALL_POLICIES)}. Nearest: '
            f'"{nearest(options.policy, ALL_POLICIES)}".'
        )
    options.count_micro_batches(layout)
    step_tokens = options.context_tokens * options.step_sequences
    if args.lengths in distribution_names():
        documents = 4096
        lengths = draw_lengths(args.lengths, documents, seed=args.seed)
        while int(lengths.clip(max=options.context_tokens).sum()) < step_tokens:
            documents *= 2
            lengths = draw_lengths(args.lengths, documents, seed=args.seed)
    else:
        lengths = read_lengths(Path(args.lengths))
    stream = DocumentStream(lengths, seed=args.seed, context_tokens=options.context_tokens)
    pack = PackSpec(
        policy=args.policy,
        context_tokens=options.context_tokens * options.micro_batch,
        step_tokens=step_tokens,
    )
    packed = pack_step(
        stream.step(0, step_tokens), pack, layout.dp, counted_curve(read_model(args.model))
    )
    return [[batch.doc_tokens.tolist() for batch in rank] for rank in packed.ranks]
