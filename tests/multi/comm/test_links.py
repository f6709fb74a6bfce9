"""Where messages have no tags, order alone tells them apart: layouts equal one rank all the same.

NCCL is such a place. Here the ranks are gloo's, whose messages get no tag.
"""

import pytest

from equipoise.comm.local import run_ranks
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import context_cases, divided_cases, pipeline_cases
from support.ranks import links_ranks

MODEL = ModelSpec(
    layers=2, hidden=32, heads=3, kv_heads=1, ffn=48, vocab=300, head_width=16, tied=True
)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_over_links_equals_one_rank(ranks: int) -> None:
    """Every strategy, and documents that are divided over ranks."""
    shared, divided = context_cases(ranks, MODEL)[-8:], divided_cases(ranks, MODEL)
    if ranks > 2:  # three and four ranks share them out
        shared, divided = shared[ranks % 2 :: 2], divided[1 - ranks % 2 :: 2]
    verdicts = run_ranks(ranks, links_ranks.check_without_tags, [*shared, *divided])[0]
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []
    assert min(verdict.messages for verdict in verdicts[: len(shared)]) > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_pipelines_over_links_equal_one_rank(ranks: int) -> None:
    cases = pipeline_cases(ranks, MODEL)[::2]
    verdicts = run_ranks(ranks, links_ranks.check_without_tags, cases)[0]
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []
    assert min(verdict.messages for verdict in verdicts) > 0
