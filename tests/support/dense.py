"""Plans to try, and attention with every mask written out, to compare executors with."""

import torch
from hypothesis import strategies as st

from equipoise.balance.context.plan import ContextPlan, plan_context
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.schedule.attention.strategies import STRATEGIES
from support.placements import masks_for, written_out

SHARDINGS = ["contiguous", "head-tail", "head-tail-document", "by-work", "mixed"]
WIDTH = 8


@st.composite
def plans(draw: st.DrawFn, most_ranks: int = 6) -> ContextPlan:
    """Any strategy, sharding, masks and heads over a few short documents."""
    lengths = draw(st.lists(st.integers(0, 50), max_size=5))
    ranks = draw(st.integers(1, most_ranks))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (9, 3), (6, 2), (5, 5)]))
    return plan_context(
        lengths,
        ranks,
        draw(st.sampled_from(list(STRATEGIES))),
        heads=heads,
        kv_heads=kv_heads,
        mask=[draw(masks_for(tokens)) for tokens in lengths],
        sharding=draw(st.sampled_from(SHARDINGS)),
        tile=draw(st.sampled_from([1, 4, 16])),
        ranks_per_node=2 if ranks % 2 == 0 else 1,
    )


def tensors(plan: ContextPlan, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    schedule = plan.schedule
    draw = torch.Generator().manual_seed(schedule.tokens)
    heads = (schedule.heads, schedule.kv_heads, schedule.kv_heads, schedule.heads)
    return [
        torch.randn(schedule.tokens, each, WIDTH, dtype=torch.float64, generator=draw).to(dtype)
        for each in heads
    ]


def run(plan: ContextPlan, given_tensors, sent=None, *, softcap=0.0) -> list[torch.Tensor]:
    """Output and gradients of all ranks together; a fourth tensor before the last is sinks."""
    *leaves, grad_o = given_tensors
    leaves = [x.clone().requires_grad_() for x in leaves]
    sinks_H = leaves[3] if len(leaves) > 3 else None
    out = attend_in_one_process(*leaves[:3], plan, sent, softcap=softcap, sinks_H=sinks_H)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_o)]


def attend_densely(plan: ContextPlan, q, k, v, sinks_H=None, *, softcap=0.0) -> torch.Tensor:
    """Softmax over scores in fp64, those outside the mask minus infinity, by document."""
    schedule = plan.schedule
    sizes, ratio = schedule.doc_tokens.tolist(), schedule.heads // schedule.kv_heads
    outs = [q[:0]]
    for mask, *parts in zip(schedule.masks, *(x.split(sizes) for x in (q, k, v)), strict=True):
        q_HtE, k_HtE, v_HtE = (x.transpose(0, 1) for x in parts)
        k_HtE, v_HtE = (x.repeat_interleave(ratio, 0) for x in (k_HtE, v_HtE))
        allowed = torch.from_numpy(written_out(mask, len(parts[0])))
        scores = q_HtE @ k_HtE.transpose(1, 2) / q.shape[2] ** 0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(~allowed, float("-inf"))
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H[:, None, None].expand(-1, len(parts[0]), 1)], 2)
        weights = scores.softmax(2)[..., : len(parts[0])]
        outs.append((weights @ v_HtE).transpose(0, 1))
    return torch.cat(outs)


def one_rank(plan: ContextPlan, given_tensors, *, softcap=0.0) -> list[torch.Tensor]:
    """Output and gradients of one process, dense, in fp64."""
    *leaves, grad_o = (x.double() for x in given_tensors)
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend_densely(plan, *leaves, softcap=softcap)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_o, materialize_grads=True)]


def errors(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> tuple[float, float]:
    """Largest error of the output, and of a gradient, each over its own scale.

    One scale for the three gradients: those of a one-token document's q and k are exactly 0.
    """
    if not wanted[0].numel():
        return 0.0, 0.0
    largest = [float((x.double() - y).abs().max()) for x, y in zip(actual, wanted, strict=True)]
    scale = max(float(y.abs().max()) for y in wanted[1:])
    return largest[0] / float(wanted[0].abs().max()), max(largest[1:]) / scale
