"""A run beside the curves: the one that is wrong is named, and its factor found."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.compare import _foresee, compare_run
from equipoise.cost.work import causal_pairs, pair_flop
from equipoise.spec.device.file import AttentionPoint, GemmPoint
from equipoise.spec.device.here import calibrated_device, cpu_model
from equipoise.spec.device.spec import DeviceSpec
from equipoise.spec.model.presets import ModelSpec
from support.device_files import A_FILE, about, written

MODEL = ModelSpec(layers=2, hidden=64, heads=4, kv_heads=4, ffn=96, vocab=300, head_width=16)
FILE = dataclasses.replace(
    A_FILE,
    machine=cpu_model(),
    gemm=tuple(
        GemmPoint("fp32", m, n, k, about(1e-6 + 2.0 * m * n * k / 1e11))
        for m in (16, 8192)
        for n in (16, 512)
        for k in (16, 512)
    ),
    attention=tuple(
        AttentionPoint("fp32", tokens, 16, about(2e-9 * tokens**2), about(6e-9 * tokens**2))
        for tokens in (8, 8192)
    ),
)


@pytest.fixture
def device(tmp_path: Path) -> DeviceSpec:
    return calibrated_device(FILE, written(tmp_path, FILE))


def _record(lengths: list[list[list[int]]], **layout: int) -> SimpleNamespace:
    """A journal over the documents of each step and rank, one micro-batch each."""
    tokens = np.array([[sum(docs) for docs in step] for step in lengths], dtype=float)
    pairs = np.array([[causal_pairs(np.array(docs)).sum() for docs in step] for step in lengths])
    steps, ranks = tokens.shape
    spans = SimpleNamespace(
        names=("forward", "optimizer"),
        name=np.ones(steps, dtype=np.int64),
        step=np.arange(1.0, steps + 1),
        duration_s=np.full(steps, 0.25),
    )
    return SimpleNamespace(
        folder=Path("runs/x"),
        start=SimpleNamespace(
            spec={
                "layout": {"zero": 1} | layout,
                "pack": {"cut": "documents", "context_tokens": 4096},
                "train": {"precision": "fp32", "recompute": "none"},
            },
            corpus={},
        ),
        ranks=ranks,
        step=np.arange(1, steps + 1),
        rank_tokens=tokens,
        rank_flop=6.0 * MODEL.matmul_params * tokens + 3.0 * pair_flop(MODEL) * pairs,
        micro_batches=np.ones((steps, ranks)),
        spans=(spans,) * ranks,
        busy_s=np.full((steps, ranks), np.nan),
    )


def _mixed(steps: int = 14, ranks: int = 2) -> SimpleNamespace:
    generator = np.random.default_rng(1)
    lengths = [
        [[int(n)] * (4096 // int(n)) for n in row]
        for row in 2 ** generator.integers(4, 13, (steps, ranks))
    ]
    return _record(lengths)


@pytest.mark.parametrize(
    ("factors", "wrong"),
    [((1.0, 1.0, 1.0), None), ((1.0, 1.6, 1.0), "attention"), ((1.5, 1.0, 1.0), "products")],
)
def test_the_wrong_curve_is_named_and_its_factor_found(device, factors, wrong) -> None:
    record = _mixed()
    noise = np.random.default_rng(2).normal(1.0, 0.01, record.busy_s.shape)
    record.busy_s = (_foresee(record, MODEL, device) * np.array(factors)).sum(2) * noise
    found = compare_run(record, MODEL, device)
    assert (found.steps, found.ranks) == (13, 2)
    assert (found.wrong and found.wrong.name) == wrong
    products, attention, moves = found.curves
    assert attention.factor == pytest.approx(factors[1], abs=0.05)
    assert not found.is_told_apart  # products and moves share what either is off
    both = sum(each.predicted_s * each.factor for each in (products, moves))
    wanted = products.predicted_s * factors[0] + moves.predicted_s * factors[2]
    assert both == pytest.approx(wanted, rel=0.05)
    assert all(each.low <= each.factor <= each.high for each in found.curves)
    assert found.optimizer_measured_s == 0.25
    if wrong is None:
        assert found.mape < 0.02


def test_steps_alike_leave_the_factors_near_one_another(device) -> None:
    record = _record([[[256] * 8]] * 8)
    record.busy_s = _foresee(record, MODEL, device).sum(2) * 1.3
    found = compare_run(record, MODEL, device)
    assert found.mape == pytest.approx(1 - 1 / 1.3, abs=1e-6)
    total = sum(each.factor * each.predicted_s for each in found.curves)
    assert total == pytest.approx(1.3 * sum(each.predicted_s for each in found.curves), rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_scatter_more_than_they_differ_move_no_factor_far(device, seed: int) -> None:
    """Whoever keeps these factors prices other mixes by them."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(200, 400, (9, 2, 8)).tolist()
    record = _record(lengths)
    foreseen = _foresee(record, MODEL, device).sum(2)
    record.busy_s = foreseen * draws.normal(1.0, 0.1, foreseen.shape)
    found = compare_run(record, MODEL, device)
    assert all(abs(each.factor - 1) < 0.2 for each in found.curves)
    assert found.wrong is None


def test_a_mix_of_lengths_costs_what_its_documents_cost(device) -> None:
    # Attention of these curves goes with the square of the length, so a mix costs as one length
    # with the same tokens and squares does; a curve that flattens makes it cost less.
    documents = [64] * 32 + [6144]
    record = _record([[[64] * 32 + [4096, 2048]]] * 4)
    record.start.corpus["histogram"] = {
        "documents": [0, 32, 1],
        "tokens": [0, 32 * 64, 6144],
    }
    assert sum(documents) == record.rank_tokens[0, 0]
    attention = _foresee(record, MODEL, device)[0, 0, 1]
    own = sum(4 * 2 * 8e-9 * length**2 for length in (*[64] * 32, 4096, 2048))
    assert attention == pytest.approx(own, rel=0.02)


def test_runs_that_cannot_be_compared(device) -> None:
    shared = _record([[[64]]] * 4, cp=2, tp=2)
    message = (
        "runs/x has layout.cp = 2, layout.tp = 2: its ranks wait for each other inside a "
        "micro-batch, which curves of one core do not cover. Compare a run with only "
        "data-parallel ranks."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        compare_run(shared, MODEL, device)
    short = _record([[[64]]] * 3)
    short.busy_s[:] = 1.0
    message = (
        "runs/x has 2 complete steps after its first; a comparison needs 3 or more. Train it "
        "further."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        compare_run(short, MODEL, device)
    long = _record([[[16_384]]] * 5)
    message = (
        "runs/x has micro-batches of 16,384 to 16,384 tokens over documents of about 16,384 to "
        "16,384 tokens; with its widths that is outside the measured sizes. Measure them: "
        '"equipoise calibrate RUN.toml" with the run.toml of that run.'
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        compare_run(long, MODEL, device)


def test_a_precision_without_curves_is_refused(device: DeviceSpec) -> None:
    record = _record([[[512]]] * 5)
    record.start.spec["train"]["precision"] = "fp8"
    names = " and ".join(device.dtypes)
    with pytest.raises(SpecError) as caught:
        compare_run(record, MODEL, device)
    assert str(caught.value) == (
        f"The run multiplied in fp8, and this-cpu has curves of {names}. Compare a run in one of "
        "these."
    )
