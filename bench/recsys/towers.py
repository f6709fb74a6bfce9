"""Towers on ML-100K split by time: AUC and bytes between hosts beside the flat model, 3 seeds.

Two towers, whose columns are alike or drawn at random, cut their vectors to half of their floats.
Bytes are those of a mean step on two hosts of two ranks.
"""

import json
import sys
from typing import Any

import numpy as np

from bench.lib.recommend import RECIPE, read_split, train_seeds
from bench.lib.stamp import environment
from equipoise.balance.tables.similar import draw_towers
from equipoise.balance.tables.towers import price_feature
from equipoise.recsys.place import describe_tables, plan_samples, predict_traffic, run_machine
from equipoise.recsys.samples import Samples
from equipoise.recsys.towers.probe import advise_towers, name_towers
from equipoise.schedule.tables.traffic import across_hosts
from equipoise.spec.recommend import read_recommend

TOWERS = 2
HALF = (("model.tower_module", "linear"), ("model.tower_width", "8"))
HOSTS = (("layout.dp", "4"), ("layout.ranks_per_host", "2"), ("tables.kinds", '["table"]'))


def sides(samples: Samples) -> dict[str, tuple[tuple[str, str], ...]]:
    """Flags of each side; columns are dealt by a probe of seed 0, or drawn."""
    spec, _ = read_recommend(RECIPE, HOSTS)
    tables, machine = describe_tables(spec, samples), run_machine(spec)
    sizes = spec.model.tower_sizes
    costs = np.array([price_feature(table, sizes, machine) for table in tables])
    drawn = draw_towers(costs, TOWERS, np.random.default_rng(0))
    chosen = {
        "alike": advise_towers(spec, samples, TOWERS, "coherent").towers,
        "random": name_towers(samples.keys, drawn),
    }
    return {"flat": ()} | {
        name: (("model.towers", json.dumps(towers)), *HALF) for name, towers in chosen.items()
    }


def count_bytes(samples: Samples, flags: tuple[tuple[str, str], ...]) -> dict[str, int]:
    """Bytes of a mean step on two hosts: all that ranks send, and what crosses hosts."""
    spec, _ = read_recommend(RECIPE, [*HOSTS, *flags])
    plan = plan_samples(spec, samples).plan
    sent = predict_traffic(spec, samples, plan)["bytes"]
    return {"sent": int(sent.sum()), "across_hosts": across_hosts(plan, sent)}


def main() -> None:
    """Print each side's scores and bytes."""
    samples = read_split("time")
    rows: dict[str, Any] = {
        name: {
            "flags": dict(flags),
            "bytes": count_bytes(samples, flags),
            **train_seeds(samples, "time", flags),
        }
        for name, flags in sides(samples).items()
    }
    json.dump({"environment": environment(), "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
