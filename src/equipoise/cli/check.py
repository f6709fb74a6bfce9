"""``equipoise check``: any layout equals one rank, proven for this model."""

import argparse
import dataclasses
import json
import sys

from equipoise.base.errors import CheckError
from equipoise.cli.console import make_console
from equipoise.cli.run_arguments import add_run_arguments, run_from

HELP = "prove that every layout and packing gives one rank's loss and gradients"

EXAMPLES = """\
examples:
  equipoise check run.toml                 on 1, 2 and 3 ranks, the model scaled down
  equipoise check run.toml --ranks 4
  equipoise check run.toml --full-size     the model as it is
  equipoise check --json
"""

_KEYS = ("ranks", "zero", "policy", "context_tokens", "recompute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        metavar="N",
        help="numbers of ranks to prove (default: 1 2 3)",
    )
    parser.add_argument(
        "--full-size",
        action="store_true",
        help="do not scale the model down to 2 layers, a narrow width and 512 words",
    )


def run(args: argparse.Namespace) -> int:
    """Print a row for each case; exit code 5 when one fails."""
    from equipoise.train.check import TOLERANCE, check_layouts

    model = run_from(args).model
    if not args.full_size:
        narrow = 2 * model.heads * max(4, -(-64 // (2 * model.heads)))
        model = model.scaled(layers=min(2, model.layers), hidden=min(narrow, model.hidden))
        model = dataclasses.replace(model, vocab=min(512, model.vocab))
    verdicts = check_layouts(model, args.ranks)
    failed = [verdict for verdict in verdicts if not verdict.is_exact]
    if args.json:
        rows = [
            {key: getattr(verdict.case, key) for key in _KEYS}
            | {
                "micro_batches": verdict.micro_batches,
                "loss_error": verdict.loss_error,
                "gradient_error": verdict.gradient_error,
                "worst_parameter": verdict.worst_parameter,
                "skew": verdict.skew,
                "is_exact": verdict.is_exact,
            }
            for verdict in verdicts
        ]
        sys.stdout.write(json.dumps({"tolerance": TOLERANCE, "cases": rows}, indent=1) + "\n")
    elif not args.quiet:
        from rich.table import Table

        table = Table(title="Loss and every gradient against one rank")
        for name in ("ranks", "zero", "packing", "window", "recompute", "micro-batches"):
            table.add_column(name, justify="right" if name != "packing" else "left")
        for name in ("loss error", "gradient error", "worst parameter", ""):
            table.add_column(name)
        for verdict in verdicts:
            case = verdict.case
            table.add_row(
                str(case.ranks),
                str(case.zero),
                case.policy,
                str(case.context_tokens),
                case.recompute,
                str(verdict.micro_batches),
                f"{verdict.loss_error:.1e}",
                f"{verdict.gradient_error:.1e}",
                verdict.worst_parameter,
                "exact" if verdict.is_exact else "WRONG",
            )
        make_console(args.quiet).print(table)
    if failed:
        worst = max(failed, key=lambda verdict: verdict.gradient_error)
        raise CheckError(
            f"{len(failed)} of {len(verdicts)} cases differ from one rank by more than "
            f"{TOLERANCE:g}; the worst is {worst.worst_parameter} with zero = "
            f"{worst.case.zero} on {worst.case.ranks} ranks ({worst.gradient_error:.1e}). "
            f"Please report it with the output of `equipoise check --json`."
        )
    if not args.json:
        sys.stdout.write(
            f"{len(verdicts)} cases equal one rank to {TOLERANCE:g} of each gradient's scale.\n"
        )
    return 0
