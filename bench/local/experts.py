"""A layer of experts against transformers' Mixtral block, and experts shared by two ranks.

One core, forward and backward in fp32, sides in random order each round:
    ours, ours by a loop          with torch's grouped_mm, and without
    transformers eager            its loop over experts
    transformers grouped_mm       its form for the same kernel

Two ranks, a step of ``moe-3m`` on fixed documents: ZeRO 1 with all experts on every rank, and with
half of them on each. Rows that travel are counted; ranks are timed by wall clock.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe import matmul as moe_matmul
from equipoise.nn.moe.balance import collect_loads
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.parallel.expert.exchange import spread_experts
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.expert.skew import load_skew
from equipoise.spec.layout import Layout
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import preset

MODEL = preset("moe-3m").scaled(hidden=256)
TOKENS, ROUNDS = 2048, 15
LENGTHS = (700, 90, 500, 30, 728)


def _theirs(ours: MixtureOfExperts, form: str) -> nn.Module:
    from transformers import AutoConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = AutoConfig.for_model(**hf_config(MODEL))
    config._experts_implementation = form
    block = MixtralSparseMoeBlock(config)
    experts = ours.experts
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((experts.gate.weight, experts.up.weight), 1))
        block.experts.down_proj.copy_(experts.down.weight)
    return block


def _layers() -> dict[str, object]:
    torch.manual_seed(0)
    ours = MixtureOfExperts(MODEL)
    x_TD = torch.randn(TOKENS, MODEL.hidden, requires_grad=True)
    blocks = {form: _theirs(ours, form) for form in ("eager", "grouped_mm")}

    def loop() -> None:
        kept = dict(moe_matmul._GROUPED)
        moe_matmul._GROUPED.clear()
        try:
            ours(x_TD, x_TD).sum().backward()
        finally:
            moe_matmul._GROUPED.update(kept)

    sides: dict[str, Callable[[], None]] = {
        "ours": lambda: ours(x_TD, x_TD).sum().backward(),
        "ours by a loop": loop,
    }
    for form, block in blocks.items():
        sides[f"transformers {form}"] = lambda block=block: block(x_TD[None]).sum().backward()
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    order = random.Random(0)
    for number in range(ROUNDS + 2):  # two rounds warm up
        for side in order.sample(list(sides), len(sides)):
            began = time.thread_time()
            sides[side]()
            if number > 1:
                cpu[side].append(time.thread_time() - began)
    base = statistics.median(cpu["ours"])
    return {
        side: {"cpu_s": spread(times), "over_ours": statistics.median(times) / base}
        for side, times in cpu.items()
    }


def _steps(ranks: Ranks, ep: int) -> dict[str, object]:
    decoder = Decoder(preset("moe-3m"))
    initialize(decoder, 0)
    mesh = Mesh.join(ranks, Layout(dp=ranks.world, ep=ep))
    ledgers = spread_experts(decoder, mesh, policy=MixedPrecisionPolicy())
    sharded = ShardedDecoder(decoder, ranks, zero=1, precision="fp32")
    tokens = torch.randint(4096, (sum(LENGTHS),))
    wall, cpu = [], []
    for number in range(ROUNDS + 2):
        ranks.barrier()
        began, busy = time.perf_counter(), time.thread_time()
        sharded.prepare_micro_batch(last=False)
        (decoder(tokens, LENGTHS, labels_T=tokens) / len(tokens)).backward()
        sharded.sum_gradients()
        decoder.zero_grad(set_to_none=True)
        if number > 1:
            wall.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - busy)
    loads, _ = collect_loads(decoder)
    local = sum(p.to_local().numel() for p in decoder.parameters())
    return {
        "step_s": spread(wall),
        "rank_cpu_s": spread(cpu),
        "sent_bytes_a_step": sum(int(each.sent_bytes.sum()) for each in ledgers) // (ROUNDS + 2),
        "held_weights": local,
        "expert_skew": max(load_skew(each) for each in loads.tolist()),
    }


def measure() -> dict[str, object]:
    """Run all sides and return their figures."""
    torch.set_num_threads(1)
    stamp = LoadStamp()
    layers = _layers()
    two = {f"experts on {ep} ranks": run_ranks(2, _steps, ep) for ep in (1, 2)}
    return {
        "bench": "experts",
        "environment": environment(),
        "tokens": TOKENS,
        "model": {"hidden": MODEL.hidden, "experts": MODEL.experts, "expert_ffn": MODEL.expert_ffn},
        "layer": layers,
        "two_ranks": two,
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
