"""Experts shared in any way, switched between steps, equal one rank; so does `auto`."""

import dataclasses

import torch

from equipoise.comm.local import run_ranks
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import ExpertsSpec
from support.ranks import balanced_ranks
from support.ranks.balanced_ranks import BalancedCase

MODEL = ModelSpec(
    layers=1,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=4,
    top_k=2,
    expert_ffn=12,
    balance_rate=0.5,
)
FREE, DEAR = ExpertsSpec("tutel", least_rows=1), ExpertsSpec("tutel", least_rows=1000)
KINDS = ("W1", "W3", "W5", "W7")
AUTO = ExpertsSpec("auto", slots=3, least_rows=4)


def case(layout: Layout, wish: ExpertsSpec, kind: str = "W1", **changes: object) -> BalancedCase:
    return dataclasses.replace(BalancedCase(MODEL, layout, wish, kind), **changes)


def prove(world: int, cases: list[BalancedCase]) -> list[list[balanced_ranks.BalancedOutcome]]:
    ranks = run_ranks(world, balanced_ranks.prove, cases)
    for outcomes in ranks:
        for each, outcome in zip(cases, outcomes, strict=True):
            bound = 1e-10 if each.dtype == torch.float64 else 1e-5
            assert outcome.loss_error <= bound, each
            assert outcome.gradient_error <= bound, each
            assert outcome.weight_error <= bound, each
            assert not outcome.moved, each
    return ranks


def test_every_sharing_equals_one_rank_and_moves_no_parameter() -> None:
    wide = [Layout(dp=4, ep=1, etp=4, zero=zero) for zero in (0, 1)]
    both = Layout(dp=4, ep=2, etp=2, zero=3)
    odd = dataclasses.replace(MODEL, experts=7, expert_ffn=10)  # shares of 3, 3, 3 and 1 units
    cases = [case(wide[at], FREE, sharing=r) for at, r in ((0, 2), (1, 1), (1, 4))]
    cases += [case(both, FREE, kind, sharing=r) for r, kind in ((0, "W1"), (1, "W2"), (2, "W4"))]
    cases += [case(wide[1], FREE, "W5", model=odd, sharing=2)]
    cases += [case(both, FREE, sharing=0, recompute="full")]
    cases += [case(both, FREE), case(both, DEAR)]
    outcomes = prove(4, cases)[0]
    for each, outcome in zip(cases, outcomes, strict=True):
        if each.sharing is not None:  # the second step had another one
            assert {each.sharing, 1} == set(outcome.sharings), each
    assert set(outcomes[-2].sharings) != set(outcomes[-1].sharings)


def test_every_sharing_in_parts_equals_one_rank() -> None:
    both = Layout(dp=4, ep=2, etp=2, zero=1)
    cases = [case(both, FREE, kind, sharing=r, parts=3) for r, kind in ((1, "W1"), (2, "W4"))]
    cases += [case(both, FREE, sharing=0, parts=2), case(both, FREE, "W5", parts=64)]
    cases += [case(both, FREE, sharing=1, parts=2, recompute="full")]
    outcomes = prove(4, cases)[0]
    assert [max(each.parted) for each in outcomes] == [3, 3, 2, 64, 2]


def test_the_cheapest_policy_equals_one_rank() -> None:
    layout = Layout(dp=2, ep=2, zero=1)
    cases = [case(layout, AUTO, kind) for kind in KINDS]
    cases += [case(layout, AUTO, "W1", trial=trial) for trial in (2, 4, 5)]
    cases += [case(layout, AUTO, "W1", dtype=torch.float32)]
    idle = dataclasses.replace(MODEL, identity_experts=2, real_top_k=1.5, balance="bias")
    cases += [case(layout, each, "W1", model=idle) for each in (AUTO, ExpertsSpec("exact"))]
    cases += [case(layout, FREE), case(layout, dataclasses.replace(FREE, least_rows=1000))]
    outcomes = prove(2, cases)[0]
    # Experts without weights had some of the 2 x 2 x 24 choices, and sent nothing.
    assert all(0 < each.schedules[0].rows.sum() < 90 for each in outcomes[-4:-2])
    assert all(sum(each.chosen.values()) >= 2 for each in outcomes[:-3])
    tried = outcomes[len(KINDS) + 1].chosen
    assert tried["hecate"] >= 1 and tried["eplb"] >= 1
    # Weights travel where they cost little, and rows where they cost much.
    assert outcomes[-2].copies > 0 == outcomes[-1].copies
