"""Every architecture on MovieLens 100K split by time: 3 seeds, beside the floors."""

import json
import sys

from bench.lib.recommend import FLOORS, read_split, train_seeds
from bench.lib.stamp import environment
from equipoise.spec.architectures import ARCHITECTURES


def score_split(split: str) -> None:
    """Print the scores of each architecture on a split, and whether it is above its floor."""
    samples = read_split(split)
    rows = {}
    for name in ARCHITECTURES:
        row = train_seeds(samples, split, [("model.architecture", name)])
        floor = FLOORS[split]["Wukong" if name == "wukong" else "DLRM"]
        row |= {
            "floor_auc": floor[0],
            "floor_entropy": floor[1],
            "is_above": row["auc"] > floor[0] and row["entropy"] < floor[1],
        }
        rows[name] = row
    json.dump(
        {"environment": environment(), "split": split, "floors": FLOORS[split], "rows": rows},
        sys.stdout,
        indent=1,
    )


if __name__ == "__main__":
    score_split("time")
