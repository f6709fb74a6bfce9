"""Tables of the pages "Foresight" and "Packing policies compared", from what the benches wrote.

{foresight} goals          each goal: how near, how many rows, in which file
{foresight} peers          peers on published steps, and ours on the same rows
{foresight} collectives    peers on one node's collectives
{foresight} fresh          rows that nothing was fitted to, by source
{foresight} intervals      published steps that lie in their intervals
{foresight} plans          the planner beside published choices
{foresight} policies       gains of packing policies at WLB-LLM's configurations
{foresight} dynamic        published gains of dynamic context parallelism, and forecast ones
{foresight} here           plans of this machine as a picture, if they were measured
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import table

RESULTS = Path(__file__).parents[2] / "bench" / "results"

HERE = Path(__file__).parents[1] / "images" / "foresight" / "plans-real.svg"

Line = Sequence[str]


def read(name: str) -> Any:
    """The JSON that a bench wrote; None if it has not run."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def percent(share: float, *, signed: bool = False) -> str:
    """A share as the page prints it.

    >>> percent(0.0644), percent(-0.2858, signed=True)
    ('6.4%', '−29%')
    """
    digits = 0 if signed or abs(share) >= 0.995 else 1
    said = f"{100 * share:{'+' if signed else ''},.{digits}f}%"
    return said.replace("-", "−")


def _goals() -> tuple[Line, list[Line]]:
    bubbles, memory = read("published/bubbles"), read("published/memory")
    steps, order = read("published/throughput"), read("published/ranking")
    sure = read("published/intervals")
    table_4 = steps["table 4 of arXiv:2401.10241 from its profiled times"]["all"]
    left = steps["left-out sources"]
    name = left["worst source"][1]
    worst = [
        abs(row["error"])
        for source, rows in left["rows"].items()
        if source.startswith(name)  # llm-foundry has a line for each device
        for row in rows
    ]
    halves = read("published/collectives")["halves of the H100's NCCL points"]
    exact = max(bubbles["largest absolute error"][name] for name in ("1F1B", "ZB-H1"))
    loops = str(len(bubbles["interleaved rows"]))
    sweeps = order["sweeps by tokens per second"].values()
    ranked = str(sum(sweep["rows"] for sweep in sweeps))
    taus = order["tokens per second and device"]
    held = str(memory["all"]["rows"])
    lines = [
        ("G1: bubble rate of 1F1B, ZB-H1, largest", loops, f"{exact:.4f}", "0.0001"),
        (
            "G1: of 1F1B-I, largest, relative",
            loops,
            percent(bubbles["interleaved, largest relative error"]),
            "3%",
        ),
        (
            "G1: the same, the hop from last rank to first free",
            loops,
            percent(bubbles["interleaved, last to first free"]),
            "3%",
        ),
        (
            "G2: throughput of pipelines from profiled times",
            str(table_4["rows"]),
            percent(table_4["mape"]),
            "4%",
        ),
        ("G3: memory", held, percent(memory["all"]["mape"]), "8%"),
        ("G3: rows said to fit that did not", held, str(len(memory["false fits"])), "0"),
        (
            "G4: seconds of a step, mean of nine sources left out",
            str(left["mean over rows"]["rows"]),
            percent(left["mean over sources"]),
            "8%",
        ),
        (
            f"G4: the worst source, {name}",
            str(len(worst)),
            percent(sum(worst) / len(worst)),  # stored means are rounded already
            "12%",
        ),
        (
            "G4: rows in their intervals of 80%",
            str(sure["rows"]),
            f"{sure['inside, of all rows']:.0%}",
            "75 to 85%",
        ),
        ("G5: order within a sweep, Kendall's tau", ranked, f"{taus['tau']:.2f}", "0.8"),
        ("G5: lost by the predicted best", ranked, percent(taus["top-1 regret"]), "3%"),
        *(
            (
                f"G6: collectives, {half.replace(' fitted,', ' sizes fitted,')}",
                str(halves[half]["rows"]),
                percent(halves[half]["mape"]),
                "8%",
            )
            for half in ("even fitted, odd scored", "odd fitted, even scored")
        ),
    ]
    if (here := read("planner/real")) is not None:
        near = f"{here['within the goal']} of {here['plans']}"
        lines += [
            ("G7: real plans of two ranks within 8%", str(here["plans"]), near, "12 or more"),
            ("G7: their mean error", str(here["plans"]), percent(here["mape"]), "8%"),
            ("G7: their order, Kendall's tau", str(here["plans"]), f"{here['tau']:.2f}", "0.9"),
        ]
    return ("what is predicted", "rows", "error", "goal"), lines


_FITTED = {
    "nothing": "none",
    "two residuals, on the other sources": "2",
    "one factor, on the other sources": "1",
}
_SIZES = {"4 MiB and more": "≥ 4 MiB", "less": "< 4 MiB"}


def _peers() -> tuple[Line, list[Line]]:
    head = ("who", "fitted", "rows", "error", "worst", "ours, same rows")
    lines = []
    for each in read("peers/foresight")["steps"]["table"]:
        beside = each.get("ours, same rows")
        ours = (
            f"{percent(beside['mape'])}, {percent(beside['worst'], signed=True)}" if beside else ""
        )
        scored = (percent(each["mape"]), percent(each["worst"], signed=True))
        fitted = _FITTED[each["fitted"]]
        lines.append((each["who"], fitted, str(each["rows"]), *scored, ours))
    return head, lines


