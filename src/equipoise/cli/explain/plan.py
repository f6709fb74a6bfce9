"""``equipoise explain plan``: why a plan.lock says what it says, term beside term.

What it decides
    A lock in the folder of a run that obeyed it is a record: it is shown beside what the run
    measured, whatever has changed since. Any other lock is refused where it is stale.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.units import GIB
from equipoise.cli.console import make_console
from equipoise.cli.step_arguments import add_sources_argument
from equipoise.cli.table import Column, print_columns

if TYPE_CHECKING:
    from equipoise.dash.planned import Planned
    from equipoise.spec.plan import Plan

HELP = "show why a plan.lock says what it says, and what was measured of it"

EXAMPLES = """\
examples:
  equipoise explain plan plans/70b/plan.lock         why this layout and not the next three
  equipoise explain plan runs/demo/plan.lock         likewise, beside what the run measured
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "file", type=Path, metavar="plan.lock", help="a plan.lock of equipoise plan"
    )
    add_sources_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print a plan and its terms.

    Raises:
        PlanError: the file is not a plan, of another version, or stale.
    """
    from equipoise.cli.show import print_interval, print_plan, print_sources
    from equipoise.dash.planned import planned_sentence
    from equipoise.spec.plan import read_plan, require_fresh

    file, is_quiet = args.file, args.quiet
    plan = read_plan(file)
    planned = _measured(file)
    if planned is None:
        require_fresh(plan, _read_again(plan, is_quiet=is_quiet or args.json), file)
    if args.json:
        beside = {} if planned is None else {"measured": planned.as_json()}
        sys.stdout.write(json.dumps(plan.as_row() | beside, indent=1) + "\n")
        return 0
    print_plan(plan, is_quiet=is_quiet)
    if planned is not None:
        make_console().print(planned_sentence(planned), soft_wrap=True)
    if not is_quiet:
        _print_terms(plan)
        if "interval" in plan.best.price:
            print_interval(plan.best.price)
    if planned is not None and not is_quiet:
        _print_measured(planned)
    if not is_quiet:
        print_sources(plan.best.price["extrapolated"], plan.sources, is_listed=args.sources)
    return 0


def _read_again(plan: "Plan", *, is_quiet: bool) -> dict[str, str]:
    """Digests of what the plan's words read today."""
    from equipoise.plan.described import read_digests
    from equipoise.spec.plan import RUN_TOML

    asked = plan.asked
    if RUN_TOML in asked:
        from equipoise.cli.console import make_progress
        from equipoise.plan.run import digest_asked

        return digest_asked(plan, make_progress(is_quiet))
    return read_digests(asked)


def _measured(file: Path) -> "Planned | None":
    """The run in whose folder the lock lies; None where it lies in none, or none obeyed it."""
    from equipoise.dash.planned import read_planned
    from equipoise.observe.reader import read_run

    if not (file.parent / "journal").is_dir():
        return None
    return read_planned(read_run(file.parent))


def _print_measured(planned: "Planned") -> None:
    """Seconds of a step and its parts, and GiB, planned beside measured."""
    median = f"median of {planned.steps:,} steps"
    columns = (
        Column(median, is_left=True, wraps=12),
        Column("planned"),
        Column("measured"),
        Column("plan"),
    )
    quantities = [(each, 1.0, " s") for each in (planned.step_s, *planned.parts)]
    rows = []
    for each, unit, suffix in (*quantities, (planned.memory_bytes, float(GIB), " GiB")):
        is_known = not math.isnan(each.measured)
        rows.append(
            (
                each.name,
                f"{each.planned / unit:.3f}{suffix}",
                f"{each.measured / unit:.3f}{suffix}" if is_known else "",
                f"{each.error:+.1%}" if is_known and each.measured else "",
            )
        )
    print_columns(make_console(), columns, rows, box=None, pad_edge=False)


def _print_terms(plan: "Plan") -> None:
    """Seconds and GiB of each candidate by term."""
    every = (plan.best, *plan.runners_up)
    console = make_console()
    for key, title, digits in (
        ("terms", "seconds of the busiest rank", 3),
        ("memory", "GiB of the fullest rank", 2),
    ):
        places = (Column(str(place)) for place in range(1, len(every) + 1))
        columns = (Column(title, is_left=True, wraps=16), *places)
        rows = []
        names = dict.fromkeys(name for each in every for name in each.price[key])
        largest = {name: max(each.price[key].get(name, 0.0) for each in every) for name in names}
        for name in sorted(names, key=lambda name: -largest[name]):
            if largest[name]:
                values = [each.price[key].get(name, 0.0) for each in every]
                rows.append((name, *(_digits(value, digits) for value in values)))
        totals = [sum(each.price[key].values()) for each in every]
        rows.append(("all", *(_digits(total, digits) for total in totals)))
        print_columns(console, columns, rows, box=None, pad_edge=False)
    walls = [
        f"{wall.grows} {wall.before:,} to {wall.after:,} ({wall.memory_gib:.1f} GiB)"
        for wall in plan.wall
    ]
    if walls:
        console.print(f"Walls: {'; '.join(walls)}.", soft_wrap=True)


def _digits(value: float, digits: int) -> str:
    """A number to ``digits`` places; one that rounds to 0 is shown as below the last place.

    >>> _digits(1.25, 2), _digits(0.0003, 3), _digits(0.0, 3)
    ('1.25', '<0.001', '')
    """
    if not value:
        return ""
    least = 10.0**-digits
    return f"{value:.{digits}f}" if abs(value) >= least / 2 else f"<{least:.{digits}f}"
