"""``equipoise explain attention``: strategies of attention over several ranks, shown and drawn."""

import argparse
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.base.whole import whole_number
from equipoise.cli.counts import MOST_SHARING
from equipoise.cli.explain import asked
from equipoise.cli.explain.asked import EXAMPLE_MODEL, EXAMPLE_RANKS
from equipoise.cli.run_arguments import run_from
from equipoise.spec.limits import MOST_SIZE

if TYPE_CHECKING:
    from equipoise.balance.context.compare import AttentionSetting
    from equipoise.spec.mask import Mask
    from equipoise.spec.run.resolve import ResolvedRun

HELP = "show which rank holds, sends and computes what in attention over several ranks"

EXAMPLES = """\
examples:
  equipoise explain attention                        five documents, 4 ranks, needed-kv
  equipoise explain attention --strategy all         every strategy, a row each
  equipoise explain attention --strategy ring --lengths 3000,40,900 --ranks 3 --text
  equipoise explain attention --strategy all --ranks 16 --ranks-per-node 8 \\
      --lengths pretrain-128k --context-tokens 131072 --model llama3-70b
  equipoise explain attention run.toml               what the run's own layout does
  equipoise explain attention run.toml --strategy all --json
  equipoise explain attention --strategy token-ring --plot token-ring.svg
"""

_DOCUMENTS = (24_000, 320, 7_200, 1_024, 224)
_TOKENS = sum(_DOCUMENTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    asked.add_step_arguments(
        parser,
        strategies="all-gather, needed-kv, ring, double-ring, pass-q, token-ring, gather-q, "
        "ulysses, usp, rsa (a ring over contiguous shares) (default: the run's, else needed-kv)",
        documents=f"a window (default: the run's corpus; without a run.toml, five documents of "
        f"{_TOKENS:,} tokens)",
        window=_TOKENS,
        ranks="the window (default: the run's layout.cp",
    )
    parser.add_argument(
        "--sharding",
        metavar="NAME",
        help="who holds what: contiguous, head-tail, head-tail-document, by-work, mixed, "
        "hierarchical, auto (default: the run's, else mixed)",
    )
    parser.add_argument(
        "--mask",
        default="causal",
        metavar="MASK",
        help="causal, full, or a sliding window as in window:4096 (default: causal)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks on a node, with faster links (default: the run's, else all links alike)",
    )
    asked.add_link_arguments(
        parser, "between two ranks, or two nodes with --ranks-per-node", ("bf16", "fp32", "fp64")
    )
    parser.add_argument(
        "--link-in-node",
        default="10:450",
        metavar="US:GB",
        help="as --link, within a node (default: 10:450)",
    )


def run(args: argparse.Namespace) -> int:
    """Explain one strategy, or compare all."""
    from equipoise.balance.context.compare import NAMES, RSA, compare_attention
    from equipoise.cli.explain import attention_table as table
    from equipoise.cli.explain.attention_json import attention_rows

    most = {"ranks": MOST_SHARING, "ranks_per_node": MOST_SHARING, "context_tokens": MOST_SIZE}
    asked.judge(args, most, NAMES)
    if args.strategy == RSA and args.sharding not in (None, "contiguous"):
        raise SpecError(
            f"--strategy {RSA} is the ring over contiguous shares, and --sharding says "
            f'"{args.sharding}". Say --strategy ring.'
        )
    setting = _setting(args)
    scores = compare_attention(setting)
    if args.plot is not None:
        from equipoise.dash.attention_plot import plot_attention

        plot_attention(args.plot, scores, setting.machine, setting.origin)
    asked.answer(
        args,
        rows=lambda: attention_rows(scores, setting),
        lines=lambda: table.print_lines(scores),
        tables=lambda: table.print_tables(scores, setting),
        schedules=[score.schedule for score in scores],
        files=(args.plot,),
    )
    return 0


def _setting(args: argparse.Namespace) -> "AttentionSetting":
    """What the parsed arguments ask for.

    Raises:
        SpecError: a flag, or a key of the run, that is wrong.
        DataError: lengths that cannot be read.
    """
    from equipoise.balance.context.compare import NAMES, AttentionSetting
    from equipoise.balance.context.price import TILE_S
    from equipoise.balance.tiles import TILE
    from equipoise.schedule.attention.score import AssumedMachine

    run = _run(args)
    layout = run.spec.layout
    doc_tokens, origin = _documents(args, run)
    per_node, strategy = layout.ranks_per_node, args.strategy or layout.strategy
    in_node = None if per_node is None else asked.read_link("--link-in-node", args.link_in_node)
    link = asked.read_link("--link", args.link)
    return AttentionSetting(
        strategies=NAMES if strategy == "all" else (strategy,),
        sharding=layout.sharding,
        doc_tokens=doc_tokens,
        origin=origin,
        mask=_mask(args.mask),
        ranks=layout.cp,
        ranks_per_node=per_node,
        model=run.model,
        model_name=run.spec.model.preset,
        dtype=args.dtype,
        machine=AssumedMachine(
            1e12 * args.tflop_per_s, link, in_node, per_node, block=TILE, tile_s=TILE_S
        ),
    )


def _run(args: argparse.Namespace) -> "ResolvedRun":
    """The run with flags, and what stands for a run if none is given, as its keys."""
    keys, is_bare = {key for key, _ in args.overrides}, args.run_toml is None
    model, window, ranks = args.model, args.context_tokens, args.ranks
    if model is None and is_bare and not any(key.startswith("model.") for key in keys):
        model = EXAMPLE_MODEL
    if window is None and is_bare and "pack.context_tokens" not in keys:
        window = _TOKENS
    if ranks is None and is_bare and "layout.cp" not in keys:
        ranks = EXAMPLE_RANKS
    wanted = {
        "model.preset": model,
        "pack.context_tokens": window,
        "pack.step_tokens": None if "pack.step_tokens" in keys else window,
        "layout.cp": ranks,
        "layout.sharding": args.sharding,
        "layout.ranks_per_node": args.ranks_per_node,
        "layout.strategy": None if args.strategy in ("all", "rsa") else args.strategy,
        "layout.dp": None if "layout.dp" in keys else 1,
    }
    args.overrides += [(key, str(value)) for key, value in wanted.items() if value is not None]
    return run_from(args)


def _mask(text: str) -> "Mask":
    from equipoise.spec.mask import Mask

    kind, _, tokens = text.partition(":")
    if text == "causal":
        return Mask()
    if text == "full":
        return Mask("full")
    if kind == "window" and (width := whole_number(tokens)) is not None:
        return Mask("window", width)
    raise SpecError(f'--mask: "{text}" is not causal, full, or a window as in window:4096.')


def _documents(args: argparse.Namespace, run: "ResolvedRun") -> tuple[tuple[int, ...], str]:
    if args.lengths is None and not asked.asks_for_corpus(args):
        return _DOCUMENTS, "an example"
    from equipoise.spec.workload import listed_lengths

    listed = None if args.lengths is None else listed_lengths(args.lengths, least=0)
    if listed is not None:
        if not any(listed):
            raise SpecError(
                f"--lengths {args.lengths}: there is no token to attend to. Give lengths."
            )
        return listed, "--lengths"
    pieces, origin = asked.first_pieces(args, run, run.spec.pack.context_tokens, "window")
    return tuple((pieces[:, 2] - pieces[:, 1]).tolist()), origin
