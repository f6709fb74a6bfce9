"""``equipoise explain --attention``: judge what is asked, score strategies, show them."""

import argparse
import sys

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.cli.explain.attention_rows import explain_rows
from equipoise.cli.explain.attention_setting import RSA, score_strategy, setting_from
from equipoise.cli.explain.attention_table import print_all, print_lines, print_one


def explain_attention(args: argparse.Namespace) -> None:
    """Explain one strategy of attention, or compare all."""
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
        return
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


def _names(wanted: str) -> list[str]:
    from equipoise.schedule.attention.strategies import STRATEGIES

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
    if args.strategy == RSA and args.sharding not in (None, "contiguous"):
        raise SpecError(
            f"--strategy {RSA} is the ring over contiguous shares, and --sharding says "
            f'"{args.sharding}". Say --strategy ring.'
        )
