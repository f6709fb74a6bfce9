"""Rows that travel in parts, while others are computed: equal to one rank, with the same bytes."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from equipoise.comm.local import run_ranks
from equipoise.cost.overlap import parts_on
from equipoise.parallel.expert.copies import SharedTraffic
from equipoise.parallel.overlap.parts import PartedSites, part_rows
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolved import PartMachine
from equipoise.spec.run.spec import ExpertsSpec
from support.ranks import balanced_ranks, tensor_ranks
from support.ranks.balanced_ranks import BalancedCase
from support.ranks.tensor_ranks import Setting

MODEL = ModelSpec(
    layers=1,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=26,
    vocab=61,
    head_width=8,
)
SPARSE = dataclasses.replace(MODEL, experts=4, top_k=2, expert_ffn=12, balance_rate=0.5)
FIXED = ExpertsSpec("fixed")
OPEN = PartMachine(flop_per_s=1e9, start_s=2e-6, bytes_per_s=1e8, shared=0.0)

# One batch has fewer rows than ranks, and one fewer than parts.
BATCHES = [[37, 5, 1, 20], [3, 2], [1], []]


def test_blocks_in_parts_equal_one_rank() -> None:
    settings = [
        Setting(Layout(tp=2, zero=zero), parts=parts, recompute=recompute)
        for zero, parts, recompute in ((0, 3, "none"), (1, 2, "none"), (3, 4, "full"))
    ]
    settings += [Setting(Layout(tp=2, zero=1), parts=OPEN)]
    expected = tensor_ranks.step_alone(MODEL, BATCHES)
    for outcomes in run_ranks(2, tensor_ranks.step, MODEL, BATCHES, settings):
        # As many parts as are cheapest for the rows of each batch that has some.
        rows = [sum(batch) for batch in BATCHES if batch]
        chosen = []
        for n in rows:
            one_way = n * 16 * 8 / 2  # queries of one head, and the key and value that it reads
            feed = parts_on(OPEN, flop=6.0 * n * 16 * 13, moved_bytes=2 * one_way)
            heads = parts_on(OPEN, flop=2.0 * n * 16 * 24, moved_bytes=one_way, ways=1)
            output = parts_on(OPEN, flop=2.0 * n * 16 * 8, moved_bytes=one_way, ways=1)
            # Every part has a row of each rank.
            chosen += [max(1, min(parts, n // 2)) for parts in (feed, heads, output)]
        assert outcomes[-1].parted == dict(sorted(Counter(chosen).items()))
        assert len(outcomes[-1].parted) > 1
        for found in outcomes:
            assert found.loss == pytest.approx(expected.loss, rel=1e-10)
            assert found.norm == pytest.approx(expected.norm, rel=1e-10)
            for name, gradient in expected.gradients.items():
                scale = np.abs(gradient).max() or 1.0
                assert np.abs(found.gradients[name] - gradient).max() <= 1e-10 * scale, name


def test_experts_in_parts_equal_one_rank_with_the_same_bytes() -> None:
    whole = BalancedCase(SPARSE, Layout(dp=2, ep=2, zero=1), FIXED, "W1")
    cases = [
        dataclasses.replace(whole, parts=parts, kind=kind, layout=Layout(dp=2, ep=2, zero=zero))
        for kind, zero, parts in (("W1", 1, 1), ("W1", 1, 3), ("W5", 0, 2), ("W2", 3, 64))
    ]
    cases += [dataclasses.replace(whole, parts=parts, recompute="full") for parts in (1, 2)]
    # Ranks with few rows and many agree on the parts.
    cases += [dataclasses.replace(whole, parts=OPEN, kind="W4")]
    outcomes = run_ranks(2, balanced_ranks.prove, cases)
    for each in outcomes:
        for case, outcome in zip(cases, each, strict=True):
            assert outcome.loss_error <= 1e-10, case
            assert outcome.gradient_error <= 1e-10, case
            assert outcome.weight_error <= 1e-10, case
        assert each[1].sent == each[0].sent and each[5].sent == each[4].sent != each[0].sent
        assert each[1].parted == {3: sum(each[1].parted.values())}
        assert each[-1].parted == outcomes[0][-1].parted and max(each[-1].parted) > 1


def test_every_policy_in_parts_equals_one_rank_with_the_same_bytes() -> None:
    layout = Layout(dp=2, ep=2, zero=1)
    policies = ("exact", "hecate", "eplb", "tutel")
    cases = [
        BalancedCase(SPARSE, layout, ExpertsSpec(policy, least_rows=4), "W1", parts=parts)
        for policy in policies
        for parts in (1, 3)
    ]
    few = dataclasses.replace(cases[1], kind="W5", parts=7, layout=Layout(dp=2, ep=2, zero=3))
    auto = ExpertsSpec("auto", slots=3, least_rows=4)
    more = [
        few,
        dataclasses.replace(cases[1], recompute="full"),
        dataclasses.replace(cases[1], parts=OPEN, kind="W4"),
        dataclasses.replace(cases[1], wish=auto, kind="W7"),
    ]
    ranks = run_ranks(2, balanced_ranks.prove, cases + more)
    for outcomes in ranks:
        for case, outcome in zip(cases + more, outcomes, strict=True):
            assert outcome.loss_error <= 1e-10, case
            assert outcome.gradient_error <= 1e-10, case
            assert outcome.weight_error <= 1e-10, case
        for whole, parted in zip(outcomes[:8:2], outcomes[1:8:2], strict=True):
            assert parted.sent == whole.sent and parted.copies == whole.copies
            assert set(whole.parted) <= {1} and set(parted.parted) <= {3}
        assert all(each.copies for each in outcomes[:6])
        assert max(outcomes[9].parted) == 3 and outcomes[10].parted == ranks[0][10].parted


def test_weights_that_several_products_share_are_fetched_and_given_back_once() -> None:
    calls: list[str] = []

    class Traffic:
        remakes = True

        def fetch(self, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            calls.append("fetch")
            return weights

        def give_back(
            self, grads: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            del weights
            calls.append(f"give back {float(grads[0])}")
            return grads

    shared, weights = SharedTraffic(Traffic(), 2), (torch.ones(1),)
    for _ in range(2):  # forward and backward
        assert [shared.fetch(weights)[0] is weights[0] for _ in range(2)] == [True, True]
    assert shared.give_back((torch.full((1,), 2.0),), weights) == (None,)
    assert shared.give_back((torch.full((1,), 3.0),), weights)[0] == 5.0
    assert calls == ["fetch", "fetch", "give back 5.0"]


def test_experts_behind_a_shortcut_equal_one_rank() -> None:
    model = dataclasses.replace(SPARSE, layers=2, shortcut=True, shared_ffn=10, shared_gate=True)
    idle = dataclasses.replace(model, identity_experts=2, balance="bias")
    start = BalancedCase(model, Layout(dp=2, ep=2, zero=1), FIXED, "W1")
    whole = Layout(dp=2, etp=2)
    changes: list[dict[str, object]] = [
        {},
        {"kind": "W5", "recompute": "full", "layout": Layout(dp=2, ep=2, zero=3)},
        {"recompute": "attention"},
        {"recompute": "selective"},
        {"parts": 2},
        {"parts": OPEN, "recompute": "full"},
        {"wish": ExpertsSpec("exact", least_rows=1), "kind": "W2"},
        {"wish": ExpertsSpec("exact", least_rows=1), "kind": "W2", "parts": 2},
        {"wish": ExpertsSpec("hecate", least_rows=1), "model": idle},
        {"wish": ExpertsSpec("tutel", least_rows=1), "layout": whole, "sharing": 0},
        {"layout": whole},
    ]
    cases = [dataclasses.replace(start, **each) for each in changes]
    for outcomes in run_ranks(2, balanced_ranks.prove, cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert outcome.loss_error <= 1e-10, case
            assert outcome.gradient_error <= 1e-10, case
            assert outcome.weight_error <= 1e-10, case


def test_rows_leave_before_attention_and_outputs_before_the_shared_expert() -> None:
    forward = ["leave", "attend", "arrive", "leave", "shared", "arrive"]
    backward = ["leave", "shared", "arrive", "leave", "attend", "arrive"]
    assert run_ranks(2, balanced_ranks.order_of_events, SPARSE) == [forward + backward] * 2


def test_passes_are_counted_by_the_parts_that_they_had() -> None:
    sites = PartedSites(16)
    assert [sites.choose(flop=1.0, moved_bytes=1.0, most=n) for n in (None, 99, 3, 0)] == [
        *(16, 16, 3, 1)
    ]
    assert sites.ran == {16: 2, 3: 1, 1: 1}


def test_parts_are_even() -> None:
    rows = np.array([[7, 0, 64], [3, 1, 2]])
    parts = part_rows(rows, 5)
    assert (parts.sum(axis=0) == rows).all() and (np.ptp(parts, axis=0) <= 1).all()
