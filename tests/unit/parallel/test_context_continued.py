"""Texts continued over ranks by the executor: every phase equals one rank."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.context.continued import plan_continued
from equipoise.comm.drive import drive_together
from equipoise.parallel.context.forward import Forward
from equipoise.parallel.context.program import compile_rank
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.attention.strategies import BY_HEADS, STRATEGIES

WIDTH = 8
HEADS = [(9, 3), (8, 1), (4, 4), (1, 1)]
FOR_CACHED = [name for name in STRATEGIES if name not in BY_HEADS]


class Texts:
    """Texts over some ranks, each of which keeps the keys that it computed."""

    def __init__(self, ranks: int, texts: int, heads: int, kv_heads: int, dtype) -> None:
        self.ranks, self.heads, self.kv_heads, self.dtype = ranks, heads, kv_heads, dtype
        self.draw = torch.Generator().manual_seed(7)
        self.whole = [[self.tokens(0, kv_heads)] * 2 for _ in range(texts)]
        """Keys and values of all tokens, text by text, as one rank has them."""
        self.kept = [[[self.tokens(0, kv_heads)] * 2 for _ in range(texts)] for _ in range(ranks)]

    def tokens(self, count: int, heads: int) -> torch.Tensor:
        drawn = torch.randn(count, heads, WIDTH, generator=self.draw, dtype=torch.float64)
        return drawn.to(self.dtype)

    def go_on(self, new: list[int], strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of new tokens, over the ranks and in one process."""
        cached = [[len(mine[text][0]) for mine in self.kept] for text in range(len(new))]
        heads = {"heads": self.heads, "kv_heads": self.kv_heads, "ranks_per_node": 1}
        plan = plan_continued(cached, new, strategy, **heads)
        q, k, v = (self.tokens(sum(new), h) for h in (self.heads, self.kv_heads, self.kv_heads))
        executors = []
        for rank, rows in enumerate(map(torch.from_numpy, plan.rows)):
            text_of = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))[rows]
            for text, kept in enumerate(self.kept[rank]):
                for at, x in enumerate((k, v)):
                    kept[at] = torch.cat([kept[at], x[rows][text_of == text]])
            keys, values = (torch.cat([kept[at] for kept in self.kept[rank]]) for at in (0, 1))
            assert len(keys) == plan.key_tokens[rank].sum()
            program = compile_rank(plan.schedule, rank)
            executors.append(Forward(program, q[rows], keys, values))
        sent = np.zeros((self.ranks,) * 2, dtype=np.int64)
        drive_together([each.steps() for each in executors], sent)
        wire = Wire(WIDTH, self.dtype.itemsize, 8 if self.dtype == torch.float64 else 4)
        assert np.array_equal(sent, count_attention(plan.schedule, wire).forward_bytes)
        out = torch.empty_like(q)
        for rows, each in zip(plan.rows, executors, strict=True):
            out[torch.from_numpy(rows)] = each.output
        return out, self._alone(q, k, v, new)

    def _alone(self, q, k, v, new: list[int]) -> torch.Tensor:
        outs = []
        parts = zip(self.whole, *(x.split(new) for x in (q, k, v)), strict=True)
        for held, own_q, own_k, own_v in parts:
            held[:] = [torch.cat([held[0], own_k]), torch.cat([held[1], own_v])]
            ratio, earlier = self.heads // self.kv_heads, len(held[0]) - len(own_q)
            keys, values = (x.double().repeat_interleave(ratio, 1) for x in held)
            scores = torch.einsum("qhe,khe->hqk", own_q.double(), keys) / WIDTH**0.5
            allowed = torch.ones(scores.shape[1:], dtype=torch.bool).tril(earlier)
            weights = scores.masked_fill(~allowed, float("-inf")).softmax(2)
            outs.append(torch.einsum("hqk,khe->qhe", weights, values))
        return torch.cat(outs)


@given(
    st.integers(1, 5),
    st.sampled_from(HEADS),
    st.sampled_from(FOR_CACHED),
    st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=2), min_size=1, max_size=3),
)
@settings(max_examples=20)
def test_prompts_further_prompts_and_single_tokens_equal_one_rank(
    ranks: int, heads, strategy: str, phases
) -> None:
    texts = Texts(ranks, 2, *heads, torch.float64)
    for new in (*phases, [1, 1], [1, 1], [7, 1]):
        over_ranks, alone = texts.go_on(list(new), strategy)
        assert (over_ranks - alone).abs().max() <= 1e-12


def test_in_fp32_both_ways_to_decode_agree() -> None:
    for ranks in (1, 2, 3, 4):
        for heads in HEADS[:3]:
            outs = []
            for strategy in ("pass-q", "gather-q"):
                texts = Texts(ranks, 3, *heads, torch.float32)
                texts.go_on([97, 5, 64], "ring")
                over_ranks, alone = texts.go_on([1, 1, 1], strategy)
                assert (over_ranks - alone).abs().max() <= 2e-6
                outs.append(over_ranks)
            assert (outs[0] - outs[1]).abs().max() <= 1e-6
