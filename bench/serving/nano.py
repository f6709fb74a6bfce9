"""Nano-batches on SmolLM2-135M: each kind of iteration as a whole, and overlapped on two lanes.

Sides, interleaved round by round in one process on all cores:
    whole                           all rows of an iteration through each layer, on all cores
    one after another               the same two nano-batches without overlap: what cutting costs
    overlapped                      in the searched order, if it has two operations at a time

``beside`` is what an operation takes on one lane while the other lane runs another, over what it
takes alone. Predicted gains are the search's, from operations timed alone and these factors.
The model's first layers are run, on decode contexts and prompts of the sizes below.
"""

import json
import statistics
import sys
from typing import Any

import torch

from bench.lib.stamp import LoadStamp, environment, spread
from bench.serving.engine import smollm2
from equipoise.observe.machine import usable_cores
from equipoise.schedule.nano.schedule import sequential
from equipoise.serve.engine.calibrate import DTYPES
from equipoise.serve.engine.forward import ChunkPass, PagedDecoder
from equipoise.serve.engine.fused import FusedDecoder
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.generate import build_decoder
from equipoise.serve.nano.choice import KINDS, NanoChoice, NanoCosts, NanoOrder
from equipoise.serve.nano.lanes import Lanes
from equipoise.serve.nano.measure import NanoProbe, measure_nano, time_call
from equipoise.serve.nano.run import run_order
from equipoise.serve.source import TrainedModel, open_model

LAYERS, ROUNDS = 6, 7
PAGES, PAGE = 2048, 16


def cut(order: NanoOrder) -> NanoOrder:
    """The same nano-batches, one operation after another."""
    return NanoOrder(order.parts, order.graph, sequential(order.graph), order.gain)


def compare(paged: PagedDecoder, lanes: Lanes, costs: NanoCosts, kind: str) -> dict[str, Any]:
    """Seconds of all sides for one kind of iteration."""
    chunks = NanoProbe(paged, lanes).iteration(kind)
    order = NanoChoice(LAYERS, costs).choose(chunks)
    if order is None:
        return {"not cut": len(chunks)}
    tokens = [at % 7 for at in range(sum(each.tokens for each in chunks))]
    sides = {
        "whole": lambda: ChunkPass(paged, chunks, tokens).run(LAYERS),
        "one after another": lambda: run_order(
            paged, lanes, cut(order), chunks, tokens, layers=LAYERS
        ),
        "overlapped": lambda: run_order(paged, lanes, order, chunks, tokens, layers=LAYERS),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    with torch.no_grad():
        wanted = sides["whole"]()
        apart = float((sides["overlapped"]() - wanted).abs().max() / wanted.abs().max())
        for _ in range(ROUNDS):
            for name, side in sides.items():
                taken[name].append(time_call(side))
    medians = {name: statistics.median(each) for name, each in taken.items()}
    return {
        "tokens": len(tokens),
        "sequences": len(chunks),
        "seconds": {name: spread(each) for name, each in taken.items()},
        "gain": round(medians["whole"] / medians["overlapped"], 3),
        "gain of overlapping alone": round(medians["one after another"] / medians["overlapped"], 3),
        "predicted gain": round(order.gain, 3),
        "predicted_s": order.schedule.seconds,
        "largest difference": apart,
    }


def side(trained: TrainedModel, dtype: torch.dtype, *, is_invariant: bool) -> dict[str, Any]:
    """One precision and mode."""
    decoder = FusedDecoder(build_decoder(trained, dtype))
    pool = KvPool(
        decoder.model, pages=PAGES, page_tokens=PAGE, dtype=dtype, device=torch.device("cpu")
    )
    paged = PagedDecoder(decoder, pool, is_invariant=is_invariant)
    lanes = Lanes(torch.get_num_threads())
    try:
        report = measure_nano(paged, lanes, most_busy_cores=float("inf"))
        costs = report.costs
        if costs is None:
            return {"engine says": report.words}
        return {
            "engine says": report.words,
            "beside": {f"{one} beside {other}": round(x, 3) for one, other, x in costs.beside},
            "costs": {
                "both lanes": {name: getattr(costs.both, name) for name in _CURVES},
                "one lane": {name: getattr(costs.one, name) for name in _CURVES},
            },
            **{kind: compare(paged, lanes, costs, kind) for kind in KINDS},
        }
    finally:
        lanes.close()


_CURVES = ("dense", "decode", "prefill")


def measure() -> dict[str, Any]:
    """Every precision and mode."""
    torch.set_num_threads(len(usable_cores()))
    trained, stamp = open_model(smollm2()), LoadStamp()
    return {
        "what": f"SmolLM2-135M, {LAYERS} layers, medians of {ROUNDS} rounds (measured)",
        "threads": torch.get_num_threads(),
        "sides": {
            DTYPES[dtype] + (" invariant" if is_invariant else ""): side(
                trained, dtype, is_invariant=is_invariant
            )
            for dtype in (torch.bfloat16, torch.float32)
            for is_invariant in (False, True)
        },
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
