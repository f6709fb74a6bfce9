"""``equipoise trace``: steps of a run for Perfetto, predicted beneath measured."""

import argparse
import json
import sys
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.base.whole import whole_number
from equipoise.cli.written import require_not_of_run

HELP = "write steps of a run as a trace for Perfetto, predicted beneath measured"

EXAMPLES = """\
examples:
  equipoise trace runs/by-work                     the step of median duration
  equipoise trace runs/by-work --steps 3-5
  equipoise trace runs/by-work --steps 12 --out step.json
  equipoise trace runs/run                         of a run of train --compare: all its sides

Open the file at https://ui.perfetto.dev or chrome://tracing. Instructions of a pipeline are named
as equipoise explain pipeline names them: 1F3 is the forward of micro-batch 3 on stage 1, I and W
are the halves of a backward, B is a whole one.

--json prints {"trace", "run", "steps"}.
"""

_MOST_STEPS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run (holds journal/)")
    parser.add_argument("--steps", metavar="N[-M]", help="a step, or the first and last of several")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the trace to write (default: trace/step-NNNNNN.json in the run's folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the trace and say where it is."""
    from equipoise.dash.trace import typical_step, write_run_trace
    from equipoise.observe.reader import read_sides

    require_not_of_run("out", args.out, args.run)
    sides = read_sides(args.run)
    for side in sides:
        if side.missing_ranks:
            sys.stderr.write(f"{side.missing_sentence}\n")
    steps = _steps(args.steps) if args.steps else [typical_step(sides[-1])]
    out: Path = args.out or args.run / "trace" / f"step-{steps[0]:06d}.json"
    write_run_trace(sides, steps, out)
    if args.json:
        row = {"trace": str(out), "run": str(args.run), "steps": steps}
        sys.stdout.write(json.dumps(row) + "\n")
    else:
        sys.stdout.write(f"{out}\n")
    return 0


def _steps(text: str) -> list[int]:
    begins, dash, ends = text.partition("-")
    first = whole_number(begins)
    last = whole_number(ends) if dash else first
    if first is None or last is None or first > last:
        raise SpecError(f'--steps "{text}" is not a step, as in 12, or a range, as in 3-5.')
    if last - first >= _MOST_STEPS:
        raise SpecError(
            f'--steps "{text}" is {last - first + 1:,} steps, which no browser shows. Give at most '
            f"{_MOST_STEPS:,}."
        )
    return list(range(first, last + 1))
