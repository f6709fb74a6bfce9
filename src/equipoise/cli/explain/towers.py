"""``equipoise explain towers``: which columns of a recommender belong in one tower."""

import argparse
import json
import statistics
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.cli.console import make_console
from equipoise.cli.counts import require_counts
from equipoise.cli.explain import asked
from equipoise.cli.run_arguments import add_run_arguments, asks_recommender
from equipoise.cli.table import Column, print_columns
from equipoise.spec.limits import MOST_SIZE

if TYPE_CHECKING:
    from equipoise.recsys.towers.probe import TowerAdvice

HELP = "show which columns of a recommender belong in one tower, after an epoch of it"

EXAMPLES = """\
examples:
  equipoise explain towers recipes/recommend/run.toml --towers 2
  equipoise explain towers run.toml --towers 4 --goal diverse --json

It prints the line for run.toml. --json prints {"towers": [[...]], "loads", "likeness",
"random_likeness"}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument("--towers", type=int, default=2, metavar="N", help="how many (default: 2)")
    parser.add_argument(
        "--goal",
        default="coherent",
        metavar="NAME",
        help="coherent: columns of a tower are alike; diverse: they differ (default: coherent)",
    )


def run(args: argparse.Namespace) -> int:
    """Train the probe, and print towers beside random ones."""
    from equipoise.balance.tables.similar import TOWER_GOALS

    require_counts(args, {"towers": MOST_SIZE})
    if args.goal not in TOWER_GOALS:
        raise SpecError(f'--goal: "{args.goal}" is not one of {", ".join(TOWER_GOALS)}.')
    if not asks_recommender(args):
        raise SpecError(
            'equipoise explain towers is for a run with model.kind = "recommend". Give its '
            "run.toml."
        )
    from equipoise.recsys.samples import read_samples
    from equipoise.recsys.towers.probe import advise_towers
    from equipoise.spec.recommend import read_recommend

    named = [] if args.name is None else [("name", args.name)]
    spec, base = read_recommend(args.run_toml, [*args.overrides, *named])
    advice = advise_towers(spec, read_samples(spec.data, base), args.towers, args.goal)
    asked.answer(
        args,
        rows=lambda: {
            "towers": [list(each) for each in advice.towers],
            "loads": list(advice.loads),
            "likeness": advice.likeness,
            "random_likeness": list(advice.random_likeness),
        },
        lines=lambda: make_console().print(_line(advice), soft_wrap=True, markup=False),
        tables=lambda: _show(advice, spec.name, args.goal),
    )
    return 0


def _line(advice: "TowerAdvice") -> str:
    return f"towers = {json.dumps([list(each) for each in advice.towers])}"


def _show(advice: "TowerAdvice", name: str, goal: str) -> None:
    console, drawn = make_console(), advice.random_likeness
    count = sum(map(len, advice.towers))
    console.print(
        f"{name}: {count} columns in {len(advice.towers)} {goal} towers, by what an epoch of this "
        f"run learns without towers. Likeness {advice.likeness:.3f}; {len(drawn)} random draws of "
        f"equal load: {statistics.mean(drawn):.3f} on average, from {min(drawn):.3f} to "
        f"{max(drawn):.3f}.",
        soft_wrap=True,
    )
    columns = [Column("tower"), Column("load / mean"), Column("columns", is_left=True)]
    rows = [
        [str(at), f"{load:.3f}", ", ".join(names)]
        for at, (names, load) in enumerate(zip(advice.towers, advice.loads, strict=True), start=1)
    ]
    print_columns(console, columns, rows)
    console.print("In run.toml, under [model]:", soft_wrap=True)
    console.print(_line(advice), soft_wrap=True, markup=False)
