"""``equipoise pack``: what a corpus's lengths do to a plain pack, and what each policy does."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import real_path
from equipoise.cli.console import make_progress
from equipoise.cli.counts import MOST_MICRO_BATCHES, MOST_SHARING, MOST_STEPS, require_counts
from equipoise.cli.lengths import DocumentLengths, document_lengths
from equipoise.cli.recommend.pack import pack_recommend
from equipoise.cli.run_arguments import add_run_arguments, asks_recommender, run_from
from equipoise.cli.written import require_folder_of, require_kind
from equipoise.spec.catalog import POLICIES
from equipoise.spec.limits import MOST_SIZE

if TYPE_CHECKING:
    from equipoise.balance.packing.evaluate import PackedRecord, Setting
    from equipoise.cli.pack.items import ItemScore
    from equipoise.cost.curve import LoadCurve
    from equipoise.spec.run.resolve import ResolvedRun

HELP = "show how evenly each policy would pack a corpus; needs no torch"

EXAMPLES = """\
examples:
  equipoise pack                                     this Python's library, every policy
  equipoise pack run.toml --policy by-work
  equipoise pack --lengths pretrain-128k --micro-batches 16 --context-tokens 131072
  equipoise pack --lengths wikipedia --micro-batches 8 --ranks 4 --model llama3-8b
  equipoise pack --lengths my-lengths.csv --micro-batches 4 --cost tokens+pairs:28000 --json
  equipoise pack recipes/recommend/run.toml          a recommender: how evenly placements share its
                                                     batches' lookups over ranks
  equipoise pack --lengths prolong --micro-batches 4 --plot packs.png --out packs.jsonl
