"""Compare a run's measured seconds with this machine's curves, and name the curve that is wrong.

Why
    A calibration that nobody compares with a run is a rumour. A journal says how long each rank
    computed in each step, over how many tokens and pairs; the curves predict the time of
    products, attention and moves of those sizes. Steps differ in their mix, which separates the
    curves.

What it decides
    Each curve's *factor*, measured over predicted, by ridge regression of relative errors over
    all ranks and steps, pulled towards 1 as firmly as the steps scatter; its 95% interval is a
    bootstrap over steps. A curve is *wrong* if its interval leaves 1 by more than a tenth; of
    several, the one that moves the most seconds is named. Documents are assumed to have equal
    lengths that give the rank's tokens and pairs. A run beyond the measured sizes is refused.

Kept true (tests/unit/cost/test_compare.py)
    A journal made with one factor changed yields that factor and names it; one made from the
    unchanged curves names none and moves no factor far, however its steps scatter.
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
from equipoise.spec.program.stack import Stack

CURVES = ("products", "attention", "moves")

_HOLD = 1e-4
"""Least weight of the pull towards 1, against the squared relative error of one step: a curve
with a hundredth of a step's time keeps its factor unless the steps insist."""

_SPREAD = 0.3
"""Prior spread of factors: how far equal steps on one machine differed between sessions
(``bench/local/calibrate.py``)."""

_DRAWS = 200
_WRONG = 0.1
_ALIKE = 0.2
"""If the log ratio of moves to products varies by less than this, nothing separates them."""

_ADAMW_BYTES = 28
_STACK = Stack(fused=False)
"""Bytes per weight: read it, its gradient and two moments, write it and the moments, in fp32."""


@dataclass(frozen=True, slots=True)
class Factor:
    """Measured over predicted time of one curve."""

    name: str
    predicted_s: float
    """Predicted time of the median step's slowest rank [s]."""
    factor: float
    low: float
    high: float

    @property
    def is_wrong(self) -> bool:
        """Whether the interval leaves 1 by more than a tenth."""
        return self.low > 1 + _WRONG or self.high < 1 - _WRONG


@dataclass(frozen=True, slots=True)
class CurveComparison:
    """A run compared with the curves."""

    steps: int
    ranks: int
    compute_predicted_s: float
    """Predicted processor time of the slowest rank's forwards and backwards, median over steps."""
    compute_measured_s: float
    step_errors: Floats
    """Predicted over measured time, minus 1, of each step's slowest rank."""
    optimizer_predicted_s: float
    optimizer_measured_s: float
    curves: tuple[Factor, ...]
    is_told_apart: bool
    """Whether products and moves vary in their share of the steps; if not, they share the error."""

    @property
    def mape(self) -> float:
        """Mean absolute relative error of a step's compute time."""
        return float(np.abs(self.step_errors).mean())

    @property
    def wrong(self) -> Factor | None:
        """The wrong curve that moves the most seconds; None if none is wrong."""
        candidates = [each for each in self.curves if each.is_wrong]
        return max(
            candidates, key=lambda each: abs(each.factor - 1) * each.predicted_s, default=None
        )

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


def fitted(file: DeviceFile, comparison: CurveComparison) -> DeviceFile:
    """A device file whose curves are corrected by a run: new factors on top of the old."""
    old = dict(file.residuals)
    new = {each.name: old.get(each.name, 1.0) * each.factor for each in comparison.curves}
    return dataclasses.replace(file, residuals=tuple((old | new).items()))


def compare_run(
    record: RunRecord, model: ModelSpec, device: DeviceSpec, *, seed: int = 0
) -> CurveComparison:
    """Compare a data-parallel run's journal with a device's curves.

    ``seed`` is that of the bootstrap.

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
            f"{record.folder} has {len(measured)} complete steps after its first; a comparison "
            f"needs 3 or more. Train it further."
        )
    predicted = columns.sum(2)
    slowest = predicted.argmax(1)
    rows = np.arange(len(slowest))
    factors = _fit(columns, measured)
    draws = _draw(columns, measured, seed)
    update_s = np.nanmedian(optimizer_s(record)[kept])
    shards = record.ranks if record.start.spec["layout"]["zero"] else 1
    own_weights = model.params / shards
    return CurveComparison(
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
            f"micro-batch, which curves of one core do not cover. Compare a run with only "
            f"data-parallel ranks."
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
    """Predicted seconds of each curve, [step, rank, curve]; NaN where the pack is unknown."""
    tokens, count = record.rank_tokens, np.maximum(record.micro_batches, 1.0)
    pairs = (record.rank_flop - 6.0 * model.matmul_params * tokens) / (3.0 * pair_flop(model))
    train = record.start.spec["train"]
    if train["precision"] not in device.dtypes:
        raise SpecError(
            f"The run multiplied in {train['precision']}, and {device.name} has curves of "
            f"{' and '.join(device.dtypes)}. Compare a run in one of these."
        )
    dtype: Dtype = train["precision"]
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
        # Only the rows of a layer's products depend on the number of tokens.
        work = layer_work(model, Layout(), 1.0, sparse=sparse, stack=_STACK, width=width)
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
    """Lengths of the corpus's documents, cut to windows, with counts; empty if unknown."""
    histogram = record.start.corpus.get("histogram")
    pack = record.start.spec["pack"]
    if not histogram or pack["cut"] != "documents":
        return np.zeros(0), np.zeros(0)
    count, tokens = (np.array(histogram[key], dtype=np.float64) for key in ("documents", "tokens"))
    mean = tokens[count > 0] / count[count > 0]
    window = float(pack["context_tokens"])
    wholes, rest = np.floor(mean / window), mean % window
    lengths = np.concatenate([np.full(len(mean), window), np.maximum(rest, 1.0)])
    return lengths, np.concatenate([wholes, np.ones(len(mean))]) * np.tile(count[count > 0], 2)


def _refuse(folder: Path, rows: Floats, length: Floats) -> None:
    raise SpecError(
        f"{folder} has micro-batches of {rows.min():,.0f} to {rows.max():,.0f} tokens over "
        f"documents of about {length.min():,.0f} to {length.max():,.0f} tokens; with its widths "
        f"that is outside the measured sizes. Measure them: "
        f'"equipoise calibrate RUN.toml" with the run.toml of that run.'
    )


def _fit(columns: Floats, measured: Floats) -> npt.NDArray[np.float64]:
    """Ridge regression of relative errors, pulled towards 1 as firmly as the steps scatter."""
    shares = (columns / measured[..., None]).reshape(-1, columns.shape[-1])
    least = _HOLD * len(shares)
    loose = _held_fit(shares, least)
    scatter = float(((shares @ loose - 1.0) ** 2).sum()) / max(1, len(shares) - len(loose))
    return np.maximum(_held_fit(shares, max(least, scatter / _SPREAD**2)), 0.0)


def _held_fit(shares: Floats, hold: float) -> npt.NDArray[np.float64]:
    """Factors with which every row of ``shares`` sums to 1, pulled towards 1."""
    count = shares.shape[1]
    left = np.concatenate([shares, np.sqrt(hold) * np.eye(count)])
    right = np.concatenate([np.ones(len(shares)), np.sqrt(hold) * np.ones(count)])
    return np.asarray(np.linalg.lstsq(left, right, rcond=None)[0])


def _draw(columns: Floats, measured: Floats, seed: int) -> npt.NDArray[np.float64]:
    """Factors fitted to steps drawn with replacement, [draw, curve]."""
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(measured), (_DRAWS, len(measured)))
    return np.stack([_fit(columns[pick], measured[pick]) for pick in picks])
