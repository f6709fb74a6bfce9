"""Wukong at five sizes, all of its sizes scaled together: what a larger one gains on 80,000 rows.

ML-100K is too small to show a law: this is the harness, and what it saw.
"""

import itertools
import json
import math
import sys

import numpy as np

from bench.lib.recommend import read_split, train_seeds
from bench.lib.stamp import environment

SIZES = ((1, 2), (1, 4), (2, 8), (2, 16), (3, 32))
"""Layers, and vectors of each block, which are the compressed columns too."""
SEEDS = (0,)
"""One: the largest size takes most of a minute of a core for each."""


def main() -> None:
    """Print each size's FLOP and scores, and the line through them over decades of FLOP."""
    samples, rows = read_split("time"), []
    for layers, vectors in SIZES:
        flags = [("model.architecture", "wukong"), ("model.layers", str(layers))]
        keys = ("fm_vectors", "linear_vectors", "compressed")
        flags += [(f"model.{key}", str(vectors)) for key in keys]
        flags += [("model.hidden", f"[{8 * vectors}]")]
        rows.append(
            {"layers": layers, "vectors": vectors, **train_seeds(samples, "time", flags, SEEDS)}
        )
    decades = [math.log10(row["forward_flop_per_sample"]) for row in rows]
    entropies = [row["entropy"] for row in rows]
    slope = float(np.polyfit(decades, entropies, 1)[0])
    answer = {
        "environment": environment(),
        "rows": rows,
        "decades": decades[-1] - decades[0],
        "entropy_per_decade": slope,
        "falls_at_every_size": all(a > b for a, b in itertools.pairwise(entropies)),
    }
    json.dump(answer, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
