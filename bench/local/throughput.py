"""One rank on one core against transformers, on the same documents and the same sizes.

Sides, interleaved round by round in one process with one thread:
    ours fp32, ours bf16          the product's own step: pack, sharded model, clip, AdamW
    transformers flattened        its packing collator: one row, position ids restart
    transformers one at a time    its strongest form here: each document alone
    GEMM                          1024 cubed, the rate that utilisation is relative to
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench.lib.corpus import lognormal_step, open_corpus, recut
from bench.lib.sides import our_side, transformers_side
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.comm.group import join
from equipoise.cost.work import count_work
from equipoise.nn.measure import gemm_flop_per_s
from equipoise.spec.model.presets import preset
from equipoise.train.process import settle

TOKENS, ROUNDS = 4096, 7
MODEL = preset("7m")


def measure() -> dict[str, object]:
    """Run all sides and return their figures."""
    settle(0, pin=False)
    lengths = lognormal_step(TOKENS, seed=2, median=600, sigma=1.0)
    store = recut(open_corpus(), lengths)
    useful = count_work(lengths, MODEL).flop
    theirs = partial(transformers_side, store, MODEL, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file_store = dist.FileStore(str(folder / "store"), 1)
        with join(file_store, 0, 1, torch.device("cpu")) as ranks:
            sides: dict[str, Callable[[], None]] = {
                "ours fp32": our_side(store, ranks, MODEL, "fp32", folder),
                "ours bf16": our_side(store, ranks, MODEL, "bf16", folder),
                "transformers flattened fp32": theirs("fp32", flattened=True),
                "transformers one at a time fp32": theirs("fp32", flattened=False),
                "transformers one at a time bf16": theirs("bf16", flattened=False),
            }
            stamp = LoadStamp()
            wall: dict[str, list[float]] = {side: [] for side in sides}
            gemm = []
            for number in range(ROUNDS + 2):  # two rounds warm up
                rate = gemm_flop_per_s(torch.device("cpu"), torch.float32)
                for side, step in sides.items():
                    start = time.perf_counter()
                    step()
                    if number > 1:
                        wall[side].append(time.perf_counter() - start)
                if number > 1:
                    gemm.append(rate)
    peak = spread(gemm)["median"]
    rows = {
        side: {
            "step_s": spread(times),
            "tokens_per_s": TOKENS / spread(times)["median"],
            "useful_gflop_per_s": useful / spread(times)["median"] / 1e9,
            "share_of_fp32_gemm": useful / spread(times)["median"] / peak,
        }
        for side, times in wall.items()
    }

    def ratio(one: str, other: str) -> float:
        pairs = zip(wall[other], wall[one], strict=True)
        return float(np.median([theirs / ours for theirs, ours in pairs]))

    return {
        "what": "one rank, one core, 7m decoder, 4,096 tokens a step (measured)",
        "documents": lengths.tolist(),
        "gemm_fp32_gflop_per_s": peak / 1e9,
        "gemm_bf16_gflop_per_s": gemm_flop_per_s(torch.device("cpu"), torch.bfloat16) / 1e9,
        "sides": rows,
        "ratios": {
            "ours over flattened, fp32 (goal 1.6)": ratio(
                "ours fp32", "transformers flattened fp32"
            ),
            "ours over one at a time, fp32 (goal 1.15)": ratio(
                "ours fp32", "transformers one at a time fp32"
            ),
            "ours bf16 over ours fp32 (goal 1.6)": ratio("ours bf16", "ours fp32"),
        },
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
