"""``equipoise explain pipeline``: strategies of a pipeline's step, shown, drawn and traced.

What it decides
    Micro-batches are never invented: documents are packed by a policy, as a run's would be. What
    ``--lengths`` lists is one step, its documents whole where the policy keeps them whole.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cli.counts import MOST_MICRO_BATCHES, MOST_SHARING
from equipoise.cli.explain import asked
from equipoise.cli.explain.asked import EXAMPLE_MODEL, EXAMPLE_RANKS, StepOrigin
from equipoise.cli.run_arguments import run_from
from equipoise.spec.catalog import LOSSY, POLICIES, SCHEDULES
from equipoise.spec.limits import MOST_SIZE

if TYPE_CHECKING:
    from equipoise.balance.pipeline import PipelineSetting
    from equipoise.base.arrays import Ints
    from equipoise.spec.pack import Pieces
    from equipoise.spec.run.resolve import ResolvedRun
    from equipoise.spec.run.spec import PackSpec

HELP = "show the schedule of a pipeline's step: when each stage runs which micro-batch"

EXAMPLES = """\
examples:
  equipoise explain pipeline                         8 equal micro-batches, 4 ranks, 1f1b
  equipoise explain pipeline --strategy all          every strategy, a row each
  equipoise explain pipeline --strategy zb-v --plot zb-v.svg --trace zb-v.json
  equipoise explain pipeline --strategy all --ranks 8 --micro-batches 32 \\
      --lengths pretrain-128k --context-tokens 131072 --policy by-work
  equipoise explain pipeline --lengths 6000,300,512,64,1024 --micro-batches 5 \\
      --policy divided-in-time
  equipoise explain pipeline run.toml --ranks 2 --strategy auto --most-held 1.5
"""

_MICRO_BATCHES = 8
_CONTEXT = 8192

_SKIP = 0.25

_SPEEDS = (0.001, 1e6)
"""TFLOP/s for which the largest models' steps, and the smallest's, are whole nanoseconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    asked.add_step_arguments(
        parser,
        strategies="gpipe, 1f1b, interleaved, zb-h1, zb-h2, interleaved-zb, zb-v, dualpipe-v, "
        "v-half, v-min, auto, and skip-partial and skip-reordered, which train another model "
        "(default: the run's, else 1f1b)",
        documents="a step (default: the run's corpus; without a run.toml, one document a "
        "micro-batch)",
        window=_CONTEXT,
        ranks="the layers (default: the run's layout.pp",
    )
    asked.add_link_arguments(parser, "between two ranks")
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="V",
        help="stages of each rank (default: 2 where the strategy wants several, else 1)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="windows of a step, one a micro-batch (default: the run's pack.step_tokens; 8 without "
        "a run.toml)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="pack.policy, which makes the micro-batches; divided-in-time cuts a document into "
        "slices for several (default: the run's, else by-work)",
    )
    parser.add_argument(
        "--arranged",
        action="store_true",
        help="let micro-batches enter light ones first and last, instead of as they are packed",
    )
    parser.add_argument(
        "--skip",
        type=float,
        metavar="SHARE",
        help="share of the inner stages that each micro-batch leaves out under skip-partial and "
        "skip-reordered (default: the run's, else 0.25)",
    )
    parser.add_argument(
        "--most-held",
        type=float,
        metavar="N",
        help="activations that a rank may hold, in mean micro-batches (default: no bound; for "
        "auto, 1f1b's for the largest micro-batch)",
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="the same in GiB, as activations are counted"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the predicted step as a trace for https://ui.perfetto.dev (.json)",
    )


def run(args: argparse.Namespace) -> int:
    """Explain the schedule of one strategy, or compare all."""
    from equipoise.balance.pipeline import compare_pipelines
    from equipoise.cli.explain import pipeline_table as table

    _judge(args)
    setting, origin = _setting(args)
    answer = compare_pipelines(setting)
    scores = answer.scores
    predicted = [
        replace(each.timeline, name=f"{each.title}, predicted for {setting.machine}")
        for each in scores
    ]
    if args.plot is not None:
        from equipoise.dash.pipeline_plot import plot_pipeline

        plot_pipeline(args.plot, predicted)
    if args.trace is not None:
        from equipoise.dash.pipeline_plot import write_trace

        write_trace(args.trace, predicted, scores[0].schedule if len(scores) == 1 else None)
    asked.answer(
        args,
        rows=lambda: table.pipeline_rows(answer, origin),
        lines=lambda: table.print_lines(answer),
        tables=lambda: table.print_tables(answer, origin),
        schedules=[score.schedule for score in scores],
        files=(args.plot, args.trace),
    )
    return 0


