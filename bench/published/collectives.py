"""Collectives beside measurements that nothing was fitted to, and beside torch's own cost model.

Halves: of the H100's NCCL points every second size is fitted and the others are scored, then
the other way round. torch's ``redistribute_cost`` prices the same scored points, on nodes of
8 devices. Then, unfitted: another laboratory's H100 and H200 nodes, and V100 nodes
over Ethernet, whose one network link is fitted on pairs of single GPUs alone.
"""

import csv
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.stamp import environment
from equipoise.cost.curves.collectives import CollectiveCurve, curve_of_rows, nccl_rows
from equipoise.cost.link import Group, Level, collective_s
from equipoise.spec.cluster.link import find_link

GOAL = 0.08
LARGE = 4 << 20
APEX = Path(__file__).parents[1] / "measured" / "nccl_apex.csv"

Point = tuple[str, int, int, float]


def torch_cost() -> Callable[[str, int, int], float]:
    """torch's redistribute_cost of one collective, in seconds, on a node of 8."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import _mesh_resources, init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._collective_utils import redistribute_cost
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    _mesh_resources.num_devices_per_host = lambda _kind: 8  # it would count this machine's
    moves: dict[str, tuple[Any, Any]] = {
        "all_reduce": (Partial(), Replicate()),
        "all_gather": (Shard(0), Replicate()),
        "reduce_scatter": (Partial(), Shard(0)),
        "all_to_all": (Shard(0), Shard(1)),
    }
    meshes = {
        ranks: init_device_mesh("cpu", (8 // ranks, ranks), mesh_dim_names=("a", "b"))["b"]
        for ranks in (2, 4, 8)
    }

    def cost_s(op: str, ranks: int, size: int) -> float:
        # What an all-to-all sends is a rank's own buffer: the whole is ``ranks`` of them.
        elements = size // 2 * (ranks if op == "all_to_all" else 1)
        columns = 16
        meta = TensorMeta(torch.Size((elements // columns, columns)), (columns, 1), torch.bfloat16)
        before, after = (
            DTensorSpec(meshes[ranks], (placement,), tensor_meta=meta) for placement in moves[op]
        )
        return float(redistribute_cost(before, after)) * 1e-6

    return cost_s


def _error(rows: list[dict[str, Any]], key: str = "predicted_s") -> dict[str, float]:
    errors = np.array([row[key] / row["measured_s"] - 1 for row in rows])
    return {
        "mape": float(np.abs(errors).mean()),
        "bias": float(errors.mean()),
        "worst": float(errors[np.abs(errors).argmax()]),
        "rows": len(rows),
    }


def _by(rows: list[dict[str, Any]], *keys: str, of: str = "predicted_s") -> dict[str, Any]:
    names = sorted({" ".join(str(row[key]) for key in keys) for row in rows})
    return {
        name: _error([r for r in rows if " ".join(str(r[key]) for key in keys) == name], of)
        for name in names
    }


def _halves(rows: list[Point], cost_s: Callable[[str, int, int], float]) -> dict[str, Any]:
    sizes = sorted({size for _, _, size, _ in rows})
    errors: dict[str, Any] = {}
    scored_all: list[dict[str, Any]] = []
    for name, fitted in (("even fitted, odd scored", 0), ("odd fitted, even scored", 1)):
        chosen = set(sizes[fitted::2])
        curve = curve_of_rows([row for row in rows if row[2] in chosen], 1.0)
        scored = [_score(curve, row, cost_s) for row in rows if row[2] not in chosen]
        inside = [row for row in scored if not row["extrapolated"]]
        outside = [row for row in scored if row["extrapolated"]]
        errors[name] = _error(inside) | {
            "by op and ranks": _by(inside, "op", "ranks"),
            "beyond the fitted sizes (flagged)": _error(outside) if outside else None,
            "torch redistribute_cost": _error(inside, "torch_s"),
            "torch redistribute_cost, 4 MiB and more": _error(
                [row for row in inside if row["bytes"] >= LARGE], "torch_s"
            ),
            "equipoise, 4 MiB and more": _error([row for row in inside if row["bytes"] >= LARGE]),
        }
        scored_all += [row | {"half": name} for row in scored]
    errors["rows"] = _lines(scored_all)
    return errors


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    """Every scored row with its residual, a line each."""
    head = ",".join(rows[0])
    return [
        head,
        *(
            ",".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
            for row in rows
        ),
    ]


def _score(
    curve: CollectiveCurve, row: Point, cost_s: Callable[[str, int, int], float]
) -> dict[str, Any]:
    op, ranks, size, measured_s = row
    timing = curve.at(op, size, ranks)
    return {
        "op": op,
        "ranks": ranks,
        "bytes": size,
        "measured_s": measured_s,
        "predicted_s": float(timing.s),
        "error": float(timing.s) / measured_s - 1,
        "extrapolated": bool(timing.extrapolated),
        "torch_s": (torch_s := cost_s(op, ranks, size)),
        "torch_error": torch_s / measured_s - 1,
    }


def _repeats(rows: list[Point]) -> dict[str, float]:
    """How far two measurements of one point lie apart: no model can do better."""
    pairs: dict[tuple[str, int, int], list[float]] = {}
    for op, ranks, size, s in rows:
        pairs.setdefault((op, ranks, size), []).append(s)
    apart = np.array([max(each) / min(each) - 1 for each in pairs.values() if len(each) > 1])
    return {"mean": float(apart.mean()), "worst": float(apart.max()), "points": len(apart)}


def _elsewhere(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Nodes of another laboratory, priced by the shipped curve unchanged."""
    points = []
    for row in rows:
        if row["nodes"] != "1" or row["gpu"].startswith("V100") or row["op"] == "send":
            continue
        ranks, size = int(row["ranks_per_node"]), int(row["bytes"])
        group = Group(np.asarray(ranks), (node_level("nvlink4", ranks),))
        points.append(
            {
                "gpu": row["gpu"],
                "op": row["op"],
                "ranks": ranks,
                "bytes": size,
                "measured_s": float(row["us"]) * 1e-6,
                "predicted_s": float(collective_s(row["op"], size, group).s),
            }
        )
    large = [row for row in points if row["bytes"] >= LARGE]
    return {
        "4 MiB and more": _error(large) | {"by gpu and op": _by(large, "gpu", "op")},
        "smaller: launched from the host, where the shipped curve was replayed as a graph": _error(
            [row for row in points if row["bytes"] < LARGE]
        ),
    }


