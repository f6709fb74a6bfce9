"""Convert a recommender's run: scan, search, follow a stream, write a folder.

What it decides
    The search measures on the validation split, which training has not learned from. The stream is
    the test split, or a file of later samples with the run's columns and label; it is followed in
    windows, and what goes on at its end is written. Losses are of what is written: where the
    monitor has chosen ends or formats anew, on validation they may exceed the budget, and on test
    they are no longer of samples that nothing was chosen on.

Kept true (tests/unit/recsys/lowbit/test_request.py)
    Losses and bytes of the record are those of the folder that was written.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.base.disk import why_unwritable
from equipoise.base.errors import DataError, ModelError, SpecError
from equipoise.base.nearest import nearest
from equipoise.base.shown import listed
from equipoise.recsys.columns import (
    column_numbers,
    read_columns,
    require_values,
    time_order,
)
from equipoise.recsys.lowbit.artefact import read_artefact, unwritten, write_artefact
from equipoise.recsys.lowbit.drift import DriftMonitor
from equipoise.recsys.lowbit.parts import parts_of
from equipoise.recsys.lowbit.scan import Loss, ReferenceScores, Sampled
from equipoise.recsys.lowbit.search import Searched, search_forms
from equipoise.recsys.metrics import measure_auc, measure_entropy
from equipoise.recsys.rank.coding import Coding
from equipoise.recsys.rank.stored import Stored, read_stored
from equipoise.recsys.same import require_same_run
from equipoise.recsys.samples import Samples, read_samples, scale_column
from equipoise.recsys.whole import read_facts
from equipoise.spec.recommend import ColumnsSpec

_WINDOWS = 10
_LEAST_WINDOW = 16


def require_budget(budget: float) -> None:
    """Refuse a number that cannot be a budget.

    Raises:
        SpecError: it is negative, or not below 1.
    """
    if not (math.isfinite(budget) and 0 <= budget < 1):
        raise SpecError(
            f"--budget {budget:g} is not a share of normalised entropy. Give 0 to 1; 0.001 lets it "
            "grow by 0.1%."
        )


def convert_run(
    folder: Path,
    target: Path,
    budget: float,
    *,
    stream: Path | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write a run's newest checkpoint in the fewest bits whose loss is within a budget.

    Args:
        folder: The run's.
        target: The folder to make.
        budget: By how much normalised entropy may grow, relative; 0.001 for 0.1%.
        stream: Later samples, a Parquet, CSV or TSV file; the run's test split unless given.
        tick: Called once formats are found, and once the stream was followed.

    Returns:
        What ``ranking.json`` says.

    Raises:
        SpecError: the budget cannot be, or the run cannot be read here.
        ModelError: the target exists, or cannot be written.
        CheckpointError, DataError: the run or its data is missing or damaged.
    """
    require_budget(budget)
    if target.exists():
        raise ModelError(f"{target} already exists. Name a new folder, or delete it.")
    if why := why_unwritable(target):
        raise unwritten(target, why)
    stored = read_stored(folder)
    if stored.spec.model.towers:
        raise SpecError(
            f"{folder} has tables in towers (model.towers), and their modules have no formats of "
            "fewer bits. Serve it as it is, or train it without towers."
        )
    samples = read_samples(stored.spec.data, stored.base)
    facts = read_facts(stored.checkpoint)
    require_same_run(stored.checkpoint, facts, stored.spec, samples=samples)
    if stream is None:
        windows = _windows(samples, *samples.bounds("test"))
    else:
        windows = read_stream(stream, stored.spec.data, stored.coding)
    reference = ReferenceScores(stored.scorer, _split(samples, "validation"))
    searched = search_forms(reference, budget)
    tick()
    monitor = DriftMonitor(stored.scorer, searched.scorer, searched.forms, budget)
    monitor.calibrated_on(reference.samples)
    for window in windows:
        monitor.follow(window)
    tick()
    held_out = ReferenceScores(stored.scorer, _split(samples, "test"))
    searched = monitor.searched or searched
    loss = reference.measure(monitor.scorer)
    record = _facts(folder, stored, searched, loss, monitor, held_out)
    write_artefact(target, monitor.scorer, monitor.forms, stored.coding, stored.spec.model, record)
    read_artefact(target)  # what was written can be served
    return record


