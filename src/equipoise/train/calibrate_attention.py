"""Time the attention core of a step on this machine's ranks: by document, and over ranks.

What it decides
    Documents of each length are attended to as a layer does it, so many at once that a call holds
    512 tokens. Over context ranks every strategy is run on packs of one to sixteen equal
    documents, so that what a call costs and what a tile costs can be told apart. Time is the
    clock's, as a step's is.

Kept true (tests/multi/test_calibrate_parts.py)
    Every length and every strategy that the heads allow is timed.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.nn.attention import attend_documents
from equipoise.parallel.context.attention import attend_by_plan
from equipoise.parallel.context.plan import plan_context
from equipoise.train.calibrate_parts import PartsPlan
from equipoise.train.process import settle

STRATEGIES = ("needed-kv", "all-gather", "ring", "ulysses")
"""Of attention over context ranks, that are timed."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def time_documents(
    ranks: Ranks, plan: PartsPlan, heads: int, kv_heads: int
) -> dict[int, tuple[list[float], list[float]]]:
    """Forward and backward seconds of the attention core of one document, by its tokens."""
    settle(ranks.rank, pin=True)
    found = {}
    for tokens in plan.doc_tokens:
        copies = max(1, 512 // tokens)
        lengths = [tokens] * copies
        q, k, v = _operands(plan, tokens * copies, heads, kv_heads)

        def attend(
            q: torch.Tensor = q,
            k: torch.Tensor = k,
            v: torch.Tensor = v,
            lengths: list[int] = lengths,
        ) -> torch.Tensor:
            return attend_documents(q, k, v, lengths)

        ranks.barrier()
        both = _time_both(attend, (q, k, v), samples=3 * plan.steps)
        found[tokens] = tuple([s / copies for s in each] for each in both)
    return found  # type: ignore[return-value]


def time_context(
    ranks: Ranks, plan: PartsPlan, packs: tuple[tuple[int, ...], ...]
) -> dict[tuple[str, int], tuple[list[float], list[float]]]:
    """Forward and backward seconds of attention over all ranks, by strategy and pack."""
    settle(ranks.rank, pin=True)
    found = {}
    for strategy in STRATEGIES:
        for at, lengths in enumerate(packs):
            try:
                planned = plan_context(
                    lengths,
                    ranks.world,
                    strategy,
                    heads=plan.model.heads,
                    kv_heads=plan.model.kv_heads,
                )
            except LayoutError:
                continue  # heads do not divide
            own = len(planned.shares.rows[ranks.rank])
            operands = _operands(plan, own, plan.model.heads, plan.model.kv_heads)

            def attend(planned: Any = planned, operands: Any = operands) -> torch.Tensor:
                return attend_by_plan(*operands, planned)

            found[strategy, at] = _time_both(
                attend, operands, samples=2 * plan.steps, meet=ranks.barrier
            )
    return found


def _operands(
    plan: PartsPlan, tokens: int, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width, dtype = plan.model.head_width, _DTYPES[plan.precision]
    q, k, v = (
        torch.randn(tokens, each, width).to(dtype).requires_grad_()
        for each in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def _time_both(
    attend: Callable[[], torch.Tensor],
    operands: tuple[torch.Tensor, ...],
    *,
    samples: int,
    meet: Callable[[], None] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Seconds of forwards and backwards, after one of each that warms up."""
    forward_s, backward_s = [], []
    for _ in range(samples + 1):
        meet()
        began = time.perf_counter()
        out = attend()
        middle = time.perf_counter()
        meet()
        grad = torch.ones_like(out)
        again = time.perf_counter()
        torch.autograd.grad(out, operands, grad)
        backward_s.append(time.perf_counter() - again)
        forward_s.append(middle - began)
    return forward_s[1:], backward_s[1:]
