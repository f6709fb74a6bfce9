"""Tables of int4 rows on ML-100K: normalised entropy by rounding and cache, bytes, hit rates.

``python -m bench.recsys.precision 0 1`` trains these seeds alone. Hit rates are those of a trace in
order of time, cold misses included, beside Belady's bound.
"""

import json
import sys
from typing import Any

import numpy as np
import torch

from bench.lib.stamp import environment
from bench.recsys.training import recipe, spread, train
from equipoise.numerics.rows import row_bytes
from equipoise.recsys.cache.packed import TablePrecision
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.samples import Samples
from equipoise.schedule.tiers.cache import CACHE_POLICIES
from equipoise.schedule.tiers.replay import bound_hits, replay_hits

SEEDS, EPOCHS, BATCH = (0, 1, 2, 3, 4), 1, 512
SIDES = {
    "fp32": None,
    "int4 drawn, cache 5% by frequency": TablePrecision("int4", "stochastic", 0.05, "lfu"),
    "int4 drawn": TablePrecision("int4", "stochastic", 0.0),
    "int4 to nearest": TablePrecision("int4", "nearest", 0.0),
}


def quality(seeds: list[int]) -> dict[str, Any]:
    """AUC and normalised entropy of each side, over seeds, on the last tenth by time."""
    spec, samples = recipe()
    step = SparseStep("row-wise-adagrad", lr=0.02)
    rows = {
        name: [
            train(spec, samples, seed=s, epochs=EPOCHS, batch=BATCH, step=step, precision=precision)
            for s in seeds
        ]
        for name, precision in SIDES.items()
    }
    return {
        name: {
            "entropy": spread([each.entropy for each in ended]),
            "auc": spread([each.auc for each in ended]),
            "hits": float(np.mean([each.hits for each in ended])),
            "entropy_by_seed": [each.entropy for each in ended],
        }
        for name, ended in rows.items()
    }


def hit_rates(samples: Samples) -> dict[str, Any]:
    """Distinct rows of batches of 32 samples in order of time that lie in the cache."""
    rates: dict[str, Any] = {}
    for name in ("item_id", "user_id"):
        at = samples.keys.index(name)
        ids, rows = samples.ids[at][: samples.edges[1]], samples.rows[at]
        steps = [np.unique(ids[begin : begin + 32]) for begin in range(0, len(ids), 32)]
        total = sum(map(len, steps))
        for share in (0.01, 0.05, 0.2):
            slots = int(share * rows)
            own = {p: float(replay_hits(steps, slots, p).sum()) / total for p in CACHE_POLICIES}
            own["belady"] = bound_hits(steps, slots) / total
            rates[f"{name}, {100 * share:g}% slots"] = own
    return rates


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    seeds = [int(each) for each in sys.argv[1:]] or list(SEEDS)
    _, samples = recipe()
    cases = {"int8, 5%": ("int8", 0.05), "int4, 1%": ("int4", 0.01)}
    report = {
        "what": "ML-100K by time; bytes of fp32 tables over those with the cache",
        "goal": {"int8, 5%": 3.0, "int4, 1%": 7.0, "order": list(SIDES)},
        "environment": environment(),
        "bytes_saved": {
            name: {
                f"width {width}": 4 * width / (row_bytes(width, form) + c * 4 * width)
                for width in (64, 128, 256)
            }
            for name, (form, c) in cases.items()
        },
        "hit_rates": hit_rates(samples),
        "seeds": seeds,
        "quality": quality(seeds),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
