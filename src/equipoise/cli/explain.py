"""``equipoise explain``: who holds, sends and computes what, drawn before anything runs."""

import argparse
import sys
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.cli.explain_setting import (
    BYTES,
    EXAMPLE_MODEL,
    EXAMPLE_RANKS,
    EXAMPLE_TOKENS,
    RSA,
    score_strategy,
    setting_from,
)
from equipoise.cli.run_arguments import add_run_arguments

HELP = "draw what ranks that share attention send and compute, and when; needs no torch"

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
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--attention", action="store_true", help="explain the schedule of attention"
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        help="what moves: all-gather, needed-kv, ring, double-ring, pass-q, token-ring, ulysses, "
        "usp, rsa (a ring over contiguous shares), or all (default: the run's, else needed-kv)",
    )
    parser.add_argument(
        "--sharding",
        metavar="NAME",
        help="who holds what: contiguous, head-tail, head-tail-document, by-work, mixed, "
        "hierarchical, auto (default: the run's, else mixed)",
    )
    parser.add_argument(
        "--lengths",
        metavar="LIST|NAME|FILE",
        help="the documents of one pack, as in 3000,40,900; or one window of pretrain-128k, "
        "prolong, python-stdlib, wikipedia, or of a file of lengths (default: one window of the "
        f"run's corpus; without a run.toml, five documents of {EXAMPLE_TOKENS:,} tokens)",
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        metavar="N",
        help=f"pack.context_tokens (default: the run's, else {EXAMPLE_TOKENS})",
    )
    parser.add_argument(
        "--mask",
        default="causal",
        metavar="MASK",
        help="causal, full, or a sliding window as in window:4096 (default: causal)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"ranks that share the pack (default: the run's layout.context, else {EXAMPLE_RANKS})",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks on a node, with faster links (default: the run's, else all links alike)",
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
        default=400.0,
        metavar="N",
        help="assumed speed of a rank's attention (default: 400)",
    )
    parser.add_argument(
        "--link",
        default="10:50",
        metavar="US:GB",
        help="assumed latency in us and bandwidth in GB/s between two ranks; with "
        "--ranks-per-node, of different nodes (default: 10:50)",
    )
    parser.add_argument(
        "--link-in-node",
        default="10:450",
        metavar="US:GB",
        help="the same within a node (default: 10:450)",
    )
    parser.add_argument("--text", action="store_true", help="print the whole schedule as text")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw tiles and time (.png, .svg or .pdf)"
    )


def run(args: argparse.Namespace) -> int:
    """Explain one strategy, or compare all."""
    from equipoise.cli.explain_rows import explain_rows
    from equipoise.cli.explain_show import print_all, print_lines, print_one

    if not args.attention:
        raise SpecError(
            "equipoise explain: say what to explain. --attention explains the schedule of "
            "attention over several ranks."
        )
    _judge(args)
    setting = setting_from(args)
    names = _names(setting.strategy)
    scores = [score_strategy(name, setting) for name in names]
    if args.plot is not None:
        from equipoise.dash.attention_plot import plot_attention

        plot_attention(args.plot, scores, setting.machine, setting.origin)
    if args.json:
        import json

        sys.stdout.write(json.dumps(explain_rows(scores, setting), separators=(",", ":")) + "\n")
        return 0
    if args.text:
        sys.stdout.write("\n\n".join(str(score.schedule) for score in scores) + "\n")
    elif args.quiet:
        print_lines(scores)
    elif len(scores) == 1:
        print_one(scores[0], setting)
    else:
        print_all(scores, setting)
    if args.plot is not None and not args.quiet:
        sys.stdout.write(f"{args.plot}\n")
    return 0


def _names(wanted: str) -> list[str]:
    from equipoise.schedule.attention_strategies import STRATEGIES

    names = [*STRATEGIES, RSA]
    if wanted == "all":
        return names
    if wanted not in names:
        raise SpecError(
            f'--strategy: "{wanted}" is not one of all, {", ".join(names)}. Nearest: '
            f'"{nearest(wanted, names)}".'
        )
    return [wanted]


def _judge(args: argparse.Namespace) -> None:
    if args.strategy is not None:
        _names(args.strategy)
    for flag in ("ranks", "ranks_per_node", "context_tokens"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise SpecError(f"--{flag.replace('_', '-')} {value} is below 1. Give 1 or more.")
    if args.strategy == RSA and args.sharding not in (None, "contiguous"):
        raise SpecError(
            f"--strategy {RSA} is the ring over contiguous shares, and --sharding says "
            f'"{args.sharding}". Say --strategy ring.'
        )
    file: Path | None = args.plot
    if file is not None and file.suffix not in (".png", ".svg", ".pdf"):
        raise SpecError(
            f"--plot {file}: a picture's name ends in .png, .svg or .pdf, not "
            f'"{file.suffix}". Try {file.with_suffix(".png")}.'
        )
    if file is not None and not file.parent.is_dir():
        raise SpecError(f"--plot {file}: there is no folder {file.parent}. Create it first.")
