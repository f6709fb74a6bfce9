"""What ``equipoise simulate --explain`` prints: how sure a step's time is, and of what."""

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns
from equipoise.sim.answer import StepAnswer


def print_interval(answer: StepAnswer) -> None:
    """What each curve adds to the step and to its interval."""
    console, sure = make_console(), answer.interval
    if sure is None:
        console.print(
            "No interval: steps of this machine are priced from its own curves. equipoise "
            "calibrate says how sure each of them is.",
            soft_wrap=True,
        )
        return
    console.print("What makes the step's time unsure, largest first:")
    columns = (
        Column("curve", is_left=True),
        Column("seconds"),
        Column("share"),
        Column("+-"),
        Column("what it priced", is_left=True, wraps=20),
    )
    rows = [
        (
            each.curve,
            format_seconds(each.seconds),
            f"{each.seconds / sure.step_s:.1%}",
            format_seconds(each.spread_s),
            ", ".join(each.terms),
        )
        for each in sure.spreads
    ]
    print_columns(console, columns, rows, box=None, pad_edge=False)
    console.print(
        "+- is one spread of the curve on published steps; waiting for other stages counts as what "
        "they compute.",
        soft_wrap=True,
    )