def _collectives() -> tuple[Line, list[Line]]:
    collectives = read("peers/foresight")["collectives of one node, fitted on other measurements"]
    lines = [
        (
            each["who"],
            _SIZES[each["bytes"]],
            str(each["rows"]),
            percent(each["mape"]),
            percent(each["worst"], signed=True),
        )
        for each in collectives["table"]
    ]
    return ("who", "bytes", "points", "error", "worst"), lines


def _fresh() -> tuple[Line, list[Line]]:
    known = read("published/fresh")
    lines = [
        (
            name,
            str(each["rows"]),
            percent(each["mape"]),
            percent(each["bias"], signed=True),
            percent(max((row["error"] for row in known["rows"][name]), key=abs), signed=True),
        )
        for name, each in known["sources"].items()
    ]
    return ("source", "rows", "mean error", "mean", "worst"), lines


def _intervals() -> tuple[Line, list[Line]]:
    known = read("published/intervals")
    lines = [
        (
            name,
            str(each["rows"]),
            f"{each['inside']:.0%}",
            f"± {percent(each['mean half width'])}",
        )
        for name, each in known["sources"].items()
    ]
    inside = known["inside, mean over sources"]
    lines.append(("mean over sources", "", f"{inside:.0%}", ""))
    lines.append(("all rows", str(known["rows"]), f"{known['inside, of all rows']:.0%}", ""))
    return ("source left out", "rows", "in their intervals of 80%", "mean width"), lines


def _plans() -> tuple[Line, list[Line]]:
    plans = read("planner/published")
    names = {
        "steps": "published steps",
        "in_lattice": "whose layout is in the planner's lattice",
        "at_least_as_fast": "planned at least as fast",
        "at_least_as_fast, told nothing": "of these, without any hint",
        "at_least_as_fast, told the degrees": "of these, with the published degrees fixed",
    }
    lines = [(said, str(plans[name])) for name, said in names.items()]
    lines += [
        (
            "where the answer is the published choice itself",
            str(plans["is_the_published_choice"]),
        ),
        (
            "published choices that are predicted not to fit",
            str(len(plans["published_does_not_fit"])),
        ),
        ("median step, planned over published", f"{plans['median_ratio']:.3f}"),
        ("worst", f"{plans['worst_ratio']:.3f}"),
        *((f"won by {term}", str(count)) for term, count in plans["wins_by"].items()),
    ]
    return ("", "steps"), lines


_GAINS = ("by-work", "delayed", "divided-in-time", "divided", "gangs", "flexsp")


def _policies() -> tuple[Line, list[Line]]:
    lines = []
    for each in read("published/wlb")["rows"]:
        gains = {row["policy"]: row["gain"] for row in each["rows"]}
        lines.append(
            (
                f"{each['configuration']}, {each['devices']}",
                *(f"{gains[policy]:.2f}" for policy in _GAINS),
                f"{each['bound_of_gain']:.2f}",
            )
        )
    return ("configuration, H100", *(f"`{policy}`" for policy in _GAINS), "bound"), lines


def _dynamic() -> tuple[Line, list[Line]]:
    policies = ("bytescale", "gangs", "divided", "flexsp")
    lines = []
    for each in read("published/wlb")["dynamic context parallelism"]:
        said, rates, gains = each["published"], each["tokens_per_s"], each["gain"]
        fixed, moved = (said.get(f"{way}_tokens_per_s") for way in ("fixed", "dynamic"))
        lines.append(
            (
                each["configuration"],
                f"{fixed:,.0f}" if fixed else "",
                f"{moved:,.0f} ({said['gain']})" if moved else f"({said['gain']})",
                f"{rates['plain']:,.0f}",
                *(f"{rates[policy]:,.0f} ({gains[policy]:.2f})" for policy in policies),
                f"({max(each['bound_of_gain'].values()):.2f})",
            )
        )
    names = (f"`{policy}`" for policy in policies)
    head = ("", "published, fixed", "published, dynamic", "forecast, fixed", *names, "bound")
    return head, lines


_TABLES = {
    "goals": (_goals, (61, 11, 14, 14), (1, 2, 3)),
    "peers": (_peers, (40, 10, 10, 12, 10, 18), (1, 2, 3, 4, 5)),
    "collectives": (_collectives, (36, 20, 12, 16, 16), (2, 3, 4)),
    "fresh": (_fresh, (48, 10, 14, 12, 12), (1, 2, 3, 4)),
    "intervals": (_intervals, (40, 14, 28, 18), (1, 2, 3)),
    "plans": (_plans, (80, 20), (1,)),
    "policies": (_policies, (20, 11, 11, 15, 11, 11, 11, 10), range(1, 8)),
    "dynamic": (_dynamic, (16, 10, 14, 10, 13, 13, 12, 12, 7), range(1, 9)),
}


class Foresight(SphinxDirective):
    """One of the tables, or the picture."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Rebuild the page whenever a bench has written."""
        self.env.note_dependency(str(RESULTS))
        if self.arguments[0] == "here":
            if not HERE.exists():
                return []
            uri = f"/{HERE.relative_to(HERE.parents[2]).as_posix()}"
            return [
                nodes.image(
                    uri=uri, alt="Seconds of a step of each plan, as measured and simulated"
                )
            ]
        make, widths, right = _TABLES[self.arguments[0]]
        head, lines = make()
        return [table(head, lines, widths, right=right)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("foresight", Foresight)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
