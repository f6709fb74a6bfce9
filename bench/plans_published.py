"""The planner's choice beside each published one, both by the same price.

Of each source, model, window and precision (of llm-foundry's sweeps, each source and model) the
published step of most tokens a device is taken; the planner searches the same step, on the same
cluster, stack and precision, for seconds from nothing. It is told
nothing of the published choice. The residuals are the same for both.
"""

import dataclasses
import json
import sys
import time
from typing import Any

from bench.published_rows import Row, rows
from bench.stamp import environment
from equipoise.base.errors import EquipoiseError
from equipoise.cost.step import StepPrice
from equipoise.plan.explain import loses_by
from equipoise.plan.search import Search
from equipoise.plan.space import list_space
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster import find_cluster

_SECONDS = 2.5


def published() -> list[Row]:
    """Of each source, model, window and precision the step of most tokens a device."""

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


def price(row: Row, machine: Machine) -> tuple[StepPrice, dict[str, str]] | None:
    """The published layout; of several settings the fastest that fits, else the fastest."""
    found = []
    for options in row.options:
        try:
            found.append((price_step(row.model, machine, row.layout, options), options))
        except EquipoiseError:
            continue
    if not found:
        return None
    best, options = min(found, key=lambda each: (not each[0].fits, each[0].step_s))
    said = {"layout": repr(row.layout), "recompute": options.recompute}
    return best, said | {"virtual": str(options.virtual), "micro-batch": str(options.micro_batch)}


def compare(row: Row) -> dict[str, Any]:
    machine = Machine(find_cluster(row.cluster))
    known = price(row, machine)
    head = {"source": row.source, "name": row.name, "cluster": row.cluster}
    if known is None:
        return head | {"unpriced": True}
    theirs, said = known
    base = dataclasses.replace(
        row.options[0], micro_batch=1, virtual=1, schedule="1f1b", recompute="none"
    )
    begin = time.perf_counter()
    space = list_space(row.model, machine.cluster.devices, base)
    found = Search(row.model, machine, space).run(seconds=_SECONDS)
    head |= {
        "published_s": theirs.step_s,
        "published_fits": theirs.fits,
        "published": said,
        "search_s": time.perf_counter() - begin,
    }
    if not found.fitting:
        return head | {"planned_s": None}
    choice = space.choice(found.fitting[0].row)
    ours = price_step(row.model, machine, choice.layout, choice.options)
    apart = loses_by(ours.terms, theirs.terms)
    wins = next(iter(apart.items()))
    return head | {
        "planned_s": ours.step_s,
        "planned": choice.words(),
        "ratio": ours.step_s / theirs.step_s,
        "gap": found.progress.gap,
        "wins_by": {wins[0]: wins[1]} if wins[1] > 0 else {},
    }


def main() -> None:
    found = []
    for row in published():
        found.append(compare(row))
        print(json.dumps(found[-1]), file=sys.stderr)
    ratios = [each["ratio"] for each in found if each.get("planned_s")]
    print(
        json.dumps(
            {
                "environment": environment(),
                "tag": "simulated",
                "seconds_each": _SECONDS,
                "steps": len(found),
                "planned": len(ratios),
                "at_least_as_fast": sum(ratio <= 1.0 + 1e-9 for ratio in ratios),
                "worst_ratio": max(ratios),
                "median_ratio": sorted(ratios)[len(ratios) // 2],
                "rows": found,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
