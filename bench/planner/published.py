"""The planner's choice beside each published one, both by the same price.

For each source, model, window and precision (each source and model of llm-foundry's sweeps) the
bench takes the published step of most tokens a device; the planner searches the same step, on the
same cluster, stack and precision. The residuals are the same for both. It searches twice, for some
seconds of its core each, and of a second core if there are many choices: once without any hint, and
once with the published degrees fixed (``equipoise plan --layout tp=8,pp=16``) and all else, such
as micro-batch, ZeRO, schedule and recomputation, free.
Its answer is the faster one, or the published choice
itself if the lattice has it, it fits, and neither search reached it in time.

The published setting is looked up in the lattice by meaning: on one data-parallel rank ZeRO 0 to 2
are the same, and so are all orders of ranks without stages.
"""

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.lib.stamp import LoadStamp, environment
from bench.published.rows import Row, rows
from equipoise.base.errors import EquipoiseError
from equipoise.cost.step.request import StepOptions, StepPrice
from equipoise.plan.answer.explain import loses_by
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import NAMED, Space
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import ORDERS

_SECONDS = 2.0
"""CPU seconds of this process for each of the two searches."""
_SAME = 1.0 + 1e-9


@dataclass(frozen=True, slots=True)
class Planned:
    """A choice with its price, and which question it answers."""

    price: StepPrice
    choice: Choice
    told: str
    gap: float


def published() -> list[Row]:
    """The step of most tokens a device for each source, model, window and precision."""

    def rate(row: Row) -> float:
        devices = int(row.cluster.rpartition(":")[2])
        options = row.options[0]
        return options.context_tokens * options.step_sequences / row.step_s / devices

    best: dict[str, Row] = {}
    for row in rows():
        options = row.options[0]
        is_sweep = row.source.startswith("llm-foundry")
        window = 0 if is_sweep else options.context_tokens
        key = repr((row.source, row.model, window, "" if is_sweep else options.precision))
        if key not in best or rate(row) > rate(best[key]):
            best[key] = row
    return list(best.values())


def price(row: Row, machine: Machine) -> tuple[StepPrice, StepOptions] | None:
    """The published layout; of several settings the fastest that fits, else the fastest."""
    priced = []
    for options in row.options:
        try:
            priced.append((price_step(row.model, machine, row.layout, options), options))
        except EquipoiseError:
            continue
    return min(priced, key=lambda each: (not each[0].fits, each[0].step_s)) if priced else None


def find_row(space: Space, row: Row, options: StepOptions) -> int | None:
    """The row of the lattice that means the published setting.

    Args:
        space: Of the row's cluster and step.
        row: Published.
        options: Which of the row's settings to look up.
    """
    layout = row.layout
    is_alone = layout.dp * layout.cp == 1
    wanted: dict[str, int | str] = {
        axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "replicas")
    }
    wanted |= {
        "zero": 1 if is_alone and layout.zero < 3 else layout.zero,
        "micro_batch": options.micro_batch,
        "virtual": options.virtual,
        "recompute": options.recompute,
        "schedule": options.schedule if layout.pp > 1 else "1f1b",
    }
    if layout.cp > 1:
        wanted["context_strategy"] = options.context_strategy
    if layout.pp > 1 and layout.dp > 1:
        orders = [name for name, order in ORDERS.items() if order == layout.order]
        if not orders:
            return None
        wanted["order"] = orders[0]
    alike = np.ones(len(space), dtype=bool)
    for name, value in wanted.items():
        alike &= space[name] == (NAMED[name].index(str(value)) if name in NAMED else value)
    places = np.flatnonzero(alike)
    return int(places[0]) if len(places) else None


