"""What a price's interval is made of: for ``simulate --explain`` and ``explain plan``."""

from collections.abc import Mapping
from typing import Any

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns

NO_INTERVAL = (
    "No interval: steps of this machine are priced from its own curves. equipoise calibrate says "
    "how sure each of them is."
)


def print_interval(price: Mapping[str, Any]) -> None:
    """What each curve adds to the step and to its interval.

    Args:
        price: In the keys of ``equipoise simulate --json``.
    """
    console = make_console()
    if "interval" not in price:
        console.print(NO_INTERVAL, soft_wrap=True)
        return
    if not price["spreads"]:  # of this machine, where one spread is known of whole steps
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
            each["curve"],
            format_seconds(each["seconds"]),
            f"{each['seconds'] / price['step_s']:.1%}",
            format_seconds(each["spread_s"]),
            ", ".join(each["terms"]),
        )
        for each in price["spreads"]
    ]
    print_columns(console, columns, rows, box=None, pad_edge=False)
    console.print(
        "+- is one spread of the curve on published steps; waiting for other stages counts as what "
        "they compute.",
        soft_wrap=True,
    )
