"""``equipoise pack``: what a corpus's lengths do to a plain pack, and what a policy does."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

from equipoise.balance.evaluate import PackScore, score_policy
from equipoise.balance.pack import POLICIES
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.cli.console import make_console, make_progress
from equipoise.cli.run_arguments import add_run_arguments, run_from
from equipoise.cost.curve import counted_curve
from equipoise.data.stream import DocumentStream
from equipoise.spec.resolve import ResolvedRun
from equipoise.spec.workload import Lengths, distribution_names, draw_lengths, read_lengths

HELP = "show how evenly each policy would pack a corpus; needs no torch"

EXAMPLES = """\
examples:
  equipoise pack                                     this Python's library, every policy
  equipoise pack run.toml --policy by-work --ranks 8
  equipoise pack --lengths wikipedia --pack.context_tokens 32768 --pack.step_tokens 1048576
  equipoise pack --lengths my-lengths.csv --json
"""

_BYTES_PER_TOKEN = 3.3
"""Of the standard library under a byte-level BPE of 4,096 tokens trained on it (measured)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--lengths",
        metavar="NAME|FILE",
        help=f"document lengths instead of the corpus: {', '.join(distribution_names())}, or a "
        "file with one length a line (text, CSV or JSON lines)",
    )
    parser.add_argument(
        "--policy", default="all", metavar="NAME", help=f"all, {', '.join(POLICIES)}"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument(
        "--steps", type=int, default=50, metavar="N", help="steps to pack (default: 50)"
    )


def _corpus_lengths(resolved: ResolvedRun, quiet: bool) -> tuple[Lengths, str]:
    """Lengths of the run's corpus: counted where a tokenizer is installed, else from bytes."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        from equipoise.data.source import open_source

        sizes = np.array(open_source(resolved.spec.data, resolved.base).sizes_bytes)
        lengths = np.maximum(1, sizes[sizes > 0] / _BYTES_PER_TOKEN).astype(np.int64)
        return lengths, f"file sizes at {_BYTES_PER_TOKEN} bytes a token (estimated)"
    from equipoise.data.store import prepare

    store = prepare(resolved.spec.data, resolved.base, progress=make_progress(quiet))
    return store.doc_tokens, f"{store.source_name} (counted)"


def _lengths(args: argparse.Namespace, resolved: ResolvedRun) -> tuple[Lengths, str]:
    name: str | None = args.lengths
    if name is None:
        return _corpus_lengths(resolved, args.quiet or args.json)
    if name in distribution_names():
        wanted = args.steps * resolved.spec.pack.step_tokens
        documents = 4096
        lengths = draw_lengths(name, documents)
        while int(np.minimum(lengths, resolved.spec.pack.context_tokens).sum()) < wanted:
            documents *= 2
            lengths = draw_lengths(name, documents)
        return lengths, f"{name} (embedded distribution)"
    return read_lengths(Path(name)), name


def run(args: argparse.Namespace) -> int:
    """Print one row for each policy."""
    resolved = run_from(args)
    policies = [name for name in POLICIES if args.policy in ("all", name)]
    if not policies:
        raise SpecError(
            f'--policy: "{args.policy}" is not one of all, {", ".join(POLICIES)}. Nearest: '
            f'"{nearest(args.policy, POLICIES)}".'
        )
    if args.ranks < 1 or args.steps < 1:
        raise SpecError(f"--ranks {args.ranks} and --steps {args.steps} must both be 1 or more.")
    lengths, origin = _lengths(args, resolved)
    pack = resolved.spec.pack
    stream = DocumentStream(
        lengths, seed=resolved.spec.train.seed, context_tokens=pack.context_tokens
    )
    steps = [stream.step(index * pack.step_tokens, pack.step_tokens) for index in range(args.steps)]
    curve = counted_curve(resolved.model)
    scores = [score_policy(name, steps, pack, args.ranks, curve) for name in policies]
    if args.json:
        keys = [f.name for f in dataclasses.fields(PackScore) if f.name != "rank_seconds"]
        rows = [{key: getattr(score, key) for key in keys} for score in scores]
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    elif not args.quiet:
        _print(scores, lengths, origin, resolved, args.ranks)
    return 0


def _print(
    scores: list[PackScore], lengths: Lengths, origin: str, resolved: ResolvedRun, ranks: int
) -> None:
    from rich.table import Table

    console = make_console(False)
    pack = resolved.spec.pack
    middle, tail, longest = np.percentile(lengths, [50, 99, 100])
    console.print(
        f"{len(lengths):,} documents from {origin}: median {middle:,.0f} tokens, 99th "
        f"percentile {tail:,.0f}, longest {longest:,.0f}. Steps of {pack.step_tokens:,} tokens, "
        f"windows of {pack.context_tokens:,}, {ranks} ranks. Work is counted in FLOP.",
        highlight=False,
    )
    table = Table()
    for name in ("policy", "work of each rank, heaviest first"):
        table.add_column(name)
    for name in ("skew", "p95", "gap", "tokens/cap", "cuts", "plan"):
        table.add_column(name, justify="right")
    heaviest = max(score.rank_seconds[0] for score in scores)
    for score in scores:
        bars = "\n".join(
            "█" * max(1, round(28 * value / heaviest)) for value in score.rank_seconds[:8]
        )
        table.add_row(
            score.policy,
            bars,
            f"{score.skew:.3f}",
            f"{score.p95_skew:.3f}",
            f"{score.gap:+.1%}",
            f"{score.max_tokens_ratio:.2f}",
            f"{score.fragments:,}",
            f"{score.plan_s * 1e3:.2f} ms",
        )
    console.print(table)
    console.print(
        "skew: heaviest rank over mean; every other rank waits for it. gap: over the least "
        "that whole documents allow.",
        style="dim",
    )
