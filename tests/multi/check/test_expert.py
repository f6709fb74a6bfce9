"""``equipoise check`` of a model with experts: every way to share them, and what it notices."""

import dataclasses
from typing import Any

import pytest

from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.nn.moe import balance as moe_balance
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.build import build_runner
from equipoise.train.check.balanced import beside_axes, with_experts
from equipoise.train.check.case import Case, Verdict, expert_cases, make_case
from equipoise.train.check.prove import check_cases, run_cases
from equipoise.train.check.sample import make_decoder
from equipoise.train.step import StepRunner

SPARSE = ModelSpec(
    layers=2,
    hidden=32,
    heads=2,
    kv_heads=1,
    ffn=48,
    vocab=300,
    head_width=16,
    experts=5,
    top_k=2,
    expert_ffn=24,
    shared_ffn=16,
    dense_layers=1,
)
FP64 = 1e-10


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_experts_equal_one_rank(ranks: int) -> None:
    cases = expert_cases(ranks, SPARSE)
    assert {(case.layout.ep, case.layout.etp) for case in cases} == {(ranks, 1), (1, ranks)}
    for verdict in run_cases(cases, over_gloo=ranks == 2):
        assert verdict.is_exact
        assert verdict.error <= FP64, verdict.case


def test_a_model_with_experts_equals_one_rank_where_they_are_not_shared() -> None:
    biased = dataclasses.replace(SPARSE, balance="bias", shared_gate=True)
    for model in (SPARSE, biased):
        cases = [
            make_case(model, 2),
            make_case(model, 2, policy="in-order", context_tokens=512, recompute="full", zero=3),
            make_case(model, 2, cp=2, zero=2),
        ]
        assert max(verdict.error for verdict in run_cases(cases)) <= FP64


def _without_balance(ranks: Ranks, case: Case) -> list[Verdict]:
    """A case whose balance pulls at the reference, and not at what is compared with it."""

    def build(*arguments: Any, **named: Any) -> StepRunner:
        runner = build_runner(*arguments, **named)
        for balance in moe_balance.balances(runner.model.decoder):
            balance.rate = 0.0
        return runner

    return check_cases(ranks, [case], build=build)


def test_a_balance_that_does_nothing_is_noticed() -> None:
    case = make_case(SPARSE, 1, context_tokens=512)
    (verdict,) = run_ranks(1, _without_balance, case)[0]
    assert not verdict.is_exact
    assert verdict.loss_error <= FP64 < verdict.gradient_error


def test_routers_begin_out_of_balance_and_the_loss_is_divided_by_labels() -> None:
    (balance,) = moe_balance.balances(make_decoder(make_case(SPARSE, 1), 50))
    assert balance.state_X.tolist() == [0, 1, 2, 3, 4]
    assert balance.loss_scale == 1 / 50


def test_balanced_experts_equal_one_rank_beside_every_axis() -> None:
    model = dataclasses.replace(
        with_experts(SPARSE), experts=8, heads=4, kv_heads=2, head_width=8, shared_ffn=0, layers=1
    )
    cases = beside_axes(4, dataclasses.replace(model, dense_layers=0))
    # `equipoise check --experts` runs all, twice; these are nearly every layout with one policy in
    # turn, and every third of them twice.
    some = [dataclasses.replace(each, repeats=at % 3 == 0) for at, each in enumerate(cases[::6])]
    # Every fourth is over gloo; `multi/parallel` has the policies and the axes over gloo, too.
    played = [each for at, each in enumerate(some) if at % 4]
    verdicts = run_cases(some[::4]) + run_cases(played, over_gloo=False)
    for verdict in verdicts:
        assert verdict.is_exact, verdict.case
        assert verdict.error <= FP64, verdict.case
