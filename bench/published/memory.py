"""Published peaks of memory, beside what is predicted. Nothing is fitted.

Peaks of arXiv:2401.10241 and of arXiv:2205.05198 are bytes allocated (Megatron-LM reports them in
units of 1,024); torchtitan's are bytes that the allocator holds, so its rows count the allocator's
slack. A *false fit* is a row predicted to fit a device that it does not fit. All published
rows fit their own device, so other ``CAPACITIES_GIB`` are tried as if rows had run there.

Every step whose time was published ran, so all of them are asked about, too, and those that are
said not to fit are listed.
"""

import dataclasses
import json
import sys
from collections import defaultdict
from typing import Any

from bench.published.fresh import automodel, bridge
from bench.published.price import price_rows, summary
from bench.published.rows import (
    Row,
    gpt,
    make_row,
    read,
    torchtitan,
    zero_bubble,
)
from bench.published.rows import rows as timed
from equipoise.base.units import GIB
from equipoise.cost.step.request import FITTED, StepOptions
from equipoise.spec.layout import Layout
from equipoise.spec.run.spec import Recompute

GOAL = {"mape": 0.08, "false fits": 0}

CAPACITIES_GIB = (40.0, 80.0, 96.0, 141.0)

SHAPES = {  # layers, hidden, heads, tp, pp, virtual, micro-batch, batch: arXiv:2205.05198, table 3
    "22B": (48, 6144, 64, 8, 1, 1, 4, 4),
    "175B": (96, 12_288, 96, 8, 8, 3, 1, 64),
    "530B": (105, 20_480, 128, 8, 35, 3, 1, 280),
    "1T": (128, 25_600, 160, 8, 64, 1, 1, 512),
}


def korthikanti(name: str, recompute: Recompute, *, sequence: bool) -> Row:
    """One of its models under one technique."""
    layers, hidden, heads, tp, pp, virtual, micro_batch, batch = SHAPES[name]
    options = StepOptions(
        2048,
        batch,
        micro_batch=micro_batch,
        virtual=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        recompute=recompute,
    )
    model = gpt(layers, hidden, heads, 51_200)
    devices = tp * pp
    layout = Layout(tp=tp, pp=pp, zero=0)
    program = "megatron-2022" if sequence else "megatron-2022-tensor"
    return allocated(
        make_row("", name, program, model, f"a100-80:{devices}", layout, (options,), 1.0)
    )


def allocated(row: Row) -> Row:
    """The row without the allocator's slack, where bytes allocated were published."""
    options = tuple(
        dataclasses.replace(each, stack=dataclasses.replace(each.stack, slack_share=0.0))
        for each in row.options
    )
    return dataclasses.replace(row, options=options)


def figures() -> list[tuple[str, str, float, float]]:
    """Source, row, published and predicted, of figures 1 and 7."""
    forms: tuple[tuple[str, Recompute, bool], ...] = (
        ("none", "none", False),
        ("seq", "none", True),
        ("selective", "attention", False),
        ("seq_selective", "attention", True),
        ("full_recompute", "full", False),
    )
    asked = [(name, form) for name in SHAPES for form in forms]
    priced = price_rows(
        [korthikanti(name, how, sequence=sequence) for name, (_, how, sequence) in asked],
        [FITTED] * len(asked),
    )
    held = {
        (name, form): each.price.memory
        for (name, (form, *_)), each in zip(asked, priced, strict=True)
    }
    rows = []
    for row in read("seqpar_memory.csv"):
        name = row["model"]
        plain = held[name, "none"]
        states = plain["parameters"] + plain["gradients"] + plain["optimizer"]
        rows.append(("figure 1", f"{name} states", float(row["par_opt_gib"]), states / GIB))
        for form, key in (("none", "act_gib_none"), ("seq_selective", "act_gib_seq_selective")):
            gib = held[name, form]["activations"] / GIB
            rows.append(("figure 1", f"{name} activations {form}", float(row[key]), gib))
        for form in ("seq", "selective", "seq_selective", "full_recompute"):
            percent = 100 * held[name, form]["activations"] / plain["activations"]
            rows.append(("figure 7", f"{name} {form}, %", float(row[f"rel_{form}_pct"]), percent))
    return rows


def peaks() -> tuple[list[tuple[str, str, float, float]], list[str]]:
    """Source, row, published and predicted GiB of whole ranks, and false fits on their devices."""
    given: list[tuple[str, Row, float]] = []
    for row, line in zip(zero_bubble(), read("zero_bubble_table4.csv"), strict=True):
        given.append(("arXiv:2401.10241 table 4", allocated(row), float(line["memory_gb"])))
    lines = [line for line in read("torchtitan.csv") if "rowwise" not in line["technique"]]
    for row, line in zip(torchtitan(), lines, strict=True):
        if line["peak_mem_gib"]:
            given.append(("torchtitan", row, float(line["peak_mem_gib"])))
    priced = price_rows([row for _, row, _ in given], [FITTED] * len(given))
    rows, false_fits = [], []
    for (source, row, measured), each in zip(given, priced, strict=True):
        predicted = float(each.price.memory_bytes.max())
        rows.append((source, row.name, measured, predicted / GIB))
        if each.price.fits and measured * GIB > each.price.capacity_bytes:
            false_fits.append(row.name)
    return rows, false_fits


def refused() -> tuple[int, list[str]]:
    """Steps that ran, and those of them that are said not to fit."""
    ran = [*timed(), *bridge(), *automodel()]
    return len(ran), [
        f"{each.row.source}, {each.row.name}: {each.price.memory_bytes.max() / GIB:.1f} of "
        f"{each.price.capacity_bytes / GIB:.1f} GiB"
        for each in price_rows(ran, [FITTED] * len(ran))
        if not each.price.fits
    ]


def measure() -> dict[str, Any]:
    """All of it."""
    ran, not_fitting = refused()
    whole, false_fits = peaks()
    rows = figures() + whole
    errors = defaultdict(list)
    for source, _, measured, predicted in rows:
        errors[source].append(predicted / measured - 1)
    return {
        "what": "predicted over published - 1; GiB, or percent of the activations of none",
        "fitted": "nothing",
        "goal": GOAL,
        "all": summary([error for each in errors.values() for error in each]),
        "by source": {source: summary(each) for source, each in errors.items()},
        "false fits": false_fits,
        "would be false fits on other devices": [
            f"{name}, on {capacity:g} GiB: {measured:g} GiB published, {predicted:.1f} predicted"
            for capacity in CAPACITIES_GIB
            for _, name, measured, predicted in whole
            if predicted <= capacity < measured
        ],
        "asked": len(whole) * len(CAPACITIES_GIB),
        "steps that ran": ran,
        "said not to fit": not_fitting,
        "rows": [
            {
                "source": source,
                "row": name,
                "published": measured,
                "predicted": round(predicted, 2),
                "error": round(predicted / measured - 1, 4),
            }
            for source, name, measured, predicted in rows
        ],
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