def node_level(name: str, ranks: int) -> Level:
    link = find_link(name)
    return Level(link, link.bytes_per_s, np.asarray(ranks), np.asarray(ranks))


def _hierarchy(rows: list[dict[str, str]]) -> dict[str, Any]:
    """V100 nodes over Ethernet: the network's rate and wait from pairs, all else predicted."""
    of_gpu = [row for row in rows if row["gpu"].startswith("V100")]
    pairs = [row for row in of_gpu if (row["nodes"], row["ranks_per_node"]) == ("2", "1")]
    large = [row for row in pairs if int(row["bytes"]) >= 16 << 20]
    moved = {"all_reduce": 1.0, "send": 1.0}
    rates = [moved.get(r["op"], 0.5) * int(r["bytes"]) / float(r["us"]) * 1e6 for r in large]
    waits = [
        float(r["us"]) * 1e-6 / (2 if r["op"] == "all_reduce" else 1)
        for r in pairs
        if int(r["bytes"]) <= 4096
    ]
    network = dataclasses.replace(
        find_link("ethernet-10"),
        bytes_per_s=float(np.median(rates)),
        efficiency=1.0,
        latency_s=float(np.median(waits)),
    )
    inside = curve_of_rows(
        [
            (r["op"], int(r["ranks_per_node"]), int(r["bytes"]), float(r["us"]) * 1e-6)
            for r in of_gpu
            if r["nodes"] == "1" and r["ranks_per_node"] in ("2", "4")
        ],
        1.0,
    )
    points = []
    for row in of_gpu:
        nodes, each, size = int(row["nodes"]), int(row["ranks_per_node"]), int(row["bytes"])
        if nodes == 1 or (nodes, each) == (2, 1) or each == 8 or size < LARGE:
            continue
        # One card a node, and only these ranks use it.
        ranks, rate = nodes * each, network.bytes_per_s / each
        level = Level(network, rate, np.asarray(ranks), np.asarray(ranks))
        bare = dataclasses.replace(find_link("pcie3"), bytes_per_s=1e18, latency_s=0.0)
        node = Level(bare, 1e18, np.asarray(each), np.asarray(each))
        network_s = float(collective_s(row["op"], size, Group(np.asarray(ranks), (node, level))).s)
        node_s = float(inside.at(row["op"], size, each).s) if each > 1 else 0.0
        points.append(
            {
                "op": row["op"],
                "nodes": nodes,
                "ranks_per_node": each,
                "bytes": size,
                "measured_s": float(row["us"]) * 1e-6,
                "predicted_s": max(network_s, node_s),
                "flat_s": float(inside.at(row["op"], size, max(each, 2)).s),
            }
        )
    return {
        "network fitted on pairs": {
            "bytes_per_s": network.bytes_per_s,
            "latency_s": network.latency_s,
        },
        "4 MiB and more": _error(points) | {"by op and nodes": _by(points, "op", "nodes")},
        "flat bandwidth (the node's own)": _error(points, "flat_s"),
        "rows": _lines(points),
    }


def measure() -> dict[str, Any]:
    """Score all of it."""
    rows = nccl_rows("h100")
    with APEX.open() as file:
        apex = list(csv.DictReader(line for line in file if not line.startswith("#")))
    halves = _halves(rows, torch_cost())
    return {
        "what": "collectives: predicted beside measured, scored on points that were not fitted",
        "goal": f"even fitted, odd scored: MAPE at most {GOAL}",
        "halves of the H100's NCCL points": halves,
        "two measurements of one point apart": _repeats(rows),
        "another laboratory's nodes, nothing fitted": _elsewhere(apex),
        "V100 nodes over Ethernet": _hierarchy(apex),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
