"""Intervals of step times, and how many published steps lie in theirs.

Each source is left out in turn. Residuals of kernels and messages, the spread of each curve and the
width of an interval come from the other sources alone: each of those is forecast under residuals of
all but itself and the one left out, the spreads are the likeliest of these errors, and the width is
the one that 80% of them lie in, every source counting alike.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize

from bench.lib.stamp import environment
from bench.published.price import Priced, fit, is_narrow, price_rows, shares, table_of
from bench.published.rows import rows
from equipoise.cost.step.request import Residuals
from equipoise.cost.step.spread import CURVES, SHARE, curve_seconds

GOAL = (0.75, 0.85)
"""Share of rows left out that lie in their intervals."""

LEAST = 1e-3
"""The least spread of a curve."""


def log_ratio(each: Priced, residuals: Residuals) -> float:
    """Logarithm of predicted over measured, under other residuals than it was priced with."""
    products, traffic, other = shares(each)
    return float(np.log(residuals.products * products + residuals.traffic * traffic + other))


def curve_shares(each: Priced, residuals: Residuals) -> list[float]:
    """Shares of the step by curve, under other residuals than it was priced with."""
    by_curve = curve_seconds(each.price.terms)
    by_curve["matrix products"] *= residuals.products
    by_curve["messages"] *= residuals.traffic
    whole = sum(by_curve.values())
    return [by_curve[curve] / whole for curve in CURVES]


def fit_spreads(errors: np.ndarray, table: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The likeliest spreads of every curve, float64 [curves]."""
    squares = table**2

    def unlikely(logs: np.ndarray) -> float:
        spread = np.sqrt(squares @ np.exp(2 * logs))
        # Errors have longer tails than a normal distribution: Laplace's.
        return float((weights * (np.log(spread) + np.abs(errors) / spread)).sum())

    begin = np.log(np.full(squares.shape[1], 0.05))
    best = minimize(unlikely, begin, method="L-BFGS-B", bounds=[(np.log(LEAST), 0.0)] * len(begin))
    return np.asarray(np.exp(best.x))


def spread_of(table: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """Relative spread of every step, float64 [rows]."""
    return np.sqrt(table**2 @ spreads**2)


def width_of(scaled: np.ndarray, weights: np.ndarray) -> float:
    """The width that a weighted ``SHARE`` of errors over spreads lies in."""
    order = np.argsort(scaled)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(scaled[order][np.searchsorted(reached, SHARE)])


def learn(plain: Sequence[Priced], without: str | None) -> tuple[np.ndarray, float]:
    """Spreads and width, of all sources but one."""
    kept = [each for each in plain if table_of(each.row) != without]
    names = sorted({table_of(each.row) for each in kept})
    errors, table, weights = [], [], []
    for name in names:
        fitted = fit([each for each in kept if table_of(each.row) != name])
        mine = [each for each in kept if table_of(each.row) == name]
        for each in mine:
            residuals = fitted[is_narrow(each.row)]
            errors.append(log_ratio(each, residuals))
            table.append(curve_shares(each, residuals))
            weights.append(1.0 / len(mine))
    known = np.array(errors), np.array(table), np.array(weights)
    spreads = fit_spreads(*known)
    return spreads, width_of(np.abs(known[0]) / spread_of(known[1], spreads), known[2])


def said(spreads: np.ndarray, width: float) -> dict[str, float]:
    """Spreads and width as the result has them."""
    return dict(zip(CURVES, np.round(spreads, 4).tolist(), strict=True)) | {
        "width": round(width, 3)
    }


def measure() -> dict[str, Any]:
    """Coverage of every source left out."""
    every = rows()
    plain = price_rows(every, [Residuals()] * len(every))
    sources: dict[str, Any] = {}
    inside_all: list[bool] = []
    for name in sorted({table_of(each.row) for each in plain}):
        others = [each for each in plain if table_of(each.row) != name]
        mine = [each for each in plain if table_of(each.row) == name]
        spreads, width = learn(plain, name)
        fitted = fit(others)
        errors = np.array([log_ratio(each, fitted[is_narrow(each.row)]) for each in mine])
        table = np.array([curve_shares(each, fitted[is_narrow(each.row)]) for each in mine])
        half = width * spread_of(table, spreads)
        inside = np.abs(errors) <= half
        inside_all += inside.tolist()
        sources[name] = {
            "rows": len(mine),
            "inside": round(float(inside.mean()), 3),
            "mean half width": round(float(np.expm1(half).mean()), 3),
            "spreads of the others": said(spreads, width),
        }
    shares_inside = [each["inside"] for each in sources.values()]
    return {
        "what": "share of published steps that lie in their intervals of 80%, sources left out",
        "goal": GOAL,
        "rows": len(inside_all),
        "inside, of all rows": round(float(np.mean(inside_all)), 3),
        "inside, mean over sources": round(float(np.mean(shares_inside)), 3),
        "spreads of all sources": said(*learn(plain, None)),
        "sources": sources,
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
