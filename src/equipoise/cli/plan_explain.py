"""``equipoise explain --plan``: why a plan.lock says what it says, term beside term."""

import json
import sys
from pathlib import Path

from equipoise.cli.console import make_console
from equipoise.cli.plan_lock import read_digests
from equipoise.cli.plan_show import print_plan, say
from equipoise.spec.plan import Plan, read_plan, require_fresh


def explain_plan(file: Path, *, is_json: bool, is_quiet: bool) -> None:
    """Print a plan and its terms.

    Raises:
        PlanError: it is none, of another version, or stale.
    """
    plan = read_plan(file)
    asked = plan.asked
    now = read_digests(asked["model"], asked["cluster"], asked.get("lengths"))
    require_fresh(plan, now, file)
    if is_json:
        sys.stdout.write(json.dumps(plan.as_row(), indent=1) + "\n")
        return
    print_plan(plan, is_quiet=is_quiet)
    if not is_quiet:
        _print_terms(plan)


def _print_terms(plan: Plan) -> None:
    """Seconds and GiB of each candidate by term."""
    from rich.table import Table

    every = (plan.best, *plan.runners_up)
    console = make_console()
    for key, title, form in (
        ("terms", "seconds of the busiest rank", "{:.3f}"),
        ("memory", "GiB of the fullest rank", "{:.2f}"),
    ):
        table = Table(box=None, pad_edge=False)
        table.add_column(title)
        for place in range(1, len(every) + 1):
            table.add_column(str(place), justify="right")
        names = dict.fromkeys(name for each in every for name in each.price[key])
        largest = {name: max(each.price[key].get(name, 0.0) for each in every) for name in names}
        for name in sorted(names, key=lambda name: -largest[name]):
            values = [each.price[key].get(name, 0.0) for each in every]
            table.add_row(name, *(form.format(value) if value else "" for value in values))
        table.add_row("all", *(form.format(sum(each.price[key].values())) for each in every))
        console.print(table)
    for place, each in enumerate(every, start=1):
        console.print(f"{place}  {say(each)}", soft_wrap=True)
    walls = [
        f"{wall.grows} {wall.before:,} to {wall.after:,} ({wall.memory_gib:.1f} GiB)"
        for wall in plan.wall
    ]
    if walls:
        console.print(f"Walls: {'; '.join(walls)}.", soft_wrap=True)
