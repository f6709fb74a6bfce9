"""Pipelines on two ranks, one core each: real bubbles beside predicted ones, and a peer.

- bubbles: the same eight micro-batches of unequal lengths under each schedule. Prices are
  medians of what each instruction took in the first steps; the schedule's replay of those
  prices is the prediction, and later steps are the measurement. Schedules alternate.
- packing: the same pieces as micro-batches of equal tokens (in-order) and of equal work
  (by-work), 1F1B, alternating; the prediction is the curve's alone, measured before.
- peer: ``torch.distributed.pipelining`` on equal micro-batches of the same stages, alternating.
- split: what a backward in halves costs over a whole one, on one rank.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib.corpus import lognormal_step
from bench.lib.stamp import LoadStamp, environment, spread
from bench.peers.pipeline import (
    MICRO_BATCHES,
    MODEL,
    STEPS,
    WARM,
    Runner,
    batch_of,
    in_documents,
    peer,
    split_cost,
)
from equipoise.balance.packing.pack import pack_step
from equipoise.balance.stage import price_layers, price_stages, split_model
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.parallel.pipeline.timeline import measured_prices
from equipoise.schedule.pipeline.prices import PipelinePrices, make_prices
from equipoise.schedule.pipeline.replay import PipelineTimeline, replay_pipeline
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.pack import MicroBatch
from equipoise.spec.run.spec import PackSpec, RunSpec
from equipoise.train.curves import obtain_curve
from equipoise.train.process import settle

WINDOW = 2048
UNEVEN = (700, 2600, 300, 1900, 1200, 3000, 500, 1600)
"""Tokens of each micro-batch, in documents of 500 at most."""


def bubbles(ranks: Ranks, strategies: Sequence[str], chunks: int) -> dict[str, Any]:
    """Predicted and measured steps of schedules over the same uneven micro-batches."""
    settle(ranks.rank, pin=True)
    torch.manual_seed(0)
    batches = [batch_of(in_documents(tokens)) for tokens in UNEVEN]
    stages = 2 * chunks
    edges = (0, 4, 8) if chunks == 1 else (0, 2, 4, 6, 8)
    guess = make_prices([list(UNEVEN)] * stages, [list(UNEVEN)] * stages, [list(UNEVEN)] * stages)
    held = np.flatnonzero(write_pipeline(strategies[0], guess, ranks=2).rank_of == ranks.rank)
    runner = Runner(ranks, edges, held.tolist())
    timelines: dict[str, list[PipelineTimeline]] = {name: [] for name in strategies}
    walls: dict[str, list[float]] = {name: [] for name in strategies}
    prices: dict[str, PipelinePrices] = {}
    schedules = {name: write_pipeline(name, guess, ranks=2) for name in strategies}
    for step in range(WARM + STEPS):
        if step == WARM:
            for name in strategies:
                prices[name] = measured_prices(timelines[name][1:], guess)
        for name in strategies if step % 2 else reversed(strategies):
            wall, timeline = runner.step(schedules[name], batches)
            timelines[name].append(timeline)
            walls[name].append(wall)
    rows = {}
    for name in strategies:
        predicted = replay_pipeline(schedules[name], prices[name])
        measured = timelines[name][WARM:]
        makespan = statistics.median(each.makespan_ns for each in measured)
        bubble = statistics.median(each.bubble_rate for each in measured)
        rows[name] = {
            "predicted_bubble": predicted.bubble_rate,
            "measured_bubble": bubble,
            "bubble_ratio (goal 0.9 to 1.1)": bubble / predicted.bubble_rate,
            "predicted_s": predicted.makespan_ns * 1e-9,
            "measured_s": makespan * 1e-9,
            "time_ratio": makespan / predicted.makespan_ns,
            "step_s": spread(walls[name][WARM:]),
        }
    return rows | {"cpu_s": time.process_time()}


def packing(ranks: Ranks) -> dict[str, Any]:
    """In-order against by-work micro-batches of the same pieces; predicted by the curve."""
    settle(ranks.rank, pin=True)
    torch.manual_seed(0)
    pack = PackSpec(
        policy="by-work",
        context_tokens=WINDOW,
        step_tokens=WINDOW * MICRO_BATCHES,
        cut="windows",
    )
    curve = obtain_curve(RunSpec(pack=pack), MODEL, ranks, Path(tempfile.gettempdir()))
    lengths = lognormal_step(pack.step_tokens, seed=3, median=400, sigma=1.6)
    pieces = np.stack([np.arange(len(lengths)), np.zeros_like(lengths), lengths], axis=1)
    micro: dict[str, list[MicroBatch]] = {}
    for policy in ("in-order", "by-work"):
        spec = PackSpec(
            policy=policy,  # type: ignore[arg-type]
            context_tokens=WINDOW,
            step_tokens=pack.step_tokens,
            cut="windows",
        )
        micro[policy] = list(pack_step(pieces, spec, MICRO_BATCHES, curve))
    layer_prices = {name: price_layers(curve, MODEL, each) for name, each in micro.items()}
    split = split_model(layer_prices["by-work"], MODEL, 2)
    schedules, predicted, batches = {}, {}, {}
    for name, each in micro.items():
        prices = price_stages(split, layer_prices[name])
        schedules[name] = write_pipeline("1f1b", prices, ranks=2)
        predicted[name] = replay_pipeline(schedules[name], prices)
        batches[name] = [batch_of(batch.doc_tokens.tolist()) for batch in each]
    runner = Runner(ranks, split.edges.tolist(), [ranks.rank])
    walls: dict[str, list[float]] = {name: [] for name in micro}
    timelines: dict[str, list[PipelineTimeline]] = {name: [] for name in micro}
    for step in range(WARM + STEPS):
        for name in micro if step % 2 else reversed(micro):
            wall, timeline = runner.step(schedules[name], batches[name])
            if step >= WARM:
                walls[name].append(wall)
                timelines[name].append(timeline)
    ratios = [one / other for one, other in zip(walls["in-order"], walls["by-work"], strict=True)]
    expected = predicted["in-order"].makespan_ns / predicted["by-work"].makespan_ns
    measured = statistics.median(ratios)
    return {
        "layers": split.layers.tolist(),
        "micro_batch_tokens": {n: [b.tokens for b in each] for n, each in micro.items()},
        "predicted_s": {n: each.makespan_ns * 1e-9 for n, each in predicted.items()},
        "measured_s": {n: spread(each) for n, each in walls.items()},
        "predicted_bubble": {n: each.bubble_rate for n, each in predicted.items()},
        "measured_bubble": {
            n: statistics.median(t.bubble_rate for t in each) for n, each in timelines.items()
        },
        "measured_ratio": spread(ratios),
        "predicted_ratio": expected,
        "ratio_error (goal 0.05)": measured / expected - 1,
        "cpu_s": time.process_time(),
    }


def measure() -> dict[str, Any]:
    """All four, one after another."""
    stamp = LoadStamp()
    parts: dict[str, Callable[[], Any]] = {
        "bubbles": lambda: run_ranks(2, bubbles, ("gpipe", "1f1b", "zb-h1"), 1),
        "bubbles in a V": lambda: run_ranks(2, bubbles, ("zb-v", "v-half"), 2),
        "packing": lambda: run_ranks(2, packing),
        "torch.distributed.pipelining, 1f1b": lambda: run_ranks(2, peer, "1f1b"),
        "torch.distributed.pipelining, gpipe": lambda: run_ranks(2, peer, "gpipe"),
    }
    ranks_s, rows = 0.0, {}
    for name, run in parts.items():
        answers = run()
        ranks_s += sum(answer.pop("cpu_s") for answer in answers)
        rows[name] = answers[0]
    rows["split"] = run_ranks(1, split_cost)[0]
    return {
        "what": "two ranks, one pinned core each, fp32; 8 layers of width 128, 8 micro-batches",
        **rows,
        "other_load_cores": round(stamp.other_load(ranks_s), 2),
        "environment": environment(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(measure(), sys.stdout, indent=1)
