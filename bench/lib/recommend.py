"""Recommenders on MovieLens 100K in this process: seeds, spread, and the floors beside them."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import Samples, read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.spec.recommend import read_recommend

RECIPE = Path(__file__).parents[2] / "recipes" / "recommend" / "run.toml"
SEEDS = (0, 1, 2)
ALONE = (("layout.dp", "1"), ("checkpoint.every_steps", "1000000"))
FLOORS = {
    "time": {
        "logistic regression": (0.6722, 0.9459),
        "DLRM": (0.6968, 0.9139),
        "Wukong": (0.6936, 0.9244),
    },
    "file order": {
        "logistic regression": (0.7656, 0.8348),
        "DLRM": (0.7718, 0.8273),
        "Wukong": (0.7739, 0.8202),
    },
}
"""AUC and normalised entropy on the last tenth of plain models in plain torch, Adam, width 16, the
better of epochs by validation, mean of 2 seeds; measured once on 2 cores. ``file order`` is that of
the ratings' file, which is not sorted: near a random split."""
SPLITS = {"time": (), "file order": (("data.time", ""), ("train.epochs", "4"))}


def read_split(split: str) -> Samples:
    """The samples of a split."""
    spec, base = read_recommend(RECIPE, [*ALONE, *SPLITS[split]])
    return read_samples(spec.data, base)


def train_seeds(
    samples: Samples,
    split: str,
    flags: Sequence[tuple[str, str]],
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Any]:
    """Train once for each seed; the test split's scores at the best epoch by validation."""
    torch.set_num_threads(1)
    aucs, entropies, cpu_s = [], [], []
    weights = flop = 0
    for seed in seeds:
        spec, _ = read_recommend(RECIPE, [*ALONE, *SPLITS[split], *flags])
        spec = replace(spec, train=replace(spec.train, seed=seed))
        plan = plan_samples(spec, samples).plan
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            trainer = RankTrainer(
                Path(folder), spec, samples, plan, EventSink(), TimedExchange(alone=True)
            )
            best = trainer.run(lambda _: None).best
        if best is None:
            raise RuntimeError("a run without an epoch has no scores")
        aucs.append(best.test_auc)
        entropies.append(best.test_entropy)
        cpu_s.append(time.process_time() - began)
        weights = sum(each.numel() for each in trainer.dense.parameters())
        with FlopCounterMode(display=False) as counter:
            pooled = torch.zeros(1, trainer.tables.width)
            trainer.dense(pooled, torch.zeros(1, samples.numbers.shape[1]))
        flop = counter.get_total_flops()
    return {
        "auc": statistics.mean(aucs),
        "auc_deviation": statistics.stdev(aucs) if len(aucs) > 1 else None,
        "entropy": statistics.mean(entropies),
        "entropy_deviation": statistics.stdev(entropies) if len(aucs) > 1 else None,
        "aucs": aucs,
        "entropies": entropies,
        "dense_weights": weights,
        "forward_flop_per_sample": flop,
        "cpu_s": statistics.mean(cpu_s),
    }