def _judge(args: argparse.Namespace) -> None:
    most = {
        "ranks": MOST_SHARING,
        "context_tokens": MOST_SIZE,
        "chunks": MOST_SHARING,
        "micro_batches": MOST_MICRO_BATCHES,
    }
    asked.judge(args, most, list(SCHEDULES))
    for flag in ("most_held", "memory"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < float("inf"):
            raise SpecError(
                f"--{flag.replace('_', '-')} {value:g} holds nothing. Give a number above 0."
            )
    if args.most_held is not None and args.memory is not None:
        raise SpecError("--most-held and --memory bound the same. Give one of them.")
    if args.skip is not None and args.strategy not in ("all", *LOSSY):
        raise SpecError(
            f"--skip {args.skip:g} goes with --strategy {' or '.join(LOSSY)}, which train another "
            f"model, not with {args.strategy or '1f1b'}. Leave it out."
        )
    least, most_tflop = _SPEEDS
    if not least <= args.tflop_per_s <= most_tflop:
        raise SpecError(
            f"--tflop-per-s {args.tflop_per_s:g} is not between {least:g} and {most_tflop:,.0f}, "
            f"and times are whole nanoseconds. Give a speed of a rank in TFLOP/s."
        )


def _setting(args: argparse.Namespace) -> "tuple[PipelineSetting, StepOrigin]":
    """What the parsed arguments ask for.

    Raises:
        SpecError: a flag, or a key of the run, that is wrong.
        DataError: lengths that cannot be read.
        LayoutError: documents that the policy cannot pack.
    """
    from equipoise.balance.packing.pack import pack_step
    from equipoise.balance.packing.turns import require_policy
    from equipoise.balance.pipeline import PipelineSetting
    from equipoise.cost.curve import counted_curve
    from equipoise.schedule.attention.score import AssumedMachine

    run = _run(args)
    layout = run.spec.layout
    machine = AssumedMachine(1e12 * args.tflop_per_s, asked.read_link("--link", args.link))
    ranks = args.ranks or (layout.pp if layout.pp > 1 else EXAMPLE_RANKS)
    require_policy(run.spec.pack.policy, context=layout.cp, pipeline=ranks)
    data_ranks = 1 if layout.dp == "cores" else layout.dp
    pieces, pack, origin = _step(args, run, data_ranks)
    if not len(pieces):
        raise SpecError(f"--lengths {args.lengths}: there is no token to train on. Give lengths.")
    curve = counted_curve(run.model, flop_per_s=machine.flop_per_s)
    batches = pack_step(pieces, pack, data_ranks, curve).ranks[0]
    if not sum(batch.tokens for batch in batches):
        raise LayoutError(
            f"The policy {pack.policy} puts none of the step's {len(pieces)} documents into rank "
            f"0's micro-batches. Give more documents, or take by-work."
        )
    setting = PipelineSetting(
        strategy=args.strategy or layout.schedule,
        ranks=ranks,
        batches=batches,
        model=run.model,
        machine=machine,
        chunks=args.chunks or layout.virtual,
        dtype=args.dtype,
        recompute=run.spec.train.recompute,
        most_bytes=None if args.memory is None else int(args.memory * (1 << 30)),
        most_held=args.most_held,
        skip=(layout.skip or _SKIP) if args.skip is None else args.skip,
        is_arranged=args.arranged,
    )
    origin += "" if data_ranks == 1 else f", rank 0 of {data_ranks}"
    is_alone = layout.cp * layout.tp == 1
    return setting, StepOrigin(origin, pack.policy, run.spec.model.preset, is_alone)


def _run(args: argparse.Namespace) -> "ResolvedRun":
    """The run with flags, and what stands for a run if none is given, as its keys."""
    keys, is_bare = {key for key, _ in args.overrides}, args.run_toml is None
    model, window = args.model, args.context_tokens
    if is_bare and model is None and not any(key.startswith("model.") for key in keys):
        model = EXAMPLE_MODEL
    if is_bare and window is None and "pack.context_tokens" not in keys:
        window = _CONTEXT
    if is_bare and args.micro_batches is None and "pack.step_tokens" not in keys:
        args.micro_batches = _MICRO_BATCHES
    is_sized = window is not None and args.micro_batches is not None
    wanted = {
        "model.preset": model,
        "pack.policy": args.policy,
        "pack.context_tokens": window,
        "pack.step_tokens": args.micro_batches * window if is_sized else None,
        "layout.dp": 1 if is_bare and "layout.dp" not in keys else None,
    }
    args.overrides += [(key, str(value)) for key, value in wanted.items() if value is not None]
    return run_from(args)


def _step(
    args: argparse.Namespace, run: "ResolvedRun", data_ranks: int
) -> "tuple[Pieces, PackSpec, str]":
    """The documents of one step, how they are packed, and where they come from."""
    import numpy as np

    from equipoise.spec.workload import listed_lengths

    pack = run.spec.pack
    if args.micro_batches is not None:
        step_tokens = args.micro_batches * data_ranks * pack.context_tokens
        pack = replace(pack, step_tokens=step_tokens)
    listed = None if args.lengths is None else listed_lengths(args.lengths, least=0)
    if listed is not None:
        lengths = np.array([each for each in listed if each], dtype=np.int64)
        return _whole(lengths), _for_listed(args, pack, lengths, data_ranks), "--lengths"
    if args.lengths is None and not asked.asks_for_corpus(args):
        count = -(-pack.step_tokens // pack.context_tokens)
        equal = np.full(count, pack.context_tokens, dtype=np.int64)
        return _whole(equal), pack, "an example, all alike"
    pieces, origin = asked.first_pieces(args, run, pack.step_tokens, "step")
    return pieces, pack, origin


def _whole(lengths: "Ints") -> "Pieces":
    import numpy as np

    return np.stack((np.arange(len(lengths)), np.zeros_like(lengths), lengths), axis=1)


def _for_listed(
    args: argparse.Namespace, pack: "PackSpec", lengths: "Ints", data_ranks: int
) -> "PackSpec":
    """Windows that make as many micro-batches as are asked for, and a cap that holds every one."""
    if args.context_tokens is None and args.micro_batches is not None:
        window = max(2, -(-int(lengths.sum()) // (args.micro_batches * data_ranks)))
        pack = replace(pack, context_tokens=window)
    traits = POLICIES[pack.policy]
    if traits.fills_windows or traits.needs_pipeline:
        return pack
    longest = int(lengths.max(initial=0))
    return replace(pack, max_tokens=max(pack.most_tokens, longest))
