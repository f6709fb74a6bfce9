"""Context parallelism's tiles on one device: one call for a round, beside one call for each tile.

All ranks of a schedule are played on the device, one after another, forward and backward. Beside
them is attention over the whole pack in one piece: what dividing it costs where messages are free.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.lib.device import call_s, device_facts, run_here
from bench.lib.stamp import environment, spread
from equipoise.balance.context.plan import ContextPlan, plan_context
from equipoise.nn.attention import pack_attention
from equipoise.parallel.context.function import AttendInOneProcess
from equipoise.parallel.context.program import compile_rank


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run."""

    ranks: int = 4
    heads: int = 16
    kv_heads: int = 8
    head_width: int = 128
    packs: tuple[tuple[int, ...], ...] = (
        (16384,),
        (8192, 4096, 2048, 1024, 512, 256, 128, 128),
        (256,) * 64,
    )
    strategies: tuple[str, ...] = ("needed-kv", "ring", "pass-q", "ulysses")
    samples: int = 5


def measure(device: torch.device, sizes: Sizes | None = None) -> dict[str, Any]:
    """Time every strategy on every pack."""
    sizes = sizes or Sizes()
    rows = [row for lengths in sizes.packs for row in _pack_rows(lengths, device, sizes)]
    return {
        "what": f"attention of {sizes.ranks} ranks played on one device, both passes, bf16",
        **device_facts(device),
        "rows": rows,
        "environment": environment(),
    }


def _pack_rows(
    lengths: tuple[int, ...], device: torch.device, sizes: Sizes
) -> Iterator[dict[str, Any]]:
    q, k, v = (
        torch.randn(sum(lengths), heads, sizes.head_width, device=device, dtype=torch.bfloat16)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    operands = tuple(x.requires_grad_() for x in (q, k, v))
    attend = pack_attention(lengths, device).attend
    taken = call_s(lambda: _both(attend(*operands), operands), device, samples=sizes.samples)
    whole_s = spread(taken)["median"]
    for strategy in sizes.strategies:
        plan = plan_context(
            lengths, sizes.ranks, strategy, heads=sizes.heads, kv_heads=sizes.kv_heads
        )
        row: dict[str, Any] = {"documents": len(lengths), "strategy": strategy}
        for name, by_calls in (("one call a round", True), ("one call a tile", False)):
            row[name] = _time(plan, operands, device, sizes, by_calls=by_calls)
            row[name]["over one rank's"] = row[name]["s"]["median"] / whole_s
        yield row | {"one rank's s": whole_s}


def _both(out: torch.Tensor, operands: tuple[torch.Tensor, ...]) -> object:
    return torch.autograd.grad(out, operands, torch.ones_like(out))


def _time(
    plan: ContextPlan,
    operands: tuple[torch.Tensor, ...],
    device: torch.device,
    sizes: Sizes,
    *,
    by_calls: bool,
) -> dict[str, Any]:
    schedule = plan.schedule
    programs = tuple(
        compile_rank(schedule, rank, device, by_calls=by_calls) for rank in range(schedule.ranks)
    )
    sent_bytes = np.zeros((schedule.ranks, schedule.ranks), dtype=np.int64)

    def run() -> object:
        out = AttendInOneProcess.apply(*operands, None, 0.0, programs, sent_bytes)
        return _both(out, operands)

    rounds = [each for program in programs for each in program.rounds]
    calls = sum(len(each.calls) if by_calls else len(each.tiles) for each in rounds)
    return {"calls": calls, "s": spread(call_s(run, device, samples=sizes.samples))}


if __name__ == "__main__":
    run_here(measure)