"""

_SLOW = [name for name, traits in POLICIES.items() if traits.is_slow]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--lengths",
        metavar="LIST|NAME|FILE",
        help="document lengths instead of the corpus: a list as in 3000,40,900; pretrain-128k, "
        "prolong, python-stdlib, wikipedia; or a file with one length a row (CSV, Parquet, JSON "
        "lines, text)",
    )
    parser.add_argument(
        "--policy",
        default="all",
        metavar="NAME",
        help=f"one policy, or all but {' and '.join(_SLOW)}, which are slow (default: all)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="compare N micro-batches a step, of one window each "
        "(default: the run's data-parallel ranks, over its steps)",
    )
    parser.add_argument("--context-tokens", type=int, metavar="N", help="pack.context_tokens")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="pack.max_tokens")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="context-parallel ranks that share each micro-batch (default: 1)",
    )
    parser.add_argument("--model", metavar="NAME", help="model.preset, whose FLOP are counted")
    parser.add_argument(
        "--cost",
        default="flop",
        metavar="COST",
        help='"flop" counts the model\'s; "tokens+pairs:S" lets attention cost as much as the '
        "linear layers at a length of S tokens (default: flop)",
    )
    parser.add_argument(
        "--steps", type=int, default=50, metavar="N", help="steps to pack (default: 50)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw each policy's loads (.png, .svg or .pdf)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the packs, one JSON line a micro-batch"
    )


def run(args: argparse.Namespace) -> int:
    """Print one row for each policy; of a recommender, for each placement of its tables."""
    if asks_recommender(args):
        require_counts(args, {"steps": MOST_STEPS})
        return pack_recommend(args, add_arguments)
    from equipoise import balance
    from equipoise.cli.pack.table import print_table, score_rows, write_packs

    policies = _policies(args.policy)
    _judge(args)
    for flag, key in (
        ("context_tokens", "pack.context_tokens"),
        ("max_tokens", "pack.max_tokens"),
        ("model", "model.preset"),
    ):
        if getattr(args, flag) is not None:
            args.overrides.append((key, str(getattr(args, flag))))
    is_window = 2 <= (args.context_tokens or 0) <= MOST_SIZE  # any other is refused by itself
    if is_window and args.micro_batches is not None:
        step_tokens = args.context_tokens * args.micro_batches
        args.overrides.append(("pack.step_tokens", str(step_tokens)))
    resolved = run_from(args)
    pack = resolved.spec.pack
    step_tokens = pack.step_tokens
    if args.micro_batches is not None:
        step_tokens = args.micro_batches * pack.context_tokens
    curve = _curve(args.cost, resolved)
    documents = document_lengths(
        args.lengths,
        resolved,
        least_tokens=args.steps * step_tokens,
        is_quiet=args.quiet or args.json,
    )
    lengths, origin = documents.tokens, documents.origin
    setting = _setting(args, resolved, documents, curve)
    progress = make_progress(args.quiet or args.json)
    progress.start("pack", len(policies))
    packed = []
    for policy in policies:
        packed.append(balance.pack(setting, policy=policy))
        progress.advance()
    progress.finish()
    scores, steps = [each.score for each in packed], [each.steps for each in packed]
    encoded = _encoded(resolved, documents, steps)
    if args.out is not None:
        write_packs(args.out, steps)
    if args.plot is not None:
        from equipoise.dash.pack_plot import plot_packs

        plot_packs(args.plot, steps, setting, origin)
    if args.json:
        import json

        rows = [
            row | ({} if each is None else {"encoders": dataclasses.asdict(each)})
            for row, each in zip(score_rows(scores), encoded, strict=True)
        ]
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    elif not args.quiet:
        print_table(scores, setting, lengths, origin)
        if args.lengths is None:
            from equipoise.data.reading import describe_reading, read_sources

            name = origin.partition(" (")[0]
            sources = read_sources(resolved.spec, name, lengths, documents.mixture)
            for line in describe_reading(resolved.spec, sources):
                sys.stdout.write(f"{line}\n")
        for sentence in dict.fromkeys(str(each) for each in encoded if each is not None):
            sys.stdout.write(f"{sentence}\n")
        for file in (args.out, args.plot):
            if file is not None:
                sys.stdout.write(f"{file}\n")
    return 0


def _encoded(
    resolved: "ResolvedRun",
    documents: DocumentLengths,
    steps: "Sequence[Sequence[PackedRecord]]",
) -> "list[ItemScore | None]":
    """How evenly images and sound are encoded under each policy; None without any."""
    items = documents.items
    if items is None or not resolved.spec.encoders:
        return [None] * len(steps)
    from equipoise.cli.pack.items import score_items
    from equipoise.observe.machine import own_ranks

    ranks = resolved.spec.layout.count_ranks(own_ranks())
    return [score_items(each, items, len(documents.tokens), resolved, ranks) for each in steps]


def _policies(wanted: str) -> list[str]:
    if wanted == "all":
        return [name for name in POLICIES if name not in _SLOW]
    if wanted not in POLICIES:
        raise SpecError(
            f'--policy: "{wanted}" is not one of all, {", ".join(POLICIES)}. Nearest: '
            f'"{nearest(wanted, POLICIES)}".'
        )
    return [wanted]


def _judge(args: argparse.Namespace) -> None:
    require_counts(
        args,
        {"ranks": MOST_SHARING, "steps": MOST_STEPS, "micro_batches": MOST_MICRO_BATCHES},
    )
    require_kind("plot", args.plot, "picture")
    for flag in ("plot", "out"):
        require_folder_of(flag, getattr(args, flag))
    for read, what in (
        (args.run_toml, "run.toml that is"),
        (args.lengths, "file of lengths that is"),
    ):
        if args.out is not None and read and real_path(args.out) == real_path(Path(read)):
            raise SpecError(f"--out {args.out} is the {what} read. Give another file.")


def _curve(cost: str, resolved: "ResolvedRun") -> "LoadCurve":
    from equipoise.cost.curve import break_even_curve, counted_curve

    if cost == "flop":
        return counted_curve(resolved.model)
    name, _, length = cost.partition(":")
    try:
        break_even_tokens = float(length.replace("_", ""))
    except ValueError:
        break_even_tokens = float("nan")
    if name != "tokens+pairs" or break_even_tokens != break_even_tokens:  # not a number
        raise SpecError(
            f'--cost: "{cost}" is neither "flop" nor "tokens+pairs:S" with a length S in tokens, '
            f"as in tokens+pairs:28000."
        )
    return break_even_curve(break_even_tokens)


def _setting(
    args: argparse.Namespace,
    resolved: "ResolvedRun",
    documents: "DocumentLengths",
    curve: "LoadCurve",
) -> "Setting":
    from equipoise.balance.packing.evaluate import Setting
    from equipoise.cost.work import kv_bytes_per_token
    from equipoise.data.mixture import open_stream
    from equipoise.observe.machine import own_ranks

    pack, layout = resolved.spec.pack, resolved.spec.layout
    ranks = layout.count_ranks(own_ranks())
    data_ranks = ranks // layout.sharing
    if data_ranks > MOST_MICRO_BATCHES:
        raise SpecError(
            f"layout.dp = {data_ranks:,} is more than {MOST_MICRO_BATCHES:,} ranks to pack for. "
            "Give a smaller layout.dp, or --micro-batches."
        )
    if args.micro_batches is not None:
        pack = dataclasses.replace(pack, step_tokens=args.micro_batches * pack.context_tokens)
    seed = resolved.spec.train.seed
    stream = open_stream(
        documents.tokens,
        seed=seed,
        context_tokens=pack.context_tokens,
        mixture=documents.mixture,
        whole=resolved.spec.data.whole if args.lengths is None else (),
    )
    return Setting(
        steps=[stream.step(i * pack.step_tokens, pack.step_tokens) for i in range(args.steps)],
        pack=pack,
        bins=args.micro_batches or data_ranks,
        curve=curve,
        is_pipeline=args.micro_batches is not None,
        context_ranks=args.ranks,
        kv_bytes_per_token=kv_bytes_per_token(resolved.model) * resolved.model.layers,
        meets_each_turn=layout.of_ranks(ranks).meets_each_turn,
    )
