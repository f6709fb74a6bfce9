"""A run's measured seconds beside what this machine's curves foresee, and which curve is wrong.

Why
    A calibration that nobody holds against a run is a rumour. A run's journal says how long each
    rank computed in each step, over how many tokens and pairs; the curves say how long products,
    attention and moves of those sizes take. Steps differ in their mix, and so tell the curves
    apart.

What it decides
    Each curve's *factor*, measured over foreseen, by least squares of relative errors over all
    ranks and steps, held at 1 as firmly as the steps scatter: steps that scatter as much as they
    differ in their mix tell no curve from another. Its 95% interval by drawing steps again. A curve
    is *wrong* when its interval leaves 1 by more than a tenth; of several the one that moves most
    seconds is named. Documents are taken to be of one length, the one that has the rank's tokens
    and pairs. A run beyond the measured sizes is refused.

Kept true (tests/unit/cost/test_compare.py)
    A journal made from curves with one factor changed gives that factor back and names it; one
    made from the curves as they are names none, and moves no factor far, however its steps scatter.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Flags, Floats
from equipoise.base.errors import SpecError
from equipoise.cost.kernel import attention_s, gemm_s, stream_s
from equipoise.cost.step.work import head_work, layer_work
from equipoise.cost.work import pair_flop
from equipoise.observe.run_record import RunRecord
from equipoise.spec.device.by_name import DeviceSpec, Dtype
from equipoise.spec.device.file import DeviceFile
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

CURVES = ("products", "attention", "moves")

_HOLD = 1e-4
"""How firmly a factor is held at 1 at least, against the squared relative error of one step: a
curve that is a hundredth of a step's time keeps its factor unless the steps insist."""

_SPREAD = 0.3
"""Of factors, before a run says anything: how far the same steps on one machine lay apart from one
session to another (``bench/local/calibrate.py``)."""

_DRAWS = 200
_WRONG = 0.1
_ALIKE = 0.2
"""Moves over products change by less than this, in the logarithm: nothing tells them apart."""

_ADAMW_BYTES = 28
"""Of a weight: read it, its gradient and two moments, write it and the moments, in fp32."""


@dataclass(frozen=True, slots=True)
class Factor:
    """Measured over foreseen."""

    name: str
    predicted_s: float
    """Of the median step's slowest rank."""
    factor: float
    low: float
    high: float

    @property
    def is_wrong(self) -> bool:
        """Whether the interval leaves 1 by more than a tenth."""
        return self.low > 1 + _WRONG or self.high < 1 - _WRONG


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside the curves."""

    steps: int
    ranks: int
    compute_predicted_s: float
    """Processor time of the slowest rank's forwards and backwards, median over steps."""
    compute_measured_s: float
    step_errors: Floats
    """Predicted over measured, less 1, of each step's slowest rank."""
    optimizer_predicted_s: float
    optimizer_measured_s: float
    curves: tuple[Factor, ...]
    is_told_apart: bool
    """Whether products and moves differ in their share of the steps; where they do not, they
    share what is off."""

    @property
    def mape(self) -> float:
        """Mean absolute error of a step's computing."""
        return float(np.abs(self.step_errors).mean())

    @property
    def wrong(self) -> Factor | None:
        """The wrong curve that moves most seconds; None where none is wrong."""
        found = [each for each in self.curves if each.is_wrong]
        return max(found, key=lambda each: abs(each.factor - 1) * each.predicted_s, default=None)

    def as_row(self) -> dict[str, Any]:
        """Plain data: what ``equipoise calibrate --compare --json`` prints."""
        return {
            "steps": self.steps,
            "ranks": self.ranks,
            "compute": {
                "predicted_s": self.compute_predicted_s,
                "measured_s": self.compute_measured_s,
                "mape": self.mape,
            },
            "optimizer": {
                "predicted_s": self.optimizer_predicted_s,
                "measured_s": self.optimizer_measured_s,
            },
            "curves": {
                each.name: {
                    "predicted_s": each.predicted_s,
                    "measured_over_predicted": each.factor,
                    "low": each.low,
                    "high": each.high,
                }
                for each in self.curves
            },
            "is_told_apart": self.is_told_apart,
            "wrong": None if self.wrong is None else self.wrong.name,
        }


def fitted(file: DeviceFile, comparison: Comparison) -> DeviceFile:
    """A device file whose curves are corrected by a run: new factors on top of the old."""
    old = dict(file.residuals)
    new = {each.name: old.get(each.name, 1.0) * each.factor for each in comparison.curves}
    return dataclasses.replace(file, residuals=tuple((old | new).items()))


