"""``equipoise explain``: who computes and sends what, and when, before anything runs."""

import argparse
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.cli.counts import MOST_MICRO_BATCHES, MOST_SHARING, require_counts
from equipoise.cli.explain.attention_setting import (
    BYTES,
    EXAMPLE_MODEL,
    EXAMPLE_RANKS,
    EXAMPLE_TOKENS,
)
from equipoise.cli.run_arguments import add_run_arguments
from equipoise.cli.written import require_folder_of, require_kind
from equipoise.spec.limits import MOST_SIZE

HELP = "show who computes or sends what: attention, pipelines, tensors; needs no torch"

EXAMPLES = """\
examples:
  equipoise explain --attention                      five documents, 4 ranks, needed-kv
  equipoise explain --attention --strategy all       every strategy, a row each
  equipoise explain --attention --strategy ring --lengths 3000,40,900 --ranks 3 --text
  equipoise explain --attention --strategy all --ranks 16 --ranks-per-node 8 \\
      --lengths pretrain-128k --context-tokens 131072 --model llama3-70b
  equipoise explain --attention run.toml             what the run's own layout does
  equipoise explain --attention run.toml --strategy all --json
  equipoise explain --attention --strategy token-ring --plot token-ring.svg

  equipoise explain --schedule                       8 equal micro-batches, 4 ranks, 1f1b
  equipoise explain --schedule --strategy all        every strategy, a row each
  equipoise explain --schedule --strategy zb-v --plot zb-v.svg --trace zb-v.json
  equipoise explain --schedule --strategy all --ranks 8 --micro-batches 32 \\
      --lengths pretrain-128k --context-tokens 131072 --policy by-work
  equipoise explain --schedule --lengths 6000,300,512,64,1024 --micro-batches 5 \\
      --policy divided-in-time
  equipoise explain --schedule run.toml --ranks 2 --strategy auto --most-held 1.5

  equipoise explain --boxing "S(0), P -> B, S(1)" --mesh 2x4 --shape 4096x4096
  equipoise explain --boxing "P, P -> B, B" --mesh 4x8 --cluster h100-sxm:32
  equipoise explain --boxing "S(0: 3+0+5) -> S(1)" --mesh 3 --shape 8x6 --json

  equipoise explain --plan plans/70b/plan.lock       why this layout and not the next three
  equipoise explain --plan runs/demo/plan.lock       likewise, beside what the run measured
"""

_OWN = {
    "--attention": ("sharding", "mask", "ranks_per_node", "link_in_node"),
    "--schedule": (
        "chunks",
        "micro_batches",
        "policy",
        "arranged",
        "skip",
        "most_held",
        "memory",
        "trace",
    ),
    "--boxing": ("mesh", "shape", "cluster"),
    "--attention and --schedule": (
        "run_toml",
        "name",
        "overrides",
        "strategy",
        "lengths",
        "context_tokens",
        "ranks",
        "model",
        "tflop_per_s",
        "text",
        "plot",
    ),
}
"""What goes with what alone."""

_SPEED, _LINK = 400.0, "10:50"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--attention", action="store_true", help="explain the schedule of attention"
    )
    parser.add_argument(
        "--schedule", action="store_true", help="explain the schedule of a pipeline's step"
    )
    parser.add_argument(
        "--boxing",
        metavar="FROM->TO",
        help="explain how a tensor is redistributed over a mesh, from placements to others: for "
        "each axis, outermost first, S(dim) split, S(dim: 3+1) split unevenly, B broadcast, P or "
        "P(max) partial",
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="explain a plan.lock of equipoise plan"
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        help="all, or one. Of attention, what moves: all-gather, needed-kv, ring, double-ring, "
        "pass-q, token-ring, ulysses, usp, rsa (a ring over contiguous shares) (default: the "
        "run's, else needed-kv). Of a pipeline, the order: gpipe, 1f1b, interleaved, zb-h1, zb-h2, "
        "interleaved-zb, zb-v, dualpipe-v, v-half, v-min, auto, and skip-partial and "
        "skip-reordered, which train another model (default: 1f1b)",
    )
    parser.add_argument(
        "--lengths",
        metavar="LIST|NAME|FILE",
        help="documents, as in 3000,40,900; or as many as a window (a step of a pipeline) takes of "
        "pretrain-128k, prolong, python-stdlib, wikipedia, or of a file of lengths (default: of "
        f"the run's corpus; without a run.toml, five documents of {EXAMPLE_TOKENS:,} tokens, or "
        "one a micro-batch)",
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        metavar="N",
        help=f"pack.context_tokens (default: the run's, else {EXAMPLE_TOKENS}, of a pipeline 8192)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks that share the pack, or the layers (default: the run's layout.cp or "
        f"layout.pp, else {EXAMPLE_RANKS})",
    )
    parser.add_argument(
        "--model", metavar="NAME", help=f"model.preset (default: the run's, else {EXAMPLE_MODEL})"
    )
    parser.add_argument(
        "--dtype", choices=list(BYTES), default="bf16", help="of what travels (default: bf16)"
    )
    parser.add_argument(
        "--tflop-per-s",
        type=float,
        default=_SPEED,
        metavar="N",
        help=f"assumed speed of a rank (default: {_SPEED:g})",
    )
    parser.add_argument(
        "--link",
        default=_LINK,
        metavar="US:GB",
        help="assumed latency in us and bandwidth in GB/s between two ranks; with "
        "--ranks-per-node, of different nodes; with --boxing, one for each axis of the mesh, as in "
        f"10:50,5:450 (default: {_LINK})",
    )
    parser.add_argument("--text", action="store_true", help="print the whole schedule as text")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the schedule in time (.png, .svg or .pdf)"
    )
    _add_attention(parser.add_argument_group("of --attention alone"))
    _add_schedule(parser.add_argument_group("of --schedule alone"))
    boxing = parser.add_argument_group("of --boxing alone")
    boxing.add_argument(
        "--mesh", metavar="NxM", help="ranks along each axis, outermost first (default: 2x4)"
    )
    boxing.add_argument("--shape", metavar="NxM", help="sizes of the tensor (default: 4096x4096)")
    boxing.add_argument(
        "--cluster",
        metavar="NAME:N|FILE",
        help="whose links the axes cross, as h100-sxm:64, or a cluster.toml; instead of --link",
    )


