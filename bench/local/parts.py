"""Feed-forwards of two tensor-parallel ranks in parts, on a link of limited rate and on loopback.

The limited link is a network namespace whose loopback passes a token bucket (``unshare -rn``, ``tc
... tbf``); where the machine allows none, only loopback is timed. For every shape: seconds of the
products alone, of both exchanges alone, and of 1, 2, 4 and 8 parts, in random order each round,
medians, on the slower rank. ``part_s`` is what one more part of a few rows costs. The number of
parts that ``cost.overlap`` chooses stands beside the fastest; ``lost`` is the time of the choice
over that of the fastest, minus 1.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from bench.lib.limited import run_on_link
from bench.lib.stamp import LoadStamp, environment
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mesh import Mesh, Peers
from equipoise.cost.overlap import best_parts, parts_s
from equipoise.parallel.overlap.feed import feed_in_parts
from equipoise.spec.layout import Layout

PARTS = (1, 2, 4, 8)
SHAPES = [
    (tokens, hidden, ffn)
    for tokens in (256, 1024)
    for hidden in (128, 256)
    for ffn in (64, 256, 1024)
]
ROUNDS, RATES_MBIT = 4, (800, 0)


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
            known = {
                "compute_s": medians_s["compute"],
                "move_s": medians_s["move"],
                "part_s": part_s,
            }
            chosen = min(best_parts(**known), PARTS[-1])
            seconds = {n: medians_s[str(n)] for n in PARTS}
            fastest = min(seconds, key=lambda n: seconds[n])
            rows.append(
                {
                    "tokens": tokens,
                    "hidden": hidden,
                    "ffn": ffn,
                    **known,
                    "measured_s": seconds,
                    "predicted_s": {n: parts_s(n, **known) for n in PARTS},
                    "chosen": chosen,
                    "fastest": fastest,
                    "lost": seconds[chosen] / seconds[fastest] - 1,
                }
            )
    return rows


def _on_link(rate_mbit: int) -> dict[str, object]:
    """The shapes in a process of their own, on a link of this rate; loopback itself at 0."""
    rows = run_on_link("bench.local.parts", rate_mbit)
    if "refused" in rows:
        return rows
    return {
        "shapes": rows,
        "within_5_percent": sum(each["lost"] <= 0.05 for each in rows) / len(rows),
        "best_chosen": sum(each["chosen"] == each["fastest"] for each in rows) / len(rows),
        "gain": statistics.geometric_mean(
            each["measured_s"]["1"] / each["measured_s"][str(each["chosen"])] for each in rows
        ),
    }


def measure() -> dict[str, object]:
    """Both links."""
    stamp = LoadStamp()
    links = {f"{rate} Mbit/s" if rate else "loopback": _on_link(rate) for rate in RATES_MBIT}
    return {
        "bench": "local.parts",
        "environment": environment(),
        "links": links,
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    inside = sys.argv[1:] == ["inside"]
    json.dump(run_ranks(2, on_rank)[0] if inside else measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
