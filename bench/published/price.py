"""Published steps priced, with three residuals fitted on steps of other sources.

``Residuals.products`` of devices that multiply FP8 and of those that do not, which keep their
clocks under load, and ``Residuals.traffic`` of all: three numbers for all programs, fitted on every
source but the one that is scored. A source is a table, whatever devices it has.
"""

import dataclasses
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.published.rows import Row
from equipoise.base.errors import EquipoiseError
from equipoise.cost.step.request import Residuals, StepOptions, StepPrice
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster

GRID = np.round(np.arange(0.80, 1.61, 0.01), 2), np.round(np.arange(0.6, 2.02, 0.02), 2)
"""Values of the two residuals that are tried."""

PRODUCTS = ("products", "experts")
TRAFFIC = (
    "tensor traffic",
    "context traffic",
    "expert traffic",
    "parameter traffic",
    "data traffic",
)


@dataclass(frozen=True, slots=True)
class Priced:
    """A row with its price: the fastest of its settings that fit, else the fastest."""

    row: Row
    price: StepPrice
    options: StepOptions

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.price.step_s / self.row.step_s


def table_of(row: Row) -> str:
    """The source that is left out together with this row."""
    return "llm-foundry" if row.source.startswith("llm-foundry") else row.source


_MACHINES: dict[str, Machine] = {}


def _price(task: tuple[Row, Residuals]) -> Priced:
    row, residuals = task
    if row.cluster not in _MACHINES:
        _MACHINES[row.cluster] = Machine(find_cluster(row.cluster))
    priced = []
    faults = []
    for options in row.options:
        asked = dataclasses.replace(options, residuals=residuals)
        try:
            price = price_step(row.model, _MACHINES[row.cluster], row.layout, asked)
        except EquipoiseError as error:
            faults.append(str(error))
            continue
        priced.append(Priced(row, price, asked))
    if not priced:
        raise RuntimeError(f"{row.source}, {row.name}: {faults}")
    return min(priced, key=lambda each: (not each.price.fits, each.price.step_s))


def price_rows(rows: Sequence[Row], residuals: Sequence[Residuals]) -> list[Priced]:
    """Price every row under its residuals, on two processes."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(_price, list(zip(rows, residuals, strict=True)), chunksize=8)


def shares(priced: Priced) -> np.ndarray:
    """Products, traffic and all else over the measured step, bubbles shared out."""
    terms = priced.price.terms
    pool = sum(value for name, value in terms.items() if name in PRODUCTS)
    ends = terms.get("optimizer", 0.0) + terms.get("data traffic", 0.0)
    bubble = terms.get("pipeline bubble", 0.0)
    busy = priced.price.step_s - bubble - ends
    grown = 1.0 + bubble / busy
    moved = sum(terms.get(name, 0.0) for name in TRAFFIC[:-1]) * grown
    moved += terms.get("data traffic", 0.0)
    both = np.array([pool * grown, moved])
    whole = np.array([*both, priced.price.step_s - both.sum()])
    return whole / priced.row.step_s


def is_narrow(row: Row) -> bool:
    """Whether the row's device multiplies FP8."""
    return "fp8" in find_cluster(row.cluster).device.dtypes


def fit(priced: Sequence[Priced]) -> dict[bool, Residuals]:
    """The residuals of least mean |log ratio|, every source counting alike, by ``is_narrow``."""
    sources = [table_of(each.row) for each in priced]
    weights = np.array([1.0 / sources.count(name) for name in sources])
    table = np.array([shares(each) for each in priced])
    narrow = np.array([is_narrow(each.row) for each in priced])
    products, traffic = np.meshgrid(*GRID, indexing="ij")
    losses: dict[bool, Any] = {}
    for kind in sorted(set(narrow.tolist())):
        mine = table[narrow == kind]
        ratios = products[..., None] * mine[:, 0] + traffic[..., None] * mine[:, 1] + mine[:, 2]
        losses[kind] = (np.abs(np.log(ratios)) * weights[narrow == kind]).sum(axis=-1)
    together = sum(loss.min(axis=0) for loss in losses.values())
    place = int(np.argmin(together))
    best = {kind: int(loss[:, place].argmin()) for kind, loss in losses.items()}
    known = {
        kind: Residuals(products=float(GRID[0][at]), traffic=float(GRID[1][place]))
        for kind, at in best.items()
    }
    # Devices of one kind alone say nothing better of the other.
    return {kind: known.get(kind, known[next(iter(known))]) for kind in (False, True)}


def said(residuals: dict[bool, Residuals]) -> dict[str, float]:
    """Residuals as the result has them."""
    return {
        "products": residuals[False].products,
        "products where FP8 is multiplied": residuals[True].products,
        "traffic": residuals[True].traffic,
    }


def leave_one_out(
    rows: Sequence[Row],
) -> tuple[list[Priced], list[Priced], dict[str, dict[bool, Residuals]]]:
    """Rows priced unfitted, rows priced under residuals of all other sources, and the residuals.

    Args:
        rows: Of several sources.
    """
    plain = price_rows(rows, [Residuals()] * len(rows))
    names = sorted({table_of(row) for row in rows})
    fitted = {name: fit([each for each in plain if table_of(each.row) != name]) for name in names}
    chosen = [fitted[table_of(row)][is_narrow(row)] for row in rows]
    return plain, price_rows(rows, chosen), fitted


def error_row(each: Priced) -> dict[str, Any]:
    """One residual, as every bench prints it."""
    return {
        "row": each.row.name,
        "program": each.row.program,
        "printed": each.row.printed,
        "attention computes": each.row.pairs,
        "measured_s": round(each.row.step_s, 4),
        "predicted_s": round(each.price.step_s, 4),
        "error": round(each.ratio - 1, 4),
    }


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Mean absolute error, mean, largest, and number of errors."""
    values = np.array(errors)
    return {
        "mape": round(float(np.abs(values).mean()), 4),
        "bias": round(float(values.mean()), 4),
        "largest": round(float(np.abs(values).max()), 4),
        "rows": len(values),
    }