def search(row: Row, machine: Machine, space: Space, told: str) -> Planned | None:
    """The planner's answer within its CPU time, however many others share the core."""
    finder = Search(row.model, machine, space)
    begin, outcome = time.process_time(), None
    while (left := _SECONDS - (time.process_time() - begin)) > 0.1 * _SECONDS:
        outcome = finder.run(seconds=left)
        if outcome.progress.gap <= finder.gap:
            break
    if outcome is None or not outcome.fitting:
        return None
    choice = space.choice(outcome.fitting[0].row)
    best = price_step(row.model, machine, choice.layout, choice.options)
    return Planned(best, choice, told, outcome.progress.gap)


def compare(row: Row) -> dict[str, Any]:
    """One published step."""
    machine = Machine(find_cluster(row.cluster))
    known = price(row, machine)
    head = {"source": row.source, "name": row.name, "cluster": row.cluster}
    if known is None:
        return head | {"unpriced": True}
    theirs, options = known
    base = dataclasses.replace(
        row.options[0], micro_batch=1, virtual=1, schedule="1f1b", recompute="none"
    )
    begin = time.perf_counter()
    space = list_space(row.model, machine.cluster.devices, base)
    place = find_row(space, row, options)
    cold = search(row, machine, space, "nothing")
    degrees = {axis: getattr(row.layout, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    near = list_space(row.model, machine.cluster.devices, base, fixed=degrees)
    warm = search(row, machine, near, "the published degrees")
    itself = None
    if place is not None and theirs.fits:
        itself = Planned(theirs, space.choice(place), "the published choice", 0.0)
    answers = [each for each in (cold, warm, itself) if each is not None]
    head |= {
        "published_s": theirs.step_s,
        "published_fits": theirs.fits,
        "published": {
            "layout": repr(row.layout),
            "recompute": options.recompute,
            "virtual": str(options.virtual),
            "micro-batch": str(options.micro_batch),
        },
        "in_lattice": place is not None,
        "search_s": round(time.perf_counter() - begin, 2),
        "told_nothing": None if cold is None else cold.price.step_s / theirs.step_s,
        "told_degrees": None if warm is None else warm.price.step_s / theirs.step_s,
    }
    if not answers:
        return head | {"planned_s": None}
    best = min(answers, key=lambda each: each.price.step_s)
    apart = loses_by(best.price.terms, theirs.terms)
    wins = next(iter(apart.items()))
    return head | {
        "planned_s": best.price.step_s,
        "planned": best.choice.words(),
        "told": best.told,
        "ratio": best.price.step_s / theirs.step_s,
        "gap": best.gap if np.isfinite(best.gap) else None,
        "wins_by": {wins[0]: wins[1]} if wins[1] > 0 else {},
    }


def summary(compared: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures over all steps, and over those whose published choice is predicted to fit."""
    planned = [each for each in compared if each.get("planned_s")]
    ratios = sorted(each["ratio"] for each in planned)
    terms = [name for each in planned for name in each["wins_by"]]

    def count(key: str) -> int:
        return sum((each.get(key) or np.inf) <= _SAME for each in compared)

    return {
        "steps": len(compared),
        "in_lattice": sum(each.get("in_lattice", False) for each in compared),
        "published_does_not_fit": [
            each["name"] for each in compared if not each.get("published_fits", True)
        ],
        "at_least_as_fast": count("ratio"),
        "at_least_as_fast, told nothing": count("told_nothing"),
        "at_least_as_fast, told the degrees": count("told_degrees"),
        "is_the_published_choice": sum(
            each.get("told") == "the published choice" for each in planned
        ),
        "worst_ratio": ratios[-1],
        "median_ratio": ratios[len(ratios) // 2],
        "wins_by": {name: terms.count(name) for name in sorted(set(terms), key=terms.count)[::-1]},
    }


def main() -> None:
    """Each row to the error stream as it is done; all of them as JSON."""
    stamp = LoadStamp()
    compared = []
    for row in published():
        compared.append(compare(row))
        print(json.dumps(compared[-1]), file=sys.stderr)
    answer = {
        "what": "step of the planner's choice over that of the published one, by the same price",
        "tag": "simulated",
        "goal": "ratio at most 1 on every row",
        "seconds_each_search": _SECONDS,
        **summary(compared),
        "rows": compared,
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
