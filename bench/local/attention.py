"""Context parallelism in seconds: two ranks against one, shardings, the peer, one core alone.

Forward and backward of one attention layer, fp32, 8 query heads, 2 key/value heads of width 64,
packs of Python sources. Parallel efficiency is ``one core / (2 x two ranks)``; one core runs
``attend_documents``, and two ranks end when the later one does. Sides of a pack take turns.
Each stands beside its price: a curve measured in the same run, and a link measured between the
two ranks. "Two copies at once" is the one-core side on both ranks, which share nothing: what
it takes longer than one alone is lost to the machine's shared caches and memory.

The peer, axolotl-ringmaster 0.2.7, is not a dependency: ``pip install --no-deps --target DIR
axolotl-ringmaster==0.2.7``, then run with ``PYTHONPATH=DIR``. On CPU it computes whole masked
blocks in plain torch operators, a path to validate its GPU kernels against: its times here
say nothing about those kernels.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  as torch's own documentation does

from bench.lib.stamp import LoadStamp, environment, spread
from bench.local.attention_ranks import (
    COPIES,
    HEADS,
    KV_HEADS,
    ONE,
    SEED,
    WIDTH,
    Case,
    Combo,
    RankReport,
    Side,
    draw,
    measure_ranks,
    pack_lengths,
    side_of,
    tell,
)
from equipoise.balance.context.plan import plan_context
from equipoise.comm.local import run_ranks
from equipoise.cost.curve import LoadCurve
from equipoise.cost.work import causal_pairs
from equipoise.nn.attention import attend_documents
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import BACKWARD_OVER_FORWARD, price_attention
from equipoise.train.process import settle

STRATEGIES = ("needed-kv", "all-gather", "ring", "ulysses", "pass-q")
SHARDINGS = ("mixed", "head-tail-document", "head-tail", "contiguous")
ALL = tuple((strategy, sharding) for strategy in STRATEGIES for sharding in SHARDINGS)
MAIN = tuple(combo for combo in ALL if combo[0] == STRATEGIES[0] or combo[1] == SHARDINGS[0])
QUICK = tuple(combo for combo in MAIN if not {"pass-q", "contiguous"} & set(combo))
FEW = (("needed-kv", "mixed"), ("needed-kv", "head-tail"))
CASES = [
    Case(2048, 0, rounds=3, combos=FEW[:1], has_peer=True),
    Case(4096, 0, rounds=3, combos=ALL),
    Case(4096, 1, rounds=5, combos=MAIN),
    Case(8192, 0, rounds=3, combos=MAIN, is_warmed=False),
    Case(16_384, 0, rounds=3, combos=QUICK, is_warmed=False),
    Case(32_768, 0, rounds=2, combos=FEW, has_copies=False, is_warmed=False),
]
ONE_CORE_PACKS = ((4096, 0, 3), (4096, 1, 3), (8192, 0, 2))
"""Tokens, number and rounds of the packs that one core runs alone."""
GOALS = {
    "efficiency from 4,096 tokens": 0.80,
    "efficiency from 16,384 tokens": 0.90,
    "over one masked call": 2.0,
    "rate over that of one document of as many pairs": 0.70,
}


def _predict(lengths: list[int], combo: Combo, report: RankReport) -> float:
    """Price of both passes over two ranks [s]."""
    strategy, sharding = combo
    plan = plan_context(lengths, 2, strategy, heads=HEADS, kv_heads=KV_HEADS, sharding=sharding)
    curve, full_pair_ns = _curve(report), _full_pair_ns(_curve(report))
    price = price_attention(
        plan.schedule,
        lambda pairs, _: curve.attention_ns(pairs) / (1 + BACKWARD_OVER_FORWARD),
        report.link,
        Wire(WIDTH, element_bytes=4),
        full_ns=lambda pairs, _: pairs * full_pair_ns / (1 + BACKWARD_OVER_FORWARD),
    )
    return 1e-9 * price.total_ns


def _full_pair_ns(curve: LoadCurve) -> float:
    """Price of a pair far from any mask: what a document costs beyond its two halves [ns]."""
    lengths = np.array([curve.doc_tokens[-1], curve.doc_tokens[-1] / 2])
    whole_ns, half_ns = curve.attention_ns(lengths * (lengths + 1) / 2).tolist()
    return float((whole_ns - 2 * half_ns) / lengths[1] ** 2)


def _curve(report: RankReport) -> LoadCurve:
    if report.curve is None:
        raise ValueError("rank 0 measures the curve")
    return report.curve


def _ratios(above: Sequence[float], below: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Ratios round by round, rounded."""
    ratios = spread([x / (scale * y) for x, y in zip(above, below, strict=True)])
    return {key: round(value, 4) for key, value in ratios.items()}