def _facts(
    folder: Path,
    stored: Stored,
    searched: Searched,
    loss: Loss,
    monitor: DriftMonitor,
    held_out: ReferenceScores,
) -> dict[str, Any]:
    logits = monitor.scorer.score(held_out.samples.jagged, held_out.samples.numbers)
    few = logits.double().numpy()
    labels, forms, parts = held_out.samples.labels, monitor.forms, parts_of(stored.scorer)
    return {
        "name": stored.spec.name,
        "from": str(folder),
        "step": stored.step,
        "budget": monitor.budget,
        "bytes": {
            "fp32": searched.fp32_bytes,
            "kept": sum(part.bytes_of(forms.get(part.name, "fp32")) for part in parts),
            "bound": searched.bound_bytes,
        },
        "loss": _loss_row(loss),
        "held_out": {
            **_loss_row(held_out.loss_of(few)),
            "entropy_fp32": measure_entropy(held_out.logits, labels),
            "entropy_kept": measure_entropy(few, labels),
            "auc_fp32": measure_auc(held_out.logits, labels),
            "auc_kept": measure_auc(few, labels),
        },
        "parts": [
            {
                "name": part.name,
                "shape": list(part.shape),
                "form": forms.get(part.name, "fp32"),
                "bytes": part.bytes_of(forms.get(part.name, "fp32")),
                "fp32_bytes": part.bytes_of("fp32"),
                "losses": {
                    each.form: _loss_row(each.loss)
                    for each in searched.scanned
                    if each.part == part
                },
            }
            for part in parts
        ],
        "tried": searched.tried,
        "windows": [dataclasses.asdict(each) for each in monitor.seen],
    }


def _loss_row(loss: Loss) -> dict[str, float | None]:
    """A loss as JSON; no noise is null."""
    noise = loss.noise_db if math.isfinite(loss.noise_db) else None
    return {"loss": loss.entropy, "deviation": loss.deviation, "noise_db": noise}


def _sampled(samples: Samples, begin: int, end: int) -> Sampled:
    jagged, numbers, labels = samples.batch(np.arange(begin, end))
    return Sampled(jagged, numbers, labels.double().numpy())


def _split(samples: Samples, split: str) -> Sampled:
    return _sampled(samples, *samples.bounds(split))


def _windows(samples: Samples, begin: int, end: int) -> list[Sampled]:
    """A run of samples in windows, in order of time."""
    count = max(1, min(_WINDOWS, (end - begin) // _LEAST_WINDOW))
    edges = np.linspace(begin, end, count + 1).astype(int).tolist()
    return [_sampled(samples, *edges[at : at + 2]) for at in range(count)]


def read_stream(path: Path, spec: ColumnsSpec, coding: Coding) -> list[Sampled]:
    """Windows of a file's samples, in order of time.

    Raises:
        DataError: the file or a column is missing, or a value is wrong.
    """
    columns = read_columns(path, "--stream")
    wanted = [*coding.names, spec.label, *([spec.time] if spec.time else [])]
    for name in wanted:
        if name not in columns:
            raise DataError(
                f'{path.name} has no column "{name}" among its {len(columns)} '
                f'({listed(columns)}). Nearest: "{nearest(name, list(columns))}".'
            )
    labels = column_numbers(columns, spec.label, path.name) >= spec.positive_from
    order = np.arange(len(labels))
    if spec.time:
        order, _ = time_order(columns, spec.time, path.name)
    # Whole columns first: what is wrong is named by its row of the file, not of a window.
    for name in (*coding.ids, *coding.bags):
        require_values(columns[name], name, path.name, is_bag=name in coding.bags)
    numbers = {name: column_numbers(columns, name, path.name) for name in coding.numbers}
    for name, scale in coding.numbers.items():
        scale_column(numbers[name], scale, f"{path.name}, column {name}")
    count = max(1, min(_WINDOWS, len(order) // _LEAST_WINDOW))
    windows = []
    for own in np.array_split(order, count):
        rows = {name: columns[name][own].tolist() for name in (*coding.ids, *coding.bags)}
        rows |= {name: column[own].tolist() for name, column in numbers.items()}
        coded = coding.code({}, rows)
        windows.append(Sampled(coded.jagged, coded.numbers, labels[own].astype(np.float64)))
    return windows
