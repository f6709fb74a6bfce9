"""Experts behind a shortcut on two ranks: their rows beside attention, or in turn with it.

The same decoder and the same numbers, forward and backward, on a link of limited rate (a network
namespace behind a token bucket) and on loopback itself, where the cores that compute also send.
Sides in random order each round: ``beside``, where rows leave before attention and outputs before
the shared expert, and ``in turn``, where attention and the shared expert wait for them. Seconds are
those of the slower rank; ``waited_s`` is what it waited for rows.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.lib.limited import run_on_link
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.parallel.expert.exchange import ExpertExchange, spread_experts
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

MODEL = ModelSpec(
    layers=2,
    hidden=256,
    heads=4,
    kv_heads=4,
    ffn=1024,
    vocab=512,
    head_width=64,
    experts=8,
    top_k=2,
    expert_ffn=128,
    shared_ffn=1024,
    shortcut=True,
)
TOKENS, ROUNDS, RATES_MBIT = 1024, 9, (400, 800, 1600, 0)


def _set_beside(decoder: Decoder, travels: bool) -> None:
    for each in decoder.modules():
        if isinstance(each, MixtureOfExperts):
            whole = partial(MixtureOfExperts.start, each)
            each.start = whole if travels else partial(_stay, whole)  # type: ignore[method-assign]


def _stay(start: Callable[..., object], x: torch.Tensor, *, travels: bool = False) -> object:
    del travels
    return start(x, travels=False)


def on_rank(ranks: Ranks) -> dict[str, object]:
    """Both sides on this link."""
    torch.set_num_threads(1)
    decoder = Decoder(MODEL)
    initialize(decoder, 0)
    ledgers = spread_experts(
        decoder, Mesh.join(ranks, Layout(dp=2, ep=2, zero=1)), policy=MixedPrecisionPolicy()
    )
    tokens = torch.randint(MODEL.vocab, (TOKENS,), generator=torch.Generator().manual_seed(0))
    losses: dict[str, float] = {}
    seconds: dict[str, list[float]] = {"beside": [], "in turn": []}
    waits: dict[str, list[float]] = {"beside": [], "in turn": []}
    drawn = random.Random(0)
    for turn in range(ROUNDS + 1):
        for side in drawn.sample(list(seconds), 2):
            _set_beside(decoder, side == "beside")
            exchanges = [
                each.exchange for each in decoder.modules() if isinstance(each, MixtureOfExperts)
            ]
            ranks.barrier()
            began = time.perf_counter()
            loss = decoder(tokens, (TOKENS,), labels_T=tokens) / TOKENS
            loss.backward()
            passed = float(ranks.gather_floats([time.perf_counter() - began]).max())
            decoder.zero_grad(set_to_none=True)
            losses[side] = float(loss.detach())
            waited = 0.0
            for each in exchanges:
                assert isinstance(each, ExpertExchange)
                waited += each.travelled.waited_s
                each.travelled.beside_s = each.travelled.waited_s = 0.0
            if turn:
                seconds[side].append(passed)
                waits[side].append(float(ranks.gather_floats([waited]).max()))
    sent = sum(int(each.sent_bytes.sum()) for each in ledgers)
    return {
        "loss_is_the_same": losses["beside"] == losses["in turn"],
        "step_s": {side: spread(each) for side, each in seconds.items()},
        "waited_s": {side: spread(each) for side, each in waits.items()},
        "speedup": statistics.median(seconds["in turn"]) / statistics.median(seconds["beside"]),
        "sent_bytes_a_step": sent // (2 * (ROUNDS + 1)),
    }


def measure() -> dict[str, object]:
    """Every link."""
    stamp = LoadStamp()
    links = {
        f"{rate} Mbit/s" if rate else "loopback": run_on_link("bench.overlap.shortcut", rate)
        for rate in RATES_MBIT
    }
    return {
        "bench": "overlap.shortcut",
        "environment": environment(),
        "model": {"hidden": MODEL.hidden, "experts": MODEL.experts, "tokens": TOKENS},
        "links": links,
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    inside = sys.argv[1:] == ["inside"]
    json.dump(run_ranks(2, on_rank)[0] if inside else measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
