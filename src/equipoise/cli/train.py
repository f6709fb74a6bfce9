"""``equipoise train``: prepare the corpus, start the ranks, resume what was begun."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.cli.console import make_progress
from equipoise.cli.run_arguments import add_run_arguments, run_from

if TYPE_CHECKING:
    from equipoise.observe.run_record import RunRecord

HELP = "train a model; the same command again resumes"

EXAMPLES = """\
examples:
  equipoise train                                    the defaults: this Python's own library
  equipoise train run.toml
  equipoise train run.toml --train.steps 500 --pack.policy in-order --out runs/plain
  equipoise plan run.toml && equipoise train run.toml --plan plan.lock
  torchrun --nproc-per-node 2 -m equipoise.train.worker runs/run
                                                     ranks under your own launcher, after
                                                     equipoise train run.toml --prepare
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder (default: runs/NAME)"
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="obey this plan.lock of equipoise plan run.toml: layout, stages, schedule, "
        "recomputation and packing are its; a key that says otherwise, or a lock of another model, "
        "corpus, machine or version, is refused",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="port where the ranks meet (default: any that is free)",
    )
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="make the token cache and the run's folder, start no rank",
    )
    parser.add_argument(
        "--no-proof",
        action="store_true",
        help="on accelerators, train without first proving that this layout equals one rank on "
        "them (seconds, once for each kind of device, version and layout)",
    )


def run(args: argparse.Namespace) -> int:
    """Train, or resume."""
    resolved, is_quiet = run_from(args), args.quiet or args.json
    from equipoise.train import request

    given = {"out": args.out, "plan": args.plan, "port": args.port, "is_quiet": is_quiet}
    given["progress"] = make_progress(is_quiet)
    made: RunRecord | request.Prepared
    if args.prepare:
        made = request.prepare(resolved, **given)
    else:
        made = request.run(resolved, **given, proves=not args.no_proof)
    if not isinstance(made, request.Prepared):
        if args.json:
            sys.stdout.write(json.dumps(_last_step(made)) + "\n")
        return 0
    shown = {"run": str(made.folder), "ranks": made.ranks}
    text = (
        f"Prepared {made.folder} for {made.ranks} ranks. Start them with: torchrun "
        f"--nproc-per-node {made.ranks} -m equipoise.train.worker {made.folder}"
    )
    sys.stdout.write((json.dumps(shown) if args.json else text) + "\n")
    return 0


def _last_step(record: "RunRecord") -> dict[str, object]:
    """The run's folder and the figures of its last step."""
    has_steps = len(record.step) > 0
    return {
        "run": str(record.folder),
        "step": int(record.step[-1]) if has_steps else 0,
        "loss": float(record.loss[-1]) if has_steps else None,
    }