def two_ranks(case: Case, at: int, reports: list[RankReport]) -> dict[str, Any]:
    """Time, efficiency and price of every side on one pack."""
    lengths = pack_lengths(case.tokens, case.pack)
    first, second = (report.cases[at] for report in reports)
    one_s = first.seconds[ONE]
    both = {
        side: [max(pair) for pair in zip(seconds, second.seconds[side], strict=True)]
        for side, seconds in first.seconds.items()
        if side != ONE
    }
    pairs = causal_pairs(np.array(lengths, dtype=np.int64))
    priced_s = 1e-9 * float(_curve(reports[0]).attention_ns(pairs).sum())
    row: dict[str, Any] = {
        "tokens": case.tokens,
        "documents": sorted(lengths, reverse=True),
        "pairs": int(pairs.sum()),
        "one core, s (measured)": spread(one_s),
        "one core, s (predicted)": round(priced_s, 4),
    }
    if case.has_copies:
        row["one core over two copies at once (measured)"] = _ratios(one_s, both[COPIES])
    predicted = {combo: _predict(lengths, combo, reports[0]) for combo in case.combos}
    one_cpu_s = statistics.median(first.cpu_s[ONE])
    row["two ranks"] = [
        {
            "strategy": combo[0],
            "sharding": combo[1],
            "s (measured)": spread(both[combo]),
            "s (predicted)": round(predicted[combo], 4),
            "efficiency (measured)": _ratios(one_s, both[combo], 2.0),
            "efficiency (predicted)": round(priced_s / (2 * predicted[combo]), 4),
            "cpu over one core's (measured)": round(
                (statistics.median(first.cpu_s[combo]) + statistics.median(second.cpu_s[combo]))
                / one_cpu_s,
                4,
            ),
            "sent_bytes (counted)": first.sent_bytes[combo] + second.sent_bytes[combo],
        }
        for combo in case.combos
    ]
    row["head-tail over others"] = [
        {
            "strategy": strategy,
            "sharding": sharding,
            "ratio (measured)": _ratios(both[strategy, "head-tail"], both[strategy, sharding]),
            "ratio (predicted)": round(
                predicted[strategy, "head-tail"] / predicted[strategy, sharding], 4
            ),
        }
        for strategy, sharding in case.combos
        if sharding in SHARDINGS[:2] and (strategy, "head-tail") in both
    ]
    if case.has_peer:
        ours = both[case.combos[0]]
        row["peer"] = [
            {
                "side": name,
                "s (measured)": spread(both[name]),
                "over ours (measured)": _ratios(both[name], ours),
                "largest difference from one core": error,
            }
            for name, error in first.peer_error.items()
        ]
    return row


def one_core(tokens: int, pack: int, rounds: int) -> dict[str, Any]:
    """Documents one by one, one masked call over the pack, and one document of as many pairs."""
    lengths = pack_lengths(tokens, pack)
    inputs, grad_o = draw(tokens)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    is_read = (document[:, None] == document[None, :]).tril_()
    # A mask of floats is faster: torch converts booleans into one in every call.
    mask = torch.zeros(tokens, tokens).masked_fill_(~is_read, float("-inf"))
    leading = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in inputs]
    pairs = int(causal_pairs(np.array(lengths, dtype=np.int64)).sum())
    alone = round((2 * pairs + 0.25) ** 0.5 - 0.5)
    alone_inputs, alone_grad_o = draw(alone)
    sides: dict[str, Side] = {
        "documents": side_of(lambda q, k, v: attend_documents(q, k, v, lengths), inputs, grad_o),
        "one masked call": side_of(
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True
            ),
            leading,
            grad_o.transpose(0, 1)[None].contiguous(),
        ),
        "one document": side_of(
            lambda q, k, v: attend_documents(q, k, v, [alone]), alone_inputs, alone_grad_o
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for at in range(-1, rounds):
        for name in list(sides)[:: -1 if at % 2 else 1]:
            began = time.perf_counter()
            sides[name]()
            if at >= 0:
                seconds[name].append(time.perf_counter() - began)
    return {
        "tokens": tokens,
        "documents": sorted(lengths, reverse=True),
        "pairs": pairs,
        "one document of as many pairs, tokens": alone,
        "s (measured)": {name: spread(times) for name, times in seconds.items()},
        "one masked call over documents (goal 2.0)": _ratios(
            seconds["one masked call"], seconds["documents"]
        ),
        "rate over that of one document (goal 0.70)": _ratios(
            seconds["one document"], seconds["documents"]
        ),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The default strategy and sharding at each length, and the best that ran."""
    lines: dict[str, Any] = {}
    for row in rows:
        medians = {
            f"{each['strategy']}, {each['sharding']}": each["efficiency (measured)"]["median"]
            for each in row["two ranks"]
        }
        best = max(medians, key=lambda name: medians[name])
        lines.setdefault(f"{row['tokens']:,} tokens", []).append(
            {
                "efficiency of needed-kv, mixed": medians["needed-kv, mixed"],
                f"efficiency of the best, {best}": medians[best],
            }
        )
    return lines


def measure() -> dict[str, Any]:
    """All parts."""
    stamp, machine = LoadStamp(), environment()
    reports = run_ranks(2, measure_ranks, CASES)
    rows = [two_ranks(case, at, reports) for at, case in enumerate(CASES)]
    tell("one core alone")
    settle(0, pin=True)
    alone = [one_core(*each) for each in ONE_CORE_PACKS]
    return {
        "what": "forward and backward of one attention layer over packed Python sources, fp32, "
        f"8 query heads, 2 key/value heads of width {WIDTH}; packs of seed {SEED}; ratios are "
        "taken round by round, then their median",
        "goals": GOALS,
        "summary": summary(rows),
        "peer": {
            "version": reports[0].peer,
            "note": "its CPU path computes whole masked blocks to validate its GPU kernels: "
            "beside ours for completeness, no claim about those",
        },
        "packs": rows,
        "one core alone": alone,
        "link (measured)": dataclasses.asdict(reports[0].link),
        "curve, one core (measured)": {
            "doc_tokens": _curve(reports[0]).doc_tokens,
            "doc_ms": [round(1e-6 * each, 4) for each in _curve(reports[0]).doc_ns],
        },
        "other_load_cores": stamp.other_load(sum(report.cpu_s for report in reports)),
        "environment": machine,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(measure(), sys.stdout, indent=1)
