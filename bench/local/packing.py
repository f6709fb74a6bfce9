"""Packing: every policy on every distribution, and the partition beside its peers.

Peers run on the very loads that ours gets (whole nanoseconds of ``d + d**2 / 28,000``),
interleaved round by round, one thread; each that is not installed is named as missing. Put
them on the path to compare: verl (its seqlen_balancing alone is loaded), binpacking, prtpy.
"""

import dataclasses
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.balance.bound import largest_bin_bound
from equipoise.balance.exact import exact_partition
from equipoise.balance.packing.evaluate import Setting, score_policy
from equipoise.balance.partition import karmarkar_karp, partition
from equipoise.base.arrays import Ints
from equipoise.cost.curve import break_even_curve
from equipoise.data.stream import DocumentStream
from equipoise.spec.catalog import POLICIES
from equipoise.spec.run.spec import PackSpec
from equipoise.spec.workload import distribution_names, draw_lengths

CONTEXT = 131_072
CURVE = break_even_curve(28_000)
Placer = Callable[[Ints, int], Ints]


def _from_lists(parts: list[list[int]], items: int) -> Ints:
    bin_of = np.zeros(items, dtype=np.int64)
    for index, part in enumerate(parts):
        bin_of[part] = index
    return bin_of


def _ours(loads: Ints, bins: int) -> Ints:
    parts = partition(loads, bins)
    if parts is None:
        raise RuntimeError("a partition without a capacity always exists")
    return parts


def _verl() -> ModuleType:
    """verl's balancing file, without the rest of verl, which needs ray and tensordict."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("verl")
    folder = next(iter(spec.submodule_search_locations))
    for name, members in {
        "verl": (),
        "verl.protocol": ("DataProto",),
        "verl.utils": ("tensordict_utils",),
        "verl.utils.tensordict_utils": (),
        "verl.utils.device": ("get_device_name",),
    }.items():
        empty: Any = ModuleType(name)
        for member in members:
            setattr(empty, member, None)
        sys.modules[name] = empty
    file = importlib.util.spec_from_file_location(
        "seqlen_balancing", f"{folder}/utils/seqlen_balancing.py"
    )
    if file is None or file.loader is None:
        raise ImportError("verl")
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    return module


def _peers() -> tuple[dict[str, Placer], list[str]]:
    """Peers that are installed, and the names of those that are not."""
    placers: dict[str, Placer] = {}
    missing = []
    try:
        verl: Any = _verl()
        placers["verl karmarkar_karp"] = lambda loads, bins: _from_lists(
            verl.karmarkar_karp(loads.tolist(), bins, False), len(loads)
        )
        placers["verl greedy_partition"] = lambda loads, bins: _from_lists(
            verl.greedy_partition(loads.tolist(), bins, False), len(loads)
        )
    except ImportError:
        missing.append("verl")
    try:
        binpacking: Any = importlib.import_module("binpacking")
        placers["binpacking to_constant_bin_number"] = lambda loads, bins: _from_lists(
            [
                list(part)
                for part in binpacking.to_constant_bin_number(dict(enumerate(loads.tolist())), bins)
            ],
            len(loads),
        )
    except ImportError:
        missing.append("binpacking")
    try:
        prtpy: Any = importlib.import_module("prtpy")
        for name in ("greedy", "multifit", "karmarkar_karp"):
            algorithm = getattr(prtpy.partitioning, name)
            placers[f"prtpy {name}"] = lambda loads, bins, algorithm=algorithm: _from_lists(
                prtpy.partition(
                    algorithm=algorithm, numbins=bins, items=dict(enumerate(loads.tolist()))
                ),
                len(loads),
            )
    except ImportError:
        missing.append("prtpy")
    return placers, missing


def compare(documents: int, bins: int, rounds: int, placers: dict[str, Placer]) -> dict[str, Any]:
    """Time and evenness of each placer, interleaved."""
    lengths = np.minimum(draw_lengths("pretrain-128k", documents, seed=3), CONTEXT)
    loads = CURVE.document_ns(lengths)
    bound = largest_bin_bound(loads, bins)
    times: dict[str, list[float]] = {name: [] for name in placers}
    heaviest: dict[str, int] = {}
    for _ in range(rounds):
        for name, place in placers.items():
            began = time.perf_counter()
            bin_of = place(loads, bins)
            times[name].append(1e3 * (time.perf_counter() - began))
            heaviest[name] = int(np.bincount(bin_of, loads, bins).max())
    return {
        "documents": documents,
        "bins": bins,
        "sides": {
            name: {
                "ms (measured)": spread(times[name]),
                "over_bound": heaviest[name] / bound - 1,
                "over_mean": heaviest[name] * bins / float(loads.sum()),
            }
            for name in placers
        },
    }


def policies() -> list[dict[str, Any]]:
    """Every policy but the slow one, on every distribution, over 4, 16 and 64 micro-batches."""
    rows = []
    for name in distribution_names():
        for bins in (4, 16, 64):
            step_tokens, steps = bins * CONTEXT, 100 // bins + 4
            documents = 4096
            while int(np.minimum(draw_lengths(name, documents), CONTEXT).sum()) < (
                steps * step_tokens
            ):
                documents *= 2
            stream = DocumentStream(draw_lengths(name, documents), seed=0, context_tokens=CONTEXT)
            setting = Setting(
                steps=[stream.step(index * step_tokens, step_tokens) for index in range(steps)],
                pack=PackSpec(context_tokens=CONTEXT, step_tokens=step_tokens),
                bins=bins,
                curve=CURVE,
                is_pipeline=True,
            )
            for policy in POLICIES:
                if policy == "fixed-exact":
                    continue
                score, _ = score_policy(policy, setting)
                row = dataclasses.asdict(score)
                del row["bin_seconds"], row["travel_bytes"]
                rows.append({"distribution": name, "micro_batches": bins, "steps": steps} | row)
    return rows


def _exact_beside_ours() -> dict[str, Any]:
    """Our distance from the optimum that CP-SAT proves: whole documents, 4 bins."""
    gaps, proven, ms = [], 0, []
    for seed in range(12):
        lengths = np.minimum(draw_lengths("pretrain-128k", 135, seed=seed), CONTEXT)
        loads = CURVE.document_ns(lengths)
        heaviest = int(np.bincount(_ours(loads, 4), loads, 4).max())
        began = time.perf_counter()
        exact = exact_partition(loads, 4, effort=2.0)
        ms.append(1e3 * (time.perf_counter() - began))
        gaps.append(heaviest / exact.bound - 1)
        proven += exact.is_optimal
    return {
        "documents": 135,
        "bins": 4,
        "ours_over_exact_bound": {"mean": statistics.mean(gaps), "max": max(gaps)},
        "proven_optimal": f"{proven} of {len(gaps)}",
        "exact_ms (measured)": spread(ms),
    }


def measure() -> dict[str, Any]:
    """All three parts."""
    stamp = LoadStamp()
    peers, missing = _peers()
    ours: dict[str, Placer] = {"equipoise partition": _ours}
    small = ours | {"equipoise karmarkar_karp": karmarkar_karp} | peers
    quick = ("verl greedy_partition", "binpacking to_constant_bin_number")
    large = ours | {name: peers[name] for name in quick if name in peers}
    return {
        "what": "packing policies and partition algorithms; predicted loads, measured times",
        "goals": "2,000 documents over 64 bins in 5 ms; 100,000 in 150 ms; over_bound 0.001",
        "partition": [compare(2_000, 64, 5, small), compare(100_000, 64, 3, large)],
        "exact": _exact_beside_ours(),
        "policies": policies(),
        "peers_not_installed": missing,
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
