"""One packed step on one device against transformers and torchtitan: tokens a second, and MFU.

Sides, interleaved round by round, on the same documents, sizes and bf16:
    ours                          the product's own step: pack, sharded model, clip, AdamW
    transformers flattened        its packing collator with flash attention; where that is not
                                  installed, sdpa, which masks the whole row
    transformers one at a time    each document alone, under sdpa
    torchtitan                    its Llama 3 over the packed row, where installed
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.lib.corpus import lognormal_step
from bench.lib.device import bf16_peak, device_facts, run_here
from bench.lib.sides import Side, has, our_side, titan_side, transformers_side
from bench.lib.stamp import environment, spread
from equipoise.comm.group import join
from equipoise.cost.work import count_work
from equipoise.data.cache.store import TokenStore
from equipoise.nn.device.clock import await_device
from equipoise.spec.model.presets import ModelSpec

MODEL = ModelSpec(
    layers=16, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, head_width=128
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run."""

    model: ModelSpec = MODEL
    tokens: int = 16384
    median_tokens: float = 1200.0
    rounds: int = 7
    peak_size: int = 8192


def measure(device: torch.device, sizes: Sizes | None = None) -> dict[str, Any]:
    """Run all sides and return their figures."""
    sizes = sizes or Sizes()
    model = sizes.model
    lengths = lognormal_step(sizes.tokens, seed=2, median=sizes.median_tokens, sigma=1.0)
    drawn = np.random.default_rng(0).integers(0, model.vocab, sizes.tokens).astype(np.uint32)
    store = TokenStore.in_memory(drawn, lengths, model.vocab)
    useful = count_work(lengths, model).flop
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with join(dist.FileStore(str(folder / "store"), 1), 0, 1, device) as ranks:
            sides: dict[str, Side] = {"ours": our_side(store, ranks, model, "bf16", folder)}
            sides |= _other_sides(store, model, device)
            wall = _rounds(sides, sizes.rounds, device)
    peak, source = bf16_peak(device, size=sizes.peak_size)
    rows = {
        side: {
            "step_s": spread(times),
            "tokens_per_s": sizes.tokens / spread(times)["median"],
            "mfu": useful / spread(times)["median"] / peak,
        }
        for side, times in wall.items()
    }
    return {
        "what": f"one packed step of {sizes.tokens:,} tokens on one device, bf16 (measured)",
        **device_facts(device),
        "params": model.params,
        "documents": lengths.tolist(),
        "peak_flop_per_s": peak,
        "peak_from": source,
        "sides": rows,
        "ours over": {
            side: float(np.median(np.array(times) / np.array(wall["ours"])))
            for side, times in wall.items()
            if side != "ours"
        },
        "environment": environment(),
    }


def _other_sides(store: TokenStore, model: ModelSpec, device: torch.device) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    if has("transformers"):
        flash = "flash_attention_2" if device.type == "cuda" and has("flash_attn") else "sdpa"
        sides[f"transformers flattened, {flash}"] = transformers_side(
            store, model, "bf16", flattened=True, device=device, attention=flash
        )
        sides["transformers one at a time, sdpa"] = transformers_side(
            store, model, "bf16", flattened=False, device=device
        )
    if device.type == "cuda" and has("torchtitan"):
        try:
            side = titan_side(store, model, "bf16", device)
            side()
            sides["torchtitan"] = side
        except Exception as error:  # of another version: ours is measured all the same
            sys.stderr.write(f"torchtitan is left out: {error}\n")
    return sides


def _rounds(sides: dict[str, Side], rounds: int, device: torch.device) -> dict[str, list[float]]:
    wall: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 2):  # two rounds warm up
        for side, step in sides.items():
            await_device(device)
            start = time.perf_counter()
            step()
            await_device(device)
            if number > 1:
                wall[side].append(time.perf_counter() - start)
    return wall


if __name__ == "__main__":
    run_here(measure)
