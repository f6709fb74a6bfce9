"""What ``equipoise simulate --requests`` prints of nano-batches: the gain, and the order found."""

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.schedule.nano.graph import NanoGraph
from equipoise.schedule.nano.schedule import NanoSchedule
from equipoise.sim.serve.nano import LANES, NanoForecast

_COLUMNS = 64


def print_nano(forecast: NanoForecast) -> None:
    """One sentence, and where there is a gain a timeline of two layers."""
    console = make_console()
    console.print(forecast.words, soft_wrap=True)
    if forecast.gains:
        names = dict.fromkeys(each.name for each in forecast.graph.operations)
        legend = ", ".join(f"{_letter(name, 0)} {name}" for name in names)
        seconds = format_seconds(forecast.schedule.seconds)
        console.print(
            f"Two layers, {seconds}; capitals are one nano-batch, small letters the other: "
            f"{legend}.",
            soft_wrap=True,
        )
        for line in draw_lanes(forecast.graph, forecast.schedule):
            console.print(line, soft_wrap=True, highlight=False)


def draw_lanes(graph: NanoGraph, schedule: NanoSchedule, columns: int = _COLUMNS) -> list[str]:
    """A line for each resource: the first letter of what it does at each moment, or a dot."""
    rows = {name: ["."] * columns for name in LANES}
    for step in schedule.steps:
        each = graph.operations[step.operation]
        begin, end = (round(columns * at / schedule.seconds) for at in (step.begin_s, step.end_s))
        for column in range(begin, end):
            rows[each.resource][column] = _letter(each.name, each.batch)
    used = {each.resource for each in graph.operations}
    return [f"{name:<8} {''.join(cells)}" for name, cells in rows.items() if name in used]


def _letter(name: str, batch: int) -> str:
    return name[0].lower() if batch else name[0].upper()
