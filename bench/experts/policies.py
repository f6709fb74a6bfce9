"""Policies of experts on two ranks: what ``auto`` takes, beside the best that was measured.

One layer of experts, forward and backward in fp32, on the rows of every workload W0 to W7, with the
loads of the step before where a policy plans by them; on links of limited rate (a network namespace
behind a token bucket) and on loopback, where the cores that compute also send. Policies take turns
in random order; seconds are those of the slower rank. ``regret`` is the median of the policy that
``auto`` takes, by the price that a run pays with ``experts.least_rows`` of this machine and link,
over the median of the fastest policy, minus 1. Two equal ways differ by noise alone: ``noise`` is
how far apart the medians of the same policy's odd and even rounds are.
"""

import json
import random
import statistics
import sys
import time

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.lib.limited import run_on_link
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.balance.expert.bound import break_even_rows
from equipoise.balance.expert.policies import EXPERT_POLICIES, choose_experts
from equipoise.balance.expert.price import RowPrices
from equipoise.balance.expert.request import ExpertRequest
from equipoise.balance.expert.workload import WORKLOADS, workload
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.parallel.expert.balanced import BalancedExchange
from equipoise.parallel.expert.exchange import sparse_layers, spread_experts
from equipoise.parallel.expert.obey import balance_experts
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import ExpertsSpec

MODEL = ModelSpec(
    layers=1,
    hidden=256,
    heads=4,
    kv_heads=4,
    ffn=512,
    vocab=512,
    head_width=64,
    experts=8,
    top_k=2,
    expert_ffn=512,
)
RANKS, ROWS, SLOTS, STEP, ROUNDS, RATES_MBIT = 2, 1024, 4, 3, 8, (400, 1600, 0)
_BYTES = 4 << 20


def _rates(ranks: Ranks) -> tuple[float, float]:
    """Products of a rank [FLOP/s], and what it sends to the other [bytes/s]."""
    a, b = torch.randn(ROWS, MODEL.hidden), torch.randn(MODEL.hidden, MODEL.expert_ffn)
    rows, seconds = torch.randn(_BYTES // 4), {"product": [], "message": []}
    for _ in range(7):
        began = time.perf_counter()
        _ = a @ b
        seconds["product"].append(time.perf_counter() - began)
        ranks.barrier()
        began = time.perf_counter()
        torch.distributed.all_to_all_single(torch.empty_like(rows), rows)
        seconds["message"].append(time.perf_counter() - began)
    every = ranks.gather_floats([statistics.median(each) for each in seconds.values()])
    product_s, message_s = np.asarray(every).reshape(RANKS, 2).max(axis=0).tolist()
    return 2.0 * a.numel() * MODEL.expert_ffn / product_s, _BYTES / RANKS / message_s


def _exchange(ranks: Ranks, policy: str, least_rows: int) -> tuple[BalancedExchange, object]:
    """One layer's exchange under a policy, and its experts."""
    decoder = Decoder(MODEL)
    initialize(decoder, 0)
    mesh = Mesh.join(ranks, Layout(dp=RANKS, ep=RANKS, zero=1))
    spread_experts(decoder, mesh, policy=MixedPrecisionPolicy())
    balance_experts(decoder, ExpertsSpec(policy, slots=SLOTS, least_rows=least_rows))
    (layer,) = sparse_layers(decoder)
    if not isinstance(layer.exchange, BalancedExchange):  # fixed: planned all the same
        base = layer.exchange
        layer.exchange = BalancedExchange(base, ExpertsSpec(policy), ffn=MODEL.expert_ffn)
    return layer.exchange, layer.experts


def on_rank(ranks: Ranks) -> dict[str, object]:
    """Every workload on this link."""
    torch.set_num_threads(1)
    flop_per_s, bytes_per_s = _rates(ranks)
    break_even = break_even_rows(flop_per_s, bytes_per_s, weight_bytes=4, gradient_bytes=4)
    least_rows = max(1, round(break_even))
    row_cost = RowPrices.of_width(least_rows, MODEL.expert_ffn).row_cost
    sides = {policy: _exchange(ranks, policy, least_rows) for policy in EXPERT_POLICIES}
    drawn, kinds = random.Random(0), {}
    for kind in WORKLOADS:
        sizes = {"ranks": RANKS, "experts": MODEL.experts, "rows_per_rank": ROWS}
        rows = workload(kind, 0, STEP, **sizes)
        seen = workload(kind, 0, STEP - 1, **sizes).sum(axis=0)
        request = ExpertRequest(rows, SLOTS, least_rows, seen, row_cost=row_cost)
        choice = choose_experts(request)
        counts = torch.from_numpy(rows[ranks.rank].copy())
        x = torch.randn(int(counts.sum()), MODEL.hidden)
        seconds: dict[str, list[float]] = {policy: [] for policy in sides}
        for turn in range(ROUNDS + 1):
            for policy in drawn.sample(list(sides), len(sides)):
                exchange, experts = sides[policy]
                exchange.seen = seen
                ranks.barrier()
                began = time.perf_counter()
                exchange(x.requires_grad_(), counts, experts).sum().backward()
                passed = float(ranks.gather_floats([time.perf_counter() - began]).max())
                if turn:
                    seconds[policy].append(passed)
        medians = {policy: statistics.median(each) for policy, each in seconds.items()}
        taken = choice.schedule.policy
        halves = [
            statistics.median(each[::2]) / statistics.median(each[1::2])
            for each in seconds.values()
        ]
        kinds[kind] = {
            "auto": taken,
            "fastest": min(medians, key=lambda policy: medians[policy]),
            "regret": medians[taken] / min(medians.values()) - 1.0,
            "noise": max(abs(each - 1.0) for each in halves),
            "layer_s": {policy: spread(each) for policy, each in seconds.items()},
            "price_rows": choice.prices,
        }
    regrets = [each["regret"] for each in kinds.values()]
    layers = [each["layer_s"] for each in kinds.values()]
    singles = {
        policy: statistics.fmean(each[policy]["median"] for each in layers) for policy in sides
    }
    return {
        "least_rows": least_rows,
        "regret_mean": statistics.fmean(regrets),
        "regret_worst": max(regrets),
        "mean_layer_s_of_single_policies": singles,
        "kinds": kinds,
    }


def measure() -> dict[str, object]:
    """Every link."""
    stamp = LoadStamp()
    links = {
        f"{rate} Mbit/s" if rate else "loopback": run_on_link("bench.experts.policies", rate)
        for rate in RATES_MBIT
    }
    return {
        "bench": "experts.policies",
        "kind": "measured",
        "environment": environment(),
        "model": {"hidden": MODEL.hidden, "experts": MODEL.experts, "ffn": MODEL.expert_ffn},
        "ranks": RANKS,
        "rows_per_rank": ROWS,
        "links": links,
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    inside = sys.argv[1:] == ["inside"]
    json.dump(run_ranks(RANKS, on_rank)[0] if inside else measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
