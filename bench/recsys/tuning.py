"""How DHEN is trained, chosen inside the training range of ML-100K: held-out tenths stay unseen.

The earliest 80% of the ratings are split as a run's are: 64% to train, 8% to choose the epoch, 8%
to compare settings. What wins here is what ``recsys.models`` and ``recsys.ensemble`` then measure.
``python -m bench.recsys.tuning "one layer"`` compares that setting alone.
"""

import json
import sys

import numpy as np

from bench.lib.recommend import ALONE, RECIPE, train_seeds
from bench.lib.stamp import environment
from equipoise.recsys.columns import read_ml_100k
from equipoise.recsys.samples import Samples, make_samples
from equipoise.spec.recommend import read_recommend

SEEDS = (0, 1, 2)
SETTINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "as dlrm": (),
    "batch 2,048": (("train.batch", "2048"),),
    "one layer": (("model.layers", "1"),),
    "16 vectors": (("model.vectors", "16"),),
    "weighted": (("model.ensemble", "weighted"),),
    "dot and cross": (("model.modules", '["dot", "cross"]'),),
    "dot, cross and linear": (("model.modules", '["dot", "cross", "linear"]'),),
}


def earlier_samples() -> Samples:
    """The training range of a run's own split, split again by time."""
    spec, _ = read_recommend(RECIPE, ALONE)
    columns = read_ml_100k()
    stamps = columns[spec.data.time].astype(np.float64)
    order = np.argsort(stamps, kind="stable")
    earlier = order[: int(len(order) * spec.data.train_share)]
    return make_samples({n: v[earlier] for n, v in columns.items()}, spec.data, "ml-100k")


def main() -> None:
    """Print each setting's scores on the part that nothing else has seen."""
    samples = earlier_samples()
    rows = {}
    asked = sys.argv[1:] or list(SETTINGS)
    for architecture, names in (("dlrm", ["as dlrm"]), ("dhen", asked)):
        for name in names:
            flags = [("model.architecture", architecture), *SETTINGS[name]]
            rows[f"{architecture}, {name}"] = train_seeds(samples, "time", flags, SEEDS)
    answer = {"environment": environment(), "rows": rows}
    json.dump(answer, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
