"""WLB-LLM's configurations, and dynamic context parallelism as published since, by simulation.

Everything comes from ``sim.policies.compare``, which ``equipoise simulate --policy a,b`` calls:
useful FLOP and tokens are equal over all policies of a row, exactly. Nothing is fitted.

WLB-LLM: arXiv:2503.17924, Table 1 (TP, CP, PP, DP), a global batch of PP x DP windows, interleaved
stages. Documents are ``pretrain-128k``, cut at windows. Assumed, since the paper does not say: two
stages a rank, Llama 2's sizes for 7B and 70B, hidden 7,168 and 56 heads for 30B, ZeRO 1, and the
same corpus for every window.

verl #6555: Qwen3-30B-A3B, BF16, TP1, PP1, EP8, CP4, 4,096 tokens a rank, lengths 1K to 16K.
Assumed: 32 H100, steps of 64 x 16,384 tokens, full recomputation, lengths 1,024 x 16^(u^2) for u
uniform ("long-tail"), a ring. Megatron-Bridge #4586: "2.4x on Nemotron Ultra SFT at 256K", with
nothing else said. Assumed: a dense model of 70B, 256 H100, CP16, 16,384 tokens a rank, lengths
1,024 x 256^(u^3), a ring.
"""

import json
import math
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.lib.stamp import environment
from equipoise.sim.policies.compare import PolicyComparison, compare_policies
from equipoise.sim.policies.setting import CompareOptions
from equipoise.sim.request import StepRequest

B30 = "layers=60,hidden=7168,heads=56,ffn=19200,vocab=32000"
QWEN = (
    "layers=48,hidden=2048,heads=32,kv_heads=4,head_width=128,ffn=6144,vocab=151936,"
    "experts=128,top_k=8,expert_ffn=768"
)
K = 1024
CONFIGURATIONS = (
    ("7B", "llama2-7b", 32 * K, 32, "tp=4,cp=2,pp=4,virtual=2", None),
    ("7B", "llama2-7b", 64 * K, 32, "tp=4,cp=2,pp=4,virtual=2", None),
    ("7B", "llama2-7b", 96 * K, 64, "tp=8,cp=2,pp=4,virtual=2", None),
    ("7B", "llama2-7b", 128 * K, 64, "tp=8,cp=2,pp=4,virtual=2", 1.33),
    ("7B", "llama2-7b", 160 * K, 64, "tp=8,cp=2,pp=4,virtual=2", 1.40),
    ("30B", B30, 64 * K, 64, "tp=8,cp=2,pp=4,virtual=3", None),
    ("30B", B30, 128 * K, 128, "tp=8,cp=4,pp=4,virtual=3", None),
    ("70B", "llama2-70b", 64 * K, 256, "tp=16,cp=4,pp=4,virtual=2", None),
    ("70B", "llama2-70b", 128 * K, 256, "tp=16,cp=4,pp=4,virtual=2", None),
)
"""Name, model, window, devices, layout, and the published gain of the paper's figures."""
POLICIES = ("in-order", "by-work", "delayed", "divided-in-time", "divided", "gangs", "flexsp")
ZERO_DELAY = ("by-work", "divided-in-time", "divided", "gangs", "flexsp")
SFT = ("by-work", "divided", "gangs", "bytescale", "flexsp")
STEPS = 16


def _require_equal(answer: PolicyComparison) -> None:
    contents = {(row.tokens, row.useful_flop) for row in answer.rows}
    assert len(contents) == 1, contents
    assert all(row.bound_s <= row.seconds for row in answer.rows)


def _published(row: tuple[str, str, int, int, str, float | None]) -> dict[str, Any]:
    name, model, window, devices, layout, published = row
    request = StepRequest(model, f"h100-sxm:{devices}", layout, window, 4, lengths="pretrain-128k")
    answer = compare_policies(request, POLICIES, steps=STEPS)
    _require_equal(answer)
    fitting = [each for each in answer.rows if each.fits]
    best = max((r for r in fitting if r.policy in ZERO_DELAY), key=lambda r: r.gain)
    # Of plain packing's loss, what is the layout's: the same windows without a pipeline.
    words = dict(word.split("=") for word in layout.split(","))
    wide = f"tp={words['tp']},cp={int(words['cp']) * int(words['pp'])}"
    other = StepRequest(model, f"h100-sxm:{devices}", wide, window, 4, lengths="pretrain-128k")
    flat = compare_policies(other, ["in-order", "by-work"], steps=STEPS)
    _require_equal(flat)
    plain = answer.row("plain")
    return {
        "configuration": f"{name}-{window // K}K",
        "devices": devices,
        "published_gain": published,
        "gain_by_work": answer.row("by-work").gain,
        "gain_delayed": answer.row("delayed").gain,
        "best_zero_delay": best.policy,
        "gain_zero_delay (goal 1.40)": best.gain,
        "bound_of_gain": best.most_gain,
        "gain_of_plain_without_pipeline": plain.seconds / flat.row("plain").seconds,
        "gain_of_by_work_without_pipeline": plain.seconds / flat.row("by-work").seconds,
        "rows": [asdict(each) for each in answer.rows],
    }


def _tail(most: int, power: float, documents: int = 4096) -> list[int]:
    """Lengths from 1K to ``most``, fewer the longer."""
    draw = np.random.Generator(np.random.PCG64(0)).random(documents)
    lengths = K * np.exp(draw**power * math.log(most / K))
    return [int(each) for each in np.clip(lengths, K, most)]


def _dynamic(
    name: str, request: StepRequest, cap: int, published: dict[str, float], steps: int
) -> dict[str, Any]:
    answer = compare_policies(request, SFT, steps=steps, how=CompareOptions("documents", cap))
    _require_equal(answer)
    return {
        "configuration": name,
        "published": published,
        "tokens_per_s": {row.policy: row.tokens / row.seconds for row in answer.rows},
        "gain": {row.policy: row.gain for row in answer.rows},
        "bound_of_gain": {row.policy: row.most_gain for row in answer.rows},
        "rows": [asdict(each) for each in answer.rows],
    }


def measure() -> dict[str, Any]:
    """Every configuration."""
    rows = []
    for row in CONFIGURATIONS:
        rows.append(_published(row))
        print(rows[-1]["configuration"], file=sys.stderr, flush=True)
    verl = StepRequest(
        QWEN,
        "h100-sxm:32",
        "cp=4,dp=8,ep=8,zero=1",
        16 * K,
        64,
        lengths=_tail(16 * K, 2.0),
        recompute="full",
        context_strategy="ring",
    )
    nemotron = StepRequest(
        "llama3-70b",
        "h100-sxm:256",
        "tp=8,cp=16,dp=2,zero=1",
        256 * K,
        8,
        lengths=_tail(256 * K, 3.0),
        recompute="full",
        context_strategy="ring",
    )
    said = {"fixed_tokens_per_s": 209_970.0, "dynamic_tokens_per_s": 337_160.0, "gain": 1.61}
    dynamic = [
        _dynamic("verl #6555", verl, 4 * K, said, 4),
        _dynamic("Megatron-Bridge #4586", nemotron, 16 * K, {"gain": 2.4}, 4),
    ]
    return {
        "what": "packing policies at published configurations, simulated on equal content",
        "steps": STEPS,
        "rows": rows,
        "dynamic context parallelism": dynamic,
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
