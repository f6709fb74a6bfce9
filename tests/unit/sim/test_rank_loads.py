"""Loads of ranks that share micro-batches, against the pack's own."""

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.context.sharding import AUTO
from equipoise.balance.context.sharding import STRATEGIES as SHARDINGS
from equipoise.cost.curve import LoadCurve, counted_curve
from equipoise.schedule.attention.strategies import STRATEGIES
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import LayoutSpec, Sharding, StrategyName
from support.hand_packed import packed_of

MODEL = ModelSpec(layers=2, hidden=48, heads=6, kv_heads=2, ffn=64, vocab=99, head_width=8)
CURVE = LoadCurve(1000.0, 7.0, (1.0, 64.0), (5.0, 900.0), 1e9, measured=True)

packs = st.lists(
    st.lists(st.lists(st.integers(1, 400), max_size=5), min_size=1, max_size=2),
    min_size=1,
    max_size=3,
)


def test_the_names_of_run_toml_are_those_that_there_are() -> None:
    assert set(get_args(StrategyName)) == set(STRATEGIES)
    assert set(get_args(Sharding)) == {*SHARDINGS, AUTO}


@settings(max_examples=20, deadline=None)
@given(
    ranks=packs,
    context=st.integers(2, 4),
    strategy=st.sampled_from(get_args(StrategyName)),
    sharding=st.sampled_from(get_args(Sharding)),
)
def test_loads_add_up_to_those_of_the_pack(ranks, context, strategy, sharding) -> None:
    packed = packed_of(ranks)
    alone = ContextPlanner(MODEL, LayoutSpec()).loads(packed, counted_curve(MODEL))
    layout = LayoutSpec(cp=context, strategy=strategy, sharding=sharding)
    shared = ContextPlanner(MODEL, layout).loads(packed, counted_curve(MODEL))
    assert len(shared.predicted_s) == context * len(ranks)
    for rank in range(len(ranks)):
        mine = slice(context * rank, context * (rank + 1))
        assert sum(shared.tokens[mine]) == alone.tokens[rank]
        assert sum(shared.flop[mine]) == pytest.approx(alone.flop[rank], rel=1e-9)
        assert sum(shared.predicted_s[mine]) == pytest.approx(
            alone.predicted_s[rank], rel=1e-3, abs=1e-6
        )


def test_a_rank_is_priced_by_the_pairs_that_it_computes() -> None:
    packed = packed_of([[[256, 256]]])

    def predicted_s(strategy: StrategyName, sharding: Sharding) -> list[float]:
        layout = LayoutSpec(cp=2, strategy=strategy, sharding=sharding)
        return ContextPlanner(MODEL, layout).loads(packed_of([[[512]]]), CURVE).predicted_s

    first, second = predicted_s("needed-kv", "contiguous")
    assert second > 2 * first
    assert predicted_s("pass-q", "contiguous") == pytest.approx([second, first])
    ulysses = predicted_s("ulysses", "contiguous")
    assert ulysses[0] == pytest.approx(ulysses[1])
    layout = LayoutSpec(cp=2)
    evenly = ContextPlanner(MODEL, layout).loads(packed, CURVE)
    assert evenly.tokens == [256, 256]
    assert evenly.pieces == [1, 1]
    of_document_s = (1000 + CURVE.attention_ns(np.array([256 * 257 // 2]))[0] + 7 * 256) * 1e-9
    assert evenly.predicted_s == pytest.approx([of_document_s] * 2)


def test_alone_is_priced_as_ever() -> None:
    packed = packed_of([[[64, 8], []], [[100]]])
    loads = ContextPlanner(MODEL, LayoutSpec()).loads(packed, CURVE)
    assert loads.tokens == [72, 100]
    assert loads.pieces == [2, 1]
    assert loads.predicted_s[0] == pytest.approx(
        (2000 + CURVE.document_ns(np.array([64, 8])).sum()) * 1e-9
    )


@settings(max_examples=10, deadline=None)
@given(ranks=packs, context=st.integers(1, 3), tensor=st.integers(1, 2))
def test_turns_last_as_long_as_their_slowest_rank(ranks, context: int, tensor: int) -> None:
    turns = max(map(len, ranks))
    packed = packed_of([batches + [[]] * (turns - len(batches)) for batches in ranks])
    layout = LayoutSpec(dp=len(ranks), cp=context, tp=tensor)
    loads = ContextPlanner(MODEL, layout).loads(packed, CURVE)
    each = [
        ContextPlanner(MODEL, layout).loads(
            packed_of([[batches[turn] if turn < len(batches) else []] for batches in ranks]), CURVE
        )
        for turn in range(turns)
    ]
    expected = sum(max(turn.predicted_s) for turn in each)
    assert loads.turns_s == pytest.approx(expected)
    assert loads.turn_skew >= max(loads.predicted_s) / np.mean(loads.predicted_s) - 1e-9
    assert loads.longest_s == max(loads.predicted_s)
    met = ContextPlanner(MODEL, dataclasses.replace(layout, zero=3)).loads(packed, CURVE)
    assert met.longest_s == pytest.approx(expected if len(ranks) > 1 else max(loads.predicted_s))
