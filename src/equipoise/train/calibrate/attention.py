"""Time the attention core of a step on this machine's ranks: by document, and over ranks.

What it decides
    Documents of each length are attended to as a layer does it, enough of them at once for a call
    of 512 tokens, or on devices for the largest micro-batch. Over context ranks every strategy is
    run on packs of one to sixteen equal documents, so that what a call costs and what a tile costs
    can be separated. Each is timed once after every step of the others, so that passing
    disturbances hit all alike. Short documents always are; longer ones, and ranks that share a
    pack, as far as the time goes. The first round warms up, for which short ones are enough.

Kept true (tests/multi/plan/test_calibrate_parts.py)
    Every length and every strategy that the heads allow is timed.
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch

from equipoise.balance.context.plan import plan_context
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.nn.attention import pack_attention
from equipoise.nn.device.clock import wall_clock
from equipoise.nn.measure_kernels import DTYPES
from equipoise.parallel.context.attention import attend_by_plan
from equipoise.train.calibrate.parts_plan import SHORT_TOKENS, PartsPlan, WaySamples

STRATEGIES = ("needed-kv", "all-gather", "ring", "ulysses")
"""Strategies over context ranks that are timed."""

_CALL_TOKENS = 512
"""Tokens of short documents that one call attends to on a core."""

_WARM_TOKENS = 1024
"""Longest document that is run to warm up."""

More = Callable[[], bool]
"""Whether there is time for more; all ranks get the same answer."""

Sample = Callable[[bool, More], None]
"""Times everything once, as far as there is time; kept, or to warm up."""


def time_documents(ranks: Ranks, plan: PartsPlan, shares: int, samples: WaySamples) -> Sample:
    """The attention core of one document, of every length.

    Args:
        ranks: All of them, at the same time.
        plan: Which lengths.
        shares: Ranks that share the heads.
        samples: What is kept goes there.
    """
    heads, kv_heads = plan.model.heads // shares, max(1, plan.model.kv_heads // shares)
    calls = []
    # A device is as full as in a micro-batch of such documents; a core is never idle.
    call_tokens = _CALL_TOKENS if ranks.device.type == "cpu" else plan.sizes[-1]
    for tokens in plan.doc_tokens:
        copies = max(1, call_tokens // tokens)
        operands = _operands(plan, tokens * copies, heads, kv_heads, ranks.device)
        calls.append((tokens, copies, operands))
        samples.documents[tokens] = [], []

    def sample(kept: bool, more: More) -> None:
        for tokens, copies, operands in calls:
            if tokens > _WARM_TOKENS and not kept:
                continue
            if tokens > SHORT_TOKENS and kept and not more():
                return
            attend = pack_attention([tokens] * copies, ranks.device).attend
            both = _time_both(attend, operands, ranks)
            for seconds, kept_s in zip(both, samples.documents[tokens], strict=True):
                kept_s.extend([seconds / copies] * kept)

    return sample


def time_context(ranks: Ranks, plan: PartsPlan, samples: WaySamples) -> Sample:
    """Attention over all ranks, by every strategy that the heads allow, on every pack."""
    heads, kv_heads = plan.model.heads, plan.model.kv_heads
    calls = []
    for strategy, (at, lengths) in itertools.product(STRATEGIES, enumerate(plan.packs)):
        try:
            planned = plan_context(lengths, ranks.world, strategy, heads=heads, kv_heads=kv_heads)
        except LayoutError:
            continue
        own = len(planned.shares.rows[ranks.rank])
        operands = _operands(plan, own, heads, kv_heads, ranks.device)
        samples.context[strategy, at] = [], []
        is_short = at == len(plan.packs) - 1
        calls.append((samples.context[strategy, at], planned, operands, is_short))

    def sample(kept: bool, more: More) -> None:
        for lists, planned, operands, is_short in calls:
            if kept and not more():
                return
            if not kept and not is_short:
                continue
            both = _time_both(partial(attend_by_plan, plan=planned), operands, ranks)
            for seconds, kept_s in zip(both, lists, strict=True):
                kept_s.extend([seconds] * kept)

    return sample


def _operands(
    plan: PartsPlan, tokens: int, heads: int, kv_heads: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width, dtype = plan.model.head_width, DTYPES[plan.precision]
    q, k, v = (
        torch.randn(tokens, each, width, device=device).to(dtype).requires_grad_()
        for each in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def _time_both(
    attend: Callable[..., torch.Tensor],
    operands: tuple[torch.Tensor, ...],
    ranks: Ranks,
) -> tuple[float, float]:
    """Seconds of a forward and of a backward, until the rank's device has done them."""
    clock = wall_clock(ranks.device)
    ranks.barrier()
    began = clock()
    out = attend(*operands)
    forward_s = clock() - began
    grad = torch.ones_like(out)
    ranks.barrier()
    began = clock()
    torch.autograd.grad(out, operands, grad)
    return forward_s, clock() - began
