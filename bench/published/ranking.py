"""Is the order of predictions the order of measurements? llm-foundry's sweeps, size by size.

A sweep is one model on one kind of device, over sequence lengths, micro-batches and numbers of
devices. It ranks tokens per second and device, and, harder, MFU, which factors out the sequence
length. Residuals are fitted without llm-foundry.
"""

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.published.price import Priced, fit, is_narrow, price_rows, said, table_of
from bench.published.rows import read, rows
from equipoise.cost.step.request import Residuals

GOAL = {"tau": 0.8, "top-1 regret": 0.03}
LEAST = 4
"""Rows that a sweep needs to be ranked."""


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs in the same order less those in another, over all pairs; ties count as neither.

    >>> kendall_tau([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    signs = [
        np.sign(first[i] - first[j]) * np.sign(second[i] - second[j])
        for i, j in itertools.combinations(range(len(first)), 2)
    ]
    return float(np.mean(signs))


def rank(sweep: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Tau of (measured, predicted) rates, and the loss from taking the predicted best."""
    measured, predicted = zip(*sweep, strict=True)
    best = int(np.argmax(predicted))
    return {
        "tau": round(kendall_tau(measured, predicted), 4),
        "top-1 regret": round(1 - measured[best] / max(measured), 4),
        "rows": len(sweep),
    }


def mean_of(groups: dict[str, dict[str, float]]) -> dict[str, float]:
    """Means over sweeps."""
    return {
        key: round(float(np.mean([group[key] for group in groups.values()])), 4)
        for key in ("tau", "top-1 regret")
    }


def measure() -> dict[str, Any]:
    """All of it."""
    every = rows()
    plain = price_rows(every, [Residuals()] * len(every))
    residuals = fit([each for each in plain if table_of(each.row) != "llm-foundry"])
    wanted = [row for row in every if table_of(row) == "llm-foundry"]
    priced = price_rows(wanted, [residuals[is_narrow(row)] for row in wanted])
    rates: dict[str, list[tuple[float, float]]] = defaultdict(list)
    shares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each, line in zip(priced, read("llmfoundry.csv"), strict=True):
        name = f"{line['model']} {line['gpu']} {line['precision']}"
        rates[name].append((1 / _per_token(each, each.row.step_s), 1 / _per_token(each)))
        mfu = float(line["mfu"])
        shares[name].append((mfu, mfu / each.ratio))
    tokens = {name: rank(sweep) for name, sweep in rates.items() if len(sweep) >= LEAST}
    mfu = {name: rank(sweep) for name, sweep in shares.items() if len(sweep) >= LEAST}
    return {
        "what": "order of predicted and of measured rates within each sweep",
        "fitted on": "every source but llm-foundry",
        "residuals": said(residuals),
        "goal": GOAL,
        "tokens per second and device": mean_of(tokens),
        "MFU": mean_of(mfu),
        "sweeps by tokens per second": tokens,
        "sweeps by MFU": mfu,
    }


def _per_token(each: Priced, step_s: float | None = None) -> float:
    """Device seconds of a token."""
    seconds = each.price.step_s if step_s is None else step_s
    return seconds * each.row.layout.world / each.price.tokens


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