def compare_run(
    record: RunRecord, model: ModelSpec, device: DeviceSpec, *, seed: int = 0
) -> Comparison:
    """Hold a data-parallel run's journal against a device's curves.

    Args:
        record: Of the run.
        model: That it trained.
        device: Whose curves.
        seed: Of the steps that are drawn.

    Raises:
        SpecError: the run shares micro-batches or layers over ranks, has fewer than 3 steps
            after its first, or goes beyond the measured sizes.
    """
    _require(record)
    columns = _foresee(record, model, device)
    measured = record.busy_s
    kept: Flags = np.isfinite(np.concatenate([measured[..., None], columns], 2)).all((1, 2))
    kept[:1] = False  # the first step warms up
    measured, columns = measured[kept], columns[kept]
    if len(measured) < 3:
        raise SpecError(
            f"{record.folder} has {len(measured)} whole steps after its first; a comparison needs "
            f"3 or more. Train it further."
        )
    predicted = columns.sum(2)
    slowest = predicted.argmax(1)
    rows = np.arange(len(slowest))
    factors = _fit(columns, measured)
    draws = _draw(columns, measured, seed)
    update_s = np.nanmedian(optimizer_s(record)[kept])
    shards = record.ranks if record.start.spec["layout"]["zero"] else 1
    own_weights = model.params / shards
    return Comparison(
        steps=len(measured),
        ranks=record.ranks,
        compute_predicted_s=float(np.median(predicted[rows, slowest])),
        compute_measured_s=float(np.median(measured.max(1))),
        step_errors=predicted.max(1) / measured.max(1) - 1,
        optimizer_predicted_s=float(stream_s(device, own_weights * _ADAMW_BYTES).s),
        optimizer_measured_s=float(update_s),
        curves=tuple(
            Factor(
                name,
                float(np.median(columns[rows, slowest, index])),
                float(factors[index]),
                float(np.quantile(draws[:, index], 0.025)),
                float(np.quantile(draws[:, index], 0.975)),
            )
            for index, name in enumerate(CURVES)
        ),
        is_told_apart=bool(np.ptp(np.log(columns[..., 2] / columns[..., 0])) > _ALIKE),
    )


def _require(record: RunRecord) -> None:
    layout = record.start.spec["layout"]
    shared = [
        f"layout.{key} = {layout[key]}"
        for key in ("cp", "tp", "ep", "etp", "pp")
        if layout.get(key, 1) != 1
    ]
    if shared:
        raise SpecError(
            f"{record.folder} has {', '.join(shared)}: its ranks wait for each other inside a "
            f"micro-batch, which curves of one core say nothing of. Compare a run of "
            f"data-parallel ranks alone."
        )


def optimizer_s(record: RunRecord) -> Floats:
    """Seconds of the optimizer's spans, [step, rank]; NaN where a rank has none."""
    total = np.full((len(record.step), record.ranks), np.nan)
    for rank, spans in enumerate(record.spans):
        for name, step, took_s in zip(spans.name, spans.step, spans.duration_s, strict=True):
            at = np.flatnonzero(record.step == step)
            if spans.names[name] == "optimizer" and len(at):
                total[at[0], rank] = took_s
    return total


