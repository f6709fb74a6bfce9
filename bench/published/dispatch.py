"""Rows on their way to experts and back, beside what DeepEP's kernels were measured to take.

Six rates of ``cost.step.dispatch`` were chosen to meet these points: measured on one to four
H100 nodes, and published by DeepEP for one to eight of H800. Points of eight H100 nodes are left
out: their way out crosses the network at half the rate that it has on four nodes and that DeepEP
publishes for eight.

The rate of kernels on NVLink 5 was chosen to meet Hybrid-EP's calls on 8 to 36 GPUs of GB200.

No rate was chosen to meet what UCCL-EP publishes, the same dispatch by other code: on H200 within a
node, and between nodes of MI300X on InfiniBand. Its points on Amazon's EFA stand apart: there the
host's processors send messages one by one, and no term says how long that takes.
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.published.price import summary
from equipoise.cost.step.dispatch import ExpertRoutes
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import find_cluster

FILE = Path(__file__).parents[1] / "measured" / "deepep.csv"

LEAST_TOKENS = 256
"""Fewer than this no micro-batch of training has."""
MOST_NODES = 4

GOAL = 0.10

PUBLISHED = {
    # Ranks: GB/s out and back, of what reaches a device's link or port, its own node's rows too.
    8: (153e9, 158e9),
    16: (43e9, 43e9),
    32: (58e9, 57e9),
    64: (51e9, 50e9),
}
"""Normal kernels on H800: DeepEP at 0297fc80, docs/legacy.md."""
TOKENS, TOP_K, HIDDEN, MOST_GROUPS = 4096, 8, 7168, 4

HYBRID = {
    # Ranks: GB/s of rows in 8 bits out, in 16 bits out, and back, of what reaches a device.
    8: (455.35e9, 545.71e9, 568.94e9),
    16: (444.67e9, 523.48e9, 521.55e9),
    24: (403.20e9, 507.32e9, 483.76e9),
    32: (392.70e9, 484.22e9, 464.54e9),
    36: (361.13e9, 479.02e9, 447.89e9),
}
"""Calls with 32 multiprocessors on GB200: DeepEP at 41cad944, docs/README_Hybrid-EP.md."""

UCCL = {
    # Ranks: microseconds out and back, as printed, or GB/s by DeepEP's count.
    ("h200", "one node"): {8: (500e-6, 973e-6)},
    ("mi300x", "InfiniBand"): {16: (74e9, 78e9), 32: (60e9, 60e9), 64: (52e9, 51e9)},
    ("h200", "EFA"): {16: (1196e-6, 6379e-6), 24: (1633e-6, 6365e-6), 32: (2022e-6, 4899e-6)},
    ("b200", "EFA"): {16: (1141e-6, 1965e-6), 24: (1637e-6, 2887e-6), 32: (2072e-6, 3724e-6)},
}
"""Normal kernels: uccl-project/uccl at 021c2c00, ep/README.md. There is no curve within a node of
B200, whose multiprocessors carry more, nor of MI300X, which has no switch."""


def routes(device: str, ranks: int, most: int = MOST_GROUPS) -> ExpertRoutes:
    """Routes of the first ranks of a cluster of this device, a row to ``most`` nodes at most."""
    reached = Machine(find_cluster(f"{device}:{ranks}")).expert_routes(
        tuple(range(ranks)), lambda nodes: min(nodes, most)
    )
    if reached is None:
        raise ValueError(f"{ranks} rank has no route")
    return reached


def on_h100() -> dict[str, Any]:
    """The fastest kernel of each number of nodes and tokens, beside the price."""
    best: dict[tuple[int, int], list[float]] = defaultdict(lambda: [float("inf")] * 2)
    lines = [line for line in FILE.read_text().splitlines() if line[:1] != "#"]
    for row in csv.DictReader(lines):
        place = int(row["nodes"]), int(row["tokens"])
        for way, column in enumerate(("dispatch_us", "combine_us")):
            best[place][way] = min(best[place][way], float(row[column]))
    rows, errors = [], defaultdict(list)
    for (nodes, tokens), measured in sorted(best.items()):
        if nodes > MOST_NODES or tokens < LEAST_TOKENS:
            continue
        on = routes("h100-sxm", 8 * nodes)
        for way, us in enumerate(measured):
            back = bool(way)
            s = on.travel_s(tokens, TOP_K, HIDDEN, is_return=back, fp8=not back, skew=1.0)
            error = 1e6 * s / us - 1
            errors[f"{nodes} nodes, {'back' if back else 'out'}"].append(error)
            rows.append(
                {
                    "row": f"{nodes} nodes, {tokens} tokens, {'back' if back else 'out'}",
                    "measured_us": us,
                    "predicted_us": round(1e6 * s, 1),
                    "error": round(error, 4),
                }
            )
    every = [error for some in errors.values() for error in some]
    return {
        "all": summary(every),
        "by way": {name: summary(some) for name, some in errors.items()},
        "rows": rows,
    }


def beside(device: str, published: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """Published seconds, or rates as seconds, beside the price."""
    rows = []
    for ranks, given in published.items():
        on, nodes = routes(device, ranks), max(1, ranks // 8)
        # A rate counts one copy for each node that holds an expert, or of one node each device.
        places = ranks if nodes == 1 else nodes
        copies = min(MOST_GROUPS if nodes > 1 else ranks, places * (1 - (1 - 1 / places) ** TOP_K))
        for way, number in enumerate(given):
            back = bool(way)
            moved = TOKENS * copies * HIDDEN * (2 if back else 1)
            measured = moved / number if number > 1 else number
            s = on.travel_s(TOKENS, TOP_K, HIDDEN, is_return=back, fp8=not back, skew=1.0)
            rows.append(
                {
                    "row": f"{device}, {ranks} ranks, {'back' if back else 'out'}",
                    "published_us": round(1e6 * measured, 1),
                    "predicted_us": round(1e6 * s, 1),
                    "error": round(s / measured - 1, 4),
                }
            )
    return rows


def hybrid() -> list[dict[str, Any]]:
    """Hybrid-EP's calls inside an NVLink domain of GB200, beside the price."""
    rows = []
    for ranks, given in HYBRID.items():
        on = Machine(find_cluster("gb200:72")).expert_routes(
            tuple(range(ranks)), lambda nodes: nodes
        )
        if on is None:
            raise ValueError(f"{ranks} rank has no route")
        copies = ranks * (1 - (1 - 1 / ranks) ** TOP_K)
        for way, rate in zip(("out, fp8", "out", "back"), given, strict=True):
            fp8, back = way == "out, fp8", way == "back"
            measured = TOKENS * copies * HIDDEN * (1 if fp8 else 2) / rate
            s = on.travel_s(TOKENS, TOP_K, HIDDEN, is_return=back, fp8=fp8, skew=1.0)
            rows.append(
                {
                    "row": f"gb200, {ranks} ranks, {way}",
                    "published_us": round(1e6 * measured, 1),
                    "predicted_us": round(1e6 * s, 1),
                    "error": round(s / measured - 1, 4),
                }
            )
    return rows


def measure() -> dict[str, Any]:
    """All of them."""
    near = hybrid()
    published = beside("h800", PUBLISHED)
    tables = {key: beside(key[0], table) for key, table in UCCL.items()}
    others = [row for (_, on), rows in tables.items() if on != "EFA" for row in rows]
    hosts = [row for (_, on), rows in tables.items() if on == "EFA" for row in rows]
    return {
        "what": "predicted over measured - 1 of expert dispatch and combine",
        "goal": GOAL,
        "H100, 1 to 4 nodes": on_h100(),
        "H800, as DeepEP publishes": {
            "all": summary([row["error"] for row in published]),
            "rows": published,
        },
        "Hybrid-EP on GB200, as published": {
            "all": summary([row["error"] for row in near]),
            "rows": near,
        },
        "UCCL-EP, as published, in no fit": {
            "all": summary([row["error"] for row in others]),
            "rows": others,
        },
        "UCCL-EP on EFA, whose hosts send: not modelled": {
            "all": summary([row["error"] for row in hosts]),
            "rows": hosts,
        },
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
