"""``equipoise train``: prepare the corpus, start the ranks, resume what was begun."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.cli.console import make_progress
from equipoise.cli.run_arguments import add_run_arguments, run_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.observe.run_record import RunRecord
    from equipoise.train.request import Prepared

HELP = "train a model; the same command again resumes"

EXAMPLES = """\
examples:
  equipoise train                                    the defaults: this Python's own library
  equipoise train run.toml
  equipoise train run.toml --train.steps 500 --pack.policy in-order --out runs/plain
  equipoise train run.toml --compare in-order,divided
                                                     every step under both, and how much is won
  equipoise plan run.toml && equipoise train run.toml --plan plan.lock
  equipoise train recipes/recommend/run.toml --layout.dp 2
                                                     a recommender: model.kind = "recommend"
  torchrun --nproc-per-node 2 -m equipoise.train.worker runs/run
                                                     ranks under your own launcher, after
                                                     equipoise train run.toml --prepare
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--out", type=_folder, metavar="DIR", help="the run's folder (default: runs/NAME)"
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
        "--compare",
        type=_policies,
        metavar="POLICIES",
        help="compute every step under each of these packing policies, one after the other, and "
        "update once: their times compare step by step; needs pack.cut = windows",
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


def _policies(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _folder(text: str) -> Path:
    """A folder by name; an empty one, as of an unset variable, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError('"" is not a folder')
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Train, or resume."""
    from equipoise.spec.recommend import is_recommend

    if is_recommend(args.run_toml, args.overrides):
        return _run_recommend(args)
    resolved, is_quiet = run_from(args), args.quiet or args.json
    from equipoise.train import request

    common = {
        "out": args.out,
        "port": args.port,
        "is_quiet": is_quiet,
        "progress": make_progress(is_quiet),
    }
    if args.prepare:
        prepared = request.prepare(resolved, plan=args.plan, policies=args.compare or (), **common)
        _show_prepared(prepared, is_json=args.json)
    elif args.compare is not None:
        request.require_no_plan(args.plan)
        proves = not args.no_proof
        _show_sides(request.compare(resolved, args.compare, **common, proves=proves), args)
    else:
        record = request.run(resolved, plan=args.plan, **common, proves=not args.no_proof)
        if args.json:
            sys.stdout.write(json.dumps(_last_step(record)) + "\n")
    return 0


def _run_recommend(args: argparse.Namespace) -> int:
    """A recommender: its own keys, and none of the flags that are about tokens."""
    from equipoise.spec.recommend import read_recommend

    flags = {"--plan": args.plan, "--compare": args.compare, "--port": args.port}
    flags |= {"--prepare": args.prepare, "--no-proof": args.no_proof}
    if given := [flag for flag, value in flags.items() if value]:
        raise SpecError(
            f'{", ".join(given)}: not for a run with model.kind = "recommend". Leave it out.'
        )
    named = [] if args.name is None else [("name", args.name)]
    spec, base = read_recommend(args.run_toml, [*args.overrides, *named])
    from equipoise.recsys import request

    is_quiet = args.quiet or args.json
    record = request.run(spec, base, out=args.out, is_quiet=is_quiet)
    if args.json:
        shown = {name: record[name] for name in ("run", "step", "best", "traffic")}
        sys.stdout.write(json.dumps(shown) + "\n")
    elif not is_quiet:
        sys.stdout.write(f"equipoise report {record['run']} shows tables and traffic.\n")
    return 0


def _show_prepared(made: "Prepared", *, is_json: bool) -> None:
    """Where the run lies, and how its ranks are started."""
    shown = {"run": str(made.folder), "ranks": made.ranks}
    text = (
        f"Prepared {made.folder} for {made.ranks} ranks. Start them with: torchrun "
        f"--nproc-per-node {made.ranks} -m equipoise.train.worker {made.folder}"
    )
    sys.stdout.write((json.dumps(shown) if is_json else text) + "\n")


def _show_sides(records: "Sequence[RunRecord]", args: argparse.Namespace) -> None:
    """What each policy took beside the first, or beside in-order."""
    from equipoise.dash.compare import compare_all
    from equipoise.dash.summary import labels
    from equipoise.dash.verdict import tell, tell_spread

    comparisons = compare_all(records, labels(records))
    if args.json:
        shown = _last_step(records[0]) | {
            "run": str(records[0].folder.parent),
            "comparisons": [each.as_json() for each in comparisons],
        }
        sys.stdout.write(json.dumps(shown) + "\n")
    elif not args.quiet:
        for each in comparisons:
            if each.steps:
                sys.stdout.write(f"{tell(each)}\n{tell_spread(each)}".rstrip() + "\n")


def _last_step(record: "RunRecord") -> dict[str, object]:
    """The run's folder and the figures of its last step."""
    has_steps = len(record.step) > 0
    return {
        "run": str(record.folder),
        "step": int(record.step[-1]) if has_steps else 0,
        "loss": float(record.loss[-1]) if has_steps else None,
    }