def _foresee(record: RunRecord, model: ModelSpec, device: DeviceSpec) -> Floats:
    """Seconds of each curve, [step, rank, curve]; NaN where the pack says nothing."""
    tokens, count = record.rank_tokens, np.maximum(record.micro_batches, 1.0)
    pairs = (record.rank_flop - 6.0 * model.matmul_params * tokens) / (3.0 * pair_flop(model))
    train = record.start.spec["train"]
    dtype: Dtype = "bf16" if train["precision"] == "bf16" else "fp32"
    again = 1 if train["recompute"] == "full" else 0
    usable = np.isfinite(tokens) & np.isfinite(pairs) & (tokens > 0)
    rows = np.where(usable, tokens / count, 1.0)
    length = np.where(usable, np.maximum(2 * pairs / np.where(usable, tokens, 1.0) - 1, 1.0), 1.0)
    products, moves = np.zeros(rows.shape), np.zeros(rows.shape)
    beyond: Flags = np.zeros(rows.shape, dtype=bool)
    width = 2 if dtype == "bf16" else 4
    passes = 3 + again
    for sparse in {model.is_sparse(layer) for layer in range(model.layers)}:
        layers = sum(model.is_sparse(layer) == sparse for layer in range(model.layers))
        # Products of a layer keep their shape from one token to the next: only rows change.
        work = layer_work(model, Layout(), 1.0, sparse=sparse, fused=False, width=width)
        for product in work.products:
            of_rows = rows * product.rows
            timing = gemm_s(device, of_rows, product.columns, product.inner, dtype)
            products += layers * passes * product.count * timing.s
            beyond |= timing.extrapolated
        moves += layers * passes * stream_s(device, work.moved_bytes * rows).s
    head = head_work(model, Layout(), 1.0)
    timing = gemm_s(device, rows, head.columns, head.inner, dtype)
    products += 3 * timing.s
    beyond |= timing.extrapolated
    kind = {
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_width": model.head_width,
    }
    attention = np.zeros(rows.shape)
    mix, count_of = _mix(record)
    alike = (mix**2 * count_of).sum() / (mix * count_of).sum() if len(mix) else 1.0
    for backward, times in ((False, 1 + again), (True, 1)):
        timing = attention_s(
            device, length, dtype=dtype, backward=backward, pack_tokens=rows, **kind
        )
        differs = 1.0
        if len(mix):
            both = attention_s(device, [alike, *mix], dtype=dtype, backward=backward, **kind).s
            differs = (both[1:] * count_of).sum() / (both[0] * (mix * count_of).sum() / alike)
        attention += times * model.layers * timing.s * rows / length * differs
        beyond |= timing.extrapolated
    if (beyond & usable).any():
        _refuse(record.folder, rows[usable], length[usable])
    columns = np.stack([products, attention, moves], -1) * count[..., None]
    return np.asarray(np.where(usable[..., None], columns, np.nan))


def _mix(record: RunRecord) -> tuple[Floats, Floats]:
    """Lengths of the corpus's documents, cut to windows, and how many of each; none if unknown."""
    found = record.start.corpus.get("histogram")
    pack = record.start.spec["pack"]
    if not found or pack["cut"] != "documents":
        return np.zeros(0), np.zeros(0)
    count, tokens = (np.array(found[key], dtype=np.float64) for key in ("documents", "tokens"))
    mean = tokens[count > 0] / count[count > 0]
    window = float(pack["context_tokens"])
    wholes, rest = np.floor(mean / window), mean % window
    lengths = np.concatenate([np.full(len(mean), window), np.maximum(rest, 1.0)])
    return lengths, np.concatenate([wholes, np.ones(len(mean))]) * np.tile(count[count > 0], 2)


def _refuse(folder: Path, rows: Floats, length: Floats) -> None:
    raise SpecError(
        f"{folder} has micro-batches of {rows.min():,.0f} to {rows.max():,.0f} tokens over "
        f"documents of about {length.min():,.0f} to {length.max():,.0f}, which with its widths is "
        f"more or less than was measured, and curves are not read beyond their ends. Measure its "
        f'sizes: "equipoise calibrate RUN.toml" with the run.toml of that run.'
    )


def _fit(columns: Floats, measured: Floats) -> npt.NDArray[np.float64]:
    """Least squares of relative errors, each factor held at 1 by how much the steps scatter."""
    shares = (columns / measured[..., None]).reshape(-1, columns.shape[-1])
    least = _HOLD * len(shares)
    loose = _held_fit(shares, least)
    scatter = float(((shares @ loose - 1.0) ** 2).sum()) / max(1, len(shares) - len(loose))
    return np.maximum(_held_fit(shares, max(least, scatter / _SPREAD**2)), 0.0)


def _held_fit(shares: Floats, hold: float) -> npt.NDArray[np.float64]:
    """Factors whose columns come to 1 in every row, each held at 1."""
    count = shares.shape[1]
    left = np.concatenate([shares, np.sqrt(hold) * np.eye(count)])
    right = np.concatenate([np.ones(len(shares)), np.sqrt(hold) * np.ones(count)])
    return np.asarray(np.linalg.lstsq(left, right, rcond=None)[0])


def _draw(columns: Floats, measured: Floats, seed: int) -> npt.NDArray[np.float64]:
    """Factors of steps drawn with replacement, [draw, curve]."""
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(measured), (_DRAWS, len(measured)))
    return np.stack([_fit(columns[pick], measured[pick]) for pick in picks])
