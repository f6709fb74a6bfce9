"""DHEN beside each of its modules alone, of the same layers and vectors: 3 seeds, split by time."""

import json
import sys
from typing import get_args

from bench.lib.recommend import read_split, train_seeds
from bench.lib.stamp import environment
from equipoise.spec.architectures import DhenModule

_PAIR = ("dot", "linear")


def main() -> None:
    """Print each arrangement's scores, and the ensembles' distance to the best module alone."""
    samples, singles = read_split("time"), [(name,) for name in get_args(DhenModule)]
    rows = {}
    for modules in [*singles, _PAIR, tuple(get_args(DhenModule))]:
        flags = [("model.architecture", "dhen"), ("model.modules", json.dumps(modules))]
        rows["+".join(modules)] = train_seeds(samples, "time", flags)
    best = min((name for (name,) in singles), key=lambda name: rows[name]["entropy"])
    won = {
        name: {
            "entropy_gain": 1 - row["entropy"] / rows[best]["entropy"],
            "auc_gain": row["auc"] - rows[best]["auc"],
        }
        for name, row in rows.items()
        if "+" in name
    }
    answer = {"environment": environment(), "rows": rows, "best_module": best, "ensembles": won}
    json.dump(answer, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