def _add_attention(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sharding",
        metavar="NAME",
        help="who holds what: contiguous, head-tail, head-tail-document, by-work, mixed, "
        "hierarchical, auto (default: the run's, else mixed)",
    )
    group.add_argument(
        "--mask",
        metavar="MASK",
        help="causal, full, or a sliding window as in window:4096 (default: causal)",
    )
    group.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks on a node, with faster links (default: the run's, else all links alike)",
    )
    group.add_argument(
        "--link-in-node",
        metavar="US:GB",
        help="as --link, within a node (default: 10:450)",
    )


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chunks",
        type=int,
        metavar="V",
        help="stages of each rank (default: 2 where the strategy wants several, else 1)",
    )
    group.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="windows of a step, one a micro-batch (default: the run's pack.step_tokens; 8 without "
        "a run.toml)",
    )
    group.add_argument(
        "--policy",
        metavar="NAME",
        help="pack.policy, which makes the micro-batches; divided-in-time cuts a document into "
        "slices for several (default: the run's, else by-work)",
    )
    group.add_argument(
        "--arranged",
        action="store_true",
        help="let micro-batches enter light ones first and last, instead of as they are packed",
    )
    group.add_argument(
        "--skip",
        type=float,
        metavar="SHARE",
        help="share of the inner stages that each micro-batch leaves out, of skip-partial and "
        "skip-reordered (default: 0.25)",
    )
    group.add_argument(
        "--most-held",
        type=float,
        metavar="N",
        help="activations that a rank may hold, in mean micro-batches (default: no bound; of auto, "
        "1f1b's for the largest micro-batch)",
    )
    group.add_argument(
        "--memory", type=float, metavar="GIB", help="the same in GiB, as activations are counted"
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the predicted step as a trace for https://ui.perfetto.dev (.json)",
    )


def run(args: argparse.Namespace) -> int:
    """Explain attention, a pipeline or a redistribution."""
    asked = {
        "--attention": args.attention,
        "--schedule": args.schedule,
        "--boxing": args.boxing is not None,
    }
    if args.plan is not None and not any(asked.values()):
        from equipoise.cli.explain.plan import explain_plan

        explain_plan(args.plan, is_json=args.json, is_quiet=args.quiet)
        return 0
    if sum(asked.values()) != 1 or args.plan is not None:
        what = "one of them" if any(asked.values()) else "what to explain"
        raise SpecError(
            f"equipoise explain: say {what}: --attention, for ranks that share attention, "
            f"--schedule, for the stages of a pipeline, --boxing, for a tensor's placements, or "
            f"--plan, for why a plan.lock says what it says."
        )
    _judge(args, next(flag for flag, is_asked in asked.items() if is_asked))
    if args.attention:
        from equipoise.cli.explain.attention import explain_attention

        explain_attention(args)
    elif args.boxing is not None:
        from equipoise.cli.explain.boxing import explain_boxing

        explain_boxing(args)
    else:
        from equipoise.cli.explain.pipeline import explain_pipeline

        explain_pipeline(args)
    return 0


def _judge(args: argparse.Namespace, asked: str) -> None:
    if args.cluster is not None and args.link != _LINK:
        raise SpecError(
            f"--link {args.link} and --cluster {args.cluster}: both say what links there are. Give "
            f"one of them."
        )
    unset = {"tflop_per_s": _SPEED, "overrides": []}
    for other, flags in _OWN.items():
        for flag in flags if asked not in other else ():
            if getattr(args, flag) not in (None, False, unset.get(flag)):
                name = {"run_toml": "A run.toml", "overrides": "A key of a run.toml"}.get(
                    flag, f"--{flag.replace('_', '-')}"
                )
                raise SpecError(f"{name} goes with {other}, not with {asked}. Leave it out.")
    require_counts(
        args,
        {
            "ranks": MOST_SHARING,
            "ranks_per_node": MOST_SHARING,
            "context_tokens": MOST_SIZE,
            "chunks": MOST_SHARING,
            "micro_batches": MOST_MICRO_BATCHES,
        },
    )
    for flag, what in (("plot", "picture"), ("trace", "trace")):
        require_kind(flag, getattr(args, flag), what)
        require_folder_of(flag, getattr(args, flag))
