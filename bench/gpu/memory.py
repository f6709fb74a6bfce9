"""Peak memory of a step on one device, as forecast and as its allocator counts it."""

import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.lib.device import device_facts, run_here
from bench.lib.stamp import environment
from equipoise.comm.group import Ranks, join
from equipoise.cost.memory.forecast import forecast_memory
from equipoise.data.cache.store import TokenStore
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.device.memory import forget_peak, held_bytes, overhead_of, peak_bytes
from equipoise.observe.journal import EventSink
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.apply import apply_axes
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import Precision, Recompute, TrainSpec
from equipoise.train.step import StepRunner

MODEL = ModelSpec(layers=8, hidden=1024, heads=16, kv_heads=8, ffn=2816, vocab=32000, head_width=64)


@dataclass(frozen=True, slots=True)
class Case:
    """One setting."""

    tokens: int
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    zero: int = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run."""

    model: ModelSpec = MODEL
    document_tokens: int = 1024
    cases: tuple[Case, ...] = (
        Case(4096),
        Case(16384),
        Case(16384, recompute="selective"),
        Case(16384, recompute="full"),
        Case(16384, zero=0),
        Case(16384, zero=3),
        Case(4096, precision="fp32"),
    )


def measure(device: torch.device, sizes: Sizes | None = None) -> dict[str, Any]:
    """Run every case."""
    sizes = sizes or Sizes()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        store = dist.FileStore(str(Path(name) / "store"), 1)
        with join(store, 0, 1, device) as ranks:
            for case in sizes.cases:
                rows.append(_measure(case, sizes, ranks))
                gc.collect()
    errors = [row["error"] for row in rows]
    return {
        "what": "peak bytes of two steps of one micro-batch, forecast and counted by the allocator",
        **device_facts(device),
        "mean_absolute_error": float(np.abs(errors).mean()),
        "rows": rows,
        "environment": environment(),
    }


def _measure(case: Case, sizes: Sizes, ranks: Ranks) -> dict[str, Any]:
    forget_peak(ranks.device)
    before = held_bytes(ranks.device)
    _run(case, sizes, ranks)
    measured = peak_bytes(ranks.device) - before
    forecast = forecast_memory(
        sizes.model,
        Layout(dp=1, zero=case.zero),
        tokens=case.tokens,
        precision=case.precision,
        recompute=case.recompute,
        micro_batches=1,
        overhead=overhead_of(ranks.device),
    )
    return {
        "tokens": case.tokens,
        "precision": case.precision,
        "recompute": case.recompute,
        "zero": case.zero,
        "forecast_bytes": forecast.total_bytes,
        "measured_bytes": measured,
        "error": forecast.total_bytes / max(1, measured) - 1,
        "terms": forecast.terms,
    }


def _run(case: Case, sizes: Sizes, ranks: Ranks) -> None:
    """Two steps: the first makes the optimizer's moments."""
    decoder = Decoder(sizes.model)
    initialize(decoder, 0)
    sharded = apply_axes(
        decoder.to(ranks.device),
        ranks,
        zero=case.zero,
        precision=case.precision,
        recompute=case.recompute,
    )
    documents = case.tokens // sizes.document_tokens
    lengths = np.full(documents, sizes.document_tokens)
    drawn = np.random.default_rng(0).integers(0, sizes.model.vocab, case.tokens)
    store = TokenStore.in_memory(drawn.astype(np.uint32), lengths, sizes.model.vocab)
    runner = StepRunner(sharded, make_adamw(decoder, TrainSpec()), store, ranks, EventSink())
    index = np.arange(documents, dtype=np.int64)
    packed = PackedStep(
        "by-work", ((MicroBatch(np.stack((index, np.zeros_like(index), lengths), axis=1)),),)
    )
    for step in (1, 2):
        runner.run(
            packed, step=step, rate=1e-3, clip_norm=1.0, last_good=lambda: None, stop_asked=False
        )


if __name__ == "__main__":
    run_here(measure)
