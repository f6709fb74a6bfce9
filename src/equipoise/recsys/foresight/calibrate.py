"""Measure what recommenders' steps cost on this machine: short runs beside the one that is asked.

What it decides
    Runs of other batches, widths and placements of the same data are timed part by part and
    fitted; the run itself and one more are left out, and say how far the rates are off.

Kept true (tests/multi/recsys/test_forecast.py)
    The file that is written prices the run, and names its error.
"""

import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from equipoise.base.durable import write_whole
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.cost.recommend import PARTS, RankCounts, StepRates, fit_rates
from equipoise.observe.event import Kind
from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.foresight.forecast import count_step
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.spec.device.here import cpu_model
from equipoise.spec.recommend import RecommendSpec

_STEPS, _WARM = 16, 4
"""Steps of a probe, and how many of them come before it is timed."""

PartSeconds = dict[str, float]


class _Steps(EventSink):
    """Keeps the parts of each step."""

    def __init__(self) -> None:
        self.parts: list[PartSeconds] = []

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        """Keep a step's parts; forget anything else."""
        del kind, t
        if name == "recommend":
            self.parts.append(parts_of(fields))


def parts_of(event: dict[str, Any]) -> PartSeconds:
    """Seconds of a step's parts, as its journaled event has them; ``step`` is all."""
    parts = {part: float(event[f"{part}_s"]) for part in PARTS if part != "rest"}
    step_s = float(event["step_s"])
    return parts | {"rest": step_s - sum(parts.values()), "step": step_s}


def median_parts(steps: list[PartSeconds]) -> PartSeconds:
    """The median of each part."""
    return {part: statistics.median(each[part] for each in steps) for part in steps[0]}


def calibrate(spec: RecommendSpec, base: Path, file: Path) -> StepRates:
    """Time probes of a run's data on this machine, fit their parts, and write the rates.

    Raises:
        DataError: the data is wrong.
        LayoutError: the tables of a probe have no place on its ranks.
    """
    ranks = max(2, spec.layout.dp)
    probes, held_out = _probes(spec, ranks)
    samples = read_samples(spec.data, base)
    # Planned before ranks start, so that what is wrong is said once, and at once.
    counts = [
        count_step(each, samples, plan_samples(each, samples)) for each in (*probes, *held_out)
    ]
    rows = run_ranks(ranks, _time_probes, [*probes, *held_out], base)
    flat_counts: list[RankCounts] = [each for step in counts[: len(probes)] for each in step]
    flat = [rows[rank][at] for at in range(len(probes)) for rank in range(ranks)]
    fitted = StepRates(
        fit_rates(flat_counts, flat),
        cpu_model(),
        time.strftime("%Y-%m-%d"),
        0.0,
        os.getloadavg()[0],
    )
    errors = []
    for at in range(len(probes), len(counts)):
        forecast = price_step(fitted, counts[at])
        measured = max(row[at]["step"] for row in rows)
        errors.append(abs(forecast - measured) / measured)
    rates = dataclasses.replace(fitted, error=statistics.mean(errors))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(rates.as_row(), indent=1))
    return rates


def price_step(rates: StepRates, counts: list[RankCounts]) -> float:
    """Seconds of a step: those of its slowest rank."""
    return max(sum(rates.price(each).values()) for each in counts)


def _probes(spec: RecommendSpec, ranks: int) -> tuple[list[RecommendSpec], list[RecommendSpec]]:
    """Runs to fit, and runs that are left out of the fit."""

    def other(batch: float, width: int = 1, kinds: tuple[Any, ...] = ()) -> RecommendSpec:
        size = max(8 * ranks, round(spec.train.batch * batch))
        return dataclasses.replace(
            spec,
            model=dataclasses.replace(spec.model, width=spec.model.width * width),
            tables=dataclasses.replace(spec.tables, kinds=kinds or spec.tables.kinds),
            train=dataclasses.replace(spec.train, batch=size, epochs=1000),
            layout=dataclasses.replace(spec.layout, dp=ranks),
            checkpoint=dataclasses.replace(spec.checkpoint, every_steps=1 << 30),
        )

    fitted = [
        other(0.25),
        other(2),
        other(4),
        other(0.5, 2),
        other(1, 4),
        other(0.5, kinds=("table",)),
        other(2, kinds=("table",)),
        other(0.5, kinds=("row",)),
        other(2, kinds=("row",)),
    ]
    if not spec.model.towers:  # their tables lie on their host
        fitted += [other(0.5, kinds=("data",)), other(2, kinds=("data",))]
    return fitted, [other(1), other(1, kinds=("row",)), other(1, kinds=("table",))]


def _time_probes(ranks: Ranks, specs: list[RecommendSpec], base: Path) -> list[PartSeconds]:
    """A rank's median parts of each probe."""
    torch.set_num_threads(1)
    samples = read_samples(specs[0].data, base)
    medians = []
    for spec in specs:
        sink, plan = _Steps(), plan_samples(spec, samples).plan
        with tempfile.TemporaryDirectory() as own:
            folder = Path(ranks.gather_objects(own)[0])
            trainer = RankTrainer(folder, spec, samples, plan, sink, TimedExchange())
            trainer.run(lambda _: None, stop_at=_STEPS)
            ranks.barrier()
        medians.append(median_parts(sink.parts[_WARM:]))
    return medians
