"""Experts in a file on two ranks: fetched two layers ahead, or on demand, or all in memory.

The same decoder and the same steps of AdamW on the least memory that works, as the machine is
(loopback, and a file that the page cache holds), and on a link behind a token bucket with a file
that is read and written at a limited rate: its thread sleeps. Sides in random order each round:

    ahead        a layer is gathered while the one before it computes, and read before that
    on demand    both when it is needed
    in memory    ZeRO 3, which gathers ahead and reads nothing

Seconds are those of the slower rank; ``waited`` is the share of its step that it waited for the
file and for gathered layers.
"""

import json
import random
import statistics
import sys
import time

import torch
from torch import Tensor

from bench.lib.limited import run_on_link
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mesh import Mesh
from equipoise.memory.slices import SliceFile
from equipoise.nn.decoder import Decoder, initialize
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.apply import apply_axes
from equipoise.schedule.expert.prefetch import Ahead
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import ExpertsSpec, TrainSpec

MODEL = ModelSpec(
    layers=6,
    hidden=256,
    heads=4,
    kv_heads=4,
    ffn=1024,
    vocab=512,
    head_width=64,
    experts=8,
    top_k=2,
    expert_ffn=256,
)
TOKENS, ROUNDS = 512, 5
SETTINGS = {"as it is": (0, 0), "1600 Mbit/s, 400 MB/s": (1600, 400)}
"""Rates of the link [Mbit/s] and of the file [MB/s]; 0: whatever they are."""
SIDES = {"ahead": None, "on demand": Ahead(0, 0), "in memory": None}
EXPERT_BYTES = 4 * 3 * MODEL.hidden * MODEL.expert_ffn
MEMORY_BYTES = 2 * 3 * EXPERT_BYTES * MODEL.experts // 2
"""Two layers of half of the experts, with moments."""


def _limit_file(rate: int) -> None:
    """Let the file's thread sleep for what its bytes take at a rate [MB/s]."""
    for name in ("read", "write"):
        plain = getattr(SliceFile, name)

        def slowly(self: SliceFile, part: str, tensor: Tensor, plain: object = plain) -> None:
            began = time.perf_counter()
            plain(self, part, tensor)  # type: ignore[operator]
            left = tensor.nbytes / (rate * 1e6) - (time.perf_counter() - began)
            time.sleep(max(0.0, left))

        setattr(SliceFile, name, slowly)


def on_rank(ranks: Ranks, rate: int) -> dict[str, object]:
    """Steps of every side, in random order."""
    torch.set_num_threads(1)
    if rate:
        _limit_file(rate)
    mesh = Mesh.join(ranks, Layout(dp=2, zero=3))
    sides = {}
    for name, ahead in SIDES.items():
        decoder = Decoder(MODEL)
        initialize(decoder, 0)
        mib = 0.0 if name == "in memory" else MEMORY_BYTES / 2**20
        sharded = apply_axes(
            decoder,
            ranks,
            zero=3,
            precision="fp32",
            mesh=mesh,
            small_bytes=0,
            experts=ExpertsSpec(memory_mib=mib),
        )
        if sharded.tiers is not None:
            sharded.tiers._ahead = ahead
        sides[name] = sharded, make_adamw(decoder, TrainSpec(), sharded.tiers)
    tokens = torch.randint(MODEL.vocab, (TOKENS,), generator=torch.Generator().manual_seed(0))
    losses: dict[str, list[float]] = {name: [] for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    waited: dict[str, list[float]] = {name: [] for name in SIDES}
    counts: dict[str, dict[str, int]] = {}
    drawn = random.Random(0)
    for turn in range(ROUNDS + 1):
        for name in drawn.sample(list(SIDES), len(SIDES)):
            sharded, optimizer = sides[name]
            sharded.prepare_micro_batch(last=True)
            ranks.barrier()
            began = time.perf_counter()
            loss = sharded.decoder(tokens, (TOKENS,), labels_T=tokens) / TOKENS
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            took = None if sharded.tiers is None else sharded.tiers.take()
            own_s = time.perf_counter() - began
            losses[name].append(float(loss.detach()))
            share = 0.0
            if took is not None:
                share = (took.storage_wait_s + took.network_wait_s) / own_s
                counts[name] = {
                    "read_bytes": took.read_bytes,
                    "planned_read_bytes": took.planned_read_bytes,
                    "written_bytes": took.written_bytes,
                    "gathered_bytes": took.gathered_bytes,
                    "planned_gathered_bytes": took.planned_gathered_bytes,
                    "peak_bytes": took.peak_bytes,
                }
            worst = ranks.gather_floats([own_s, share]).max(0).values.tolist()
            if turn:
                seconds[name].append(worst[0])
                waited[name].append(worst[1])
    ahead_s = statistics.median(seconds["ahead"])
    return {
        "loss_is_the_same": losses["ahead"] == losses["on demand"],
        "loss_error_to_memory": max(
            abs(one - other)
            for one, other in zip(losses["ahead"], losses["in memory"], strict=True)
        ),
        "step_s": {name: spread(each) for name, each in seconds.items()},
        "waited": {name: spread(waited[name]) for name in ("ahead", "on demand")},
        "over_ahead": {name: statistics.median(each) / ahead_s for name, each in seconds.items()},
        "a_step": counts,
    }


def measure() -> dict[str, object]:
    """Every setting."""
    stamp = LoadStamp()
    settings = {}
    for name, (link, file) in SETTINGS.items():
        settings[name] = run_on_link(f"bench.overlap.tiers {file}", link)
    layers = MODEL.layers * EXPERT_BYTES * MODEL.experts // 2
    return {
        "bench": "overlap.tiers",
        "environment": environment(),
        "model": {"hidden": MODEL.hidden, "experts": MODEL.experts, "tokens": TOKENS},
        "memory_bytes": MEMORY_BYTES,
        "experts_bytes_of_a_rank": 3 * layers,
        "settings": settings,
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    inside = sys.argv[2:] == ["inside"]
    made = run_ranks(2, on_rank, int(sys.argv[1]))[0] if inside else measure()
    json.dump(made, sys.stdout, indent=1)
    sys.stdout.write("\n")
