"""Feed-forwards of two tensor-parallel ranks in parts, on a link of limited rate and on loopback.

The limited link is a namespace's loopback behind a token bucket (``bench.lib.limited``); where the
machine allows none, only loopback is timed. For every shape: seconds of the products alone, of both
exchanges alone, and of 1, 2, 4 and 8 parts, in random order, medians of rounds, on the slower rank.
``part_s`` is what one more part of a few rows costs. ``shared`` is what exchanges take on loopback,
where they take nothing but cores, over what they take on the link. ``chosen`` is what
``cost.overlap`` chooses by the shape's own times, ``chosen_by_machine`` what a run's
``layout.parts = "auto"`` would by one price of all shapes; ``lost`` is the time of the latter over
that of the fastest, minus 1.
"""

import copy
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from bench.lib.limited import run_on_link
from bench.lib.stamp import LoadStamp, environment
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mesh import Mesh, Peers
from equipoise.cost.overlap import best_parts, parts_on, parts_s
from equipoise.parallel.overlap.feed import feed_in_parts
from equipoise.spec.layout import Layout
from equipoise.spec.run.resolved import PartMachine

PARTS = (1, 2, 4, 8)
SHAPES = [
    (tokens, hidden, ffn)
    for tokens in (256, 512, 1024)
    for hidden in (128, 256)
    for ffn in (64, 128, 256, 512, 1024)
]
ROUNDS, RATES_MBIT = 8, (0, 400, 800)


def _median_s(ranks: Ranks, timed: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each on the slower rank, medians of rounds in random order, equal on all ranks."""
    drawn, seconds = random.Random(0), {name: [] for name in timed}
    for turn in range(ROUNDS + 1):
        names = list(timed)
        drawn.shuffle(names)
        for name in names:
            ranks.barrier()
            began = time.perf_counter()
            timed[name]()
            each = float(ranks.gather_floats([time.perf_counter() - began]).max())
            if turn:
                seconds[name].append(each)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _feed(
    x_tD: Tensor, tokens: int, f: Callable[[Tensor], Tensor], peers: Peers, parts: int
) -> None:
    feed_in_parts(x_tD, tokens, f, peers, parts)


def on_rank(ranks: Ranks) -> list[dict[str, object]]:
    """Every shape on this link."""
    torch.set_num_threads(1)
    peers = Mesh.join(ranks, Layout(tp=2)).peers("tp")
    rows = []
    few = torch.zeros(32, 8)
    with torch.no_grad():
        start = _median_s(
            ranks, {str(n): lambda n=n: _feed(few, 64, lambda x: x, peers, n) for n in (1, 16)}
        )
        part_s = max(0.0, (start["16"] - start["1"]) / 15)
        for tokens, hidden, ffn in SHAPES:
            gate, up, down = (
                torch.randn(*each) / 64 for each in ((ffn, hidden), (ffn, hidden), (hidden, ffn))
            )

            def products(
                x: Tensor, gate: Tensor = gate, up: Tensor = up, down: Tensor = down
            ) -> Tensor:
                return (silu(x @ gate.t()) * (x @ up.t())) @ down.t()

            x_tD, x_TD = torch.randn(tokens // 2, hidden), torch.randn(tokens, hidden)
            timed: dict[str, Callable[[], object]] = {
                str(n): lambda n=n, x=x_tD, f=products, t=tokens: _feed(x, t, f, peers, n)
                for n in PARTS
            }
            timed["compute"] = lambda x=x_TD, f=products: f(x)
            timed["move"] = lambda x=x_tD, t=tokens: _feed(x, t, lambda rows: rows, peers, 1)
            medians_s = _median_s(ranks, timed)
            rows.append(
                {
                    "tokens": tokens,
                    "hidden": hidden,
                    "ffn": ffn,
                    "compute_s": medians_s["compute"],
                    "move_s": medians_s["move"],
                    "part_s": part_s,
                    "measured_s": {n: medians_s[str(n)] for n in PARTS},
                }
            )
    return rows


def _judge(rows: list[dict[str, Any]], loopback: list[dict[str, Any]]) -> dict[str, object]:
    """What is chosen beside what is fastest."""
    shares = [
        min(1.0, own["move_s"] / each["move_s"]) for own, each in zip(loopback, rows, strict=True)
    ]
    flop = [6.0 * each["tokens"] * each["hidden"] * each["ffn"] for each in rows]
    moved = [4.0 * each["tokens"] * each["hidden"] for each in rows]  # half, fp32, there and back
    start_s = rows[0]["part_s"] / 2
    link_s = sum(max(0.0, each["move_s"] - 2 * start_s) for each in rows)
    machine = PartMachine(
        sum(flop) / sum(each["compute_s"] for each in rows),
        start_s,
        sum(moved) / max(link_s, 1e-9),
        statistics.median(shares),
    )
    for row, share, work, size in zip(rows, shares, flop, moved, strict=True):
        known = {key: row[key] for key in ("compute_s", "move_s", "part_s")} | {"shared": share}
        seconds = {int(n): value for n, value in row["measured_s"].items()}
        fastest = min(seconds, key=lambda n: seconds[n])
        by_machine = min(parts_on(machine, flop=work, moved_bytes=size), PARTS[-1])
        row |= {
            "shared": share,
            "predicted_s": {n: parts_s(n, **known) for n in PARTS},
            "chosen": min(best_parts(**known), PARTS[-1]),
            "chosen_by_machine": by_machine,
            "fastest": fastest,
            "lost": seconds[by_machine] / seconds[fastest] - 1,
        }
    count = len(rows)
    one = [each["measured_s"]["1"] for each in rows]
    gains = [
        a / each["measured_s"][str(each["chosen_by_machine"])]
        for a, each in zip(one, rows, strict=True)
    ]
    errors = [
        abs(each["predicted_s"][n] / each["measured_s"][str(n)] - 1) for each in rows for n in PARTS
    ]
    return {
        "machine": dataclasses.asdict(machine),
        "best_chosen": sum(each["chosen"] == each["fastest"] for each in rows) / count,
        "best_by_machine": sum(each["chosen_by_machine"] == each["fastest"] for each in rows)
        / count,
        "within_5_percent": sum(each["lost"] <= 0.05 for each in rows) / count,
        "worst_lost": max(each["lost"] for each in rows),
        "gain": statistics.geometric_mean(gains),
        "predicted_within": statistics.median(errors),
        "shapes": rows,
    }


def measure() -> dict[str, object]:
    """Both links."""
    stamp = LoadStamp()
    measured = {rate: run_on_link("bench.overlap.parts", rate) for rate in RATES_MBIT}
    links = {
        f"{rate} Mbit/s" if rate else "loopback": rows
        if "refused" in rows
        else _judge(copy.deepcopy(rows), measured[0])
        for rate, rows in measured.items()
    }
    return {
        "bench": "overlap.parts",
        "environment": environment(),
        "links": links,
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    inside = sys.argv[1:] == ["inside"]
    json.dump(run_ranks(2, on_rank)[0] if inside else measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
