"""``equipoise check`` of a model with experts: every way to share them, and what it notices."""

import dataclasses

import pytest

from equipoise.comm.local import run_ranks
from equipoise.nn.moe import balance as moe_balance
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import Case, expert_cases
from equipoise.train.check.prove import check_cases, run_cases
from equipoise.train.check.sample import make_decoder

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
    cases = expert_cases(ranks, SPARSE.experts, SPARSE.heads)
    assert {(case.ep, case.etp) for case in cases} == {(ranks, 1), (1, ranks)}
    for verdict in run_cases(cases, SPARSE):
        assert verdict.is_exact
        assert verdict.error <= FP64, verdict.case


def test_a_model_with_experts_equals_one_rank_where_they_are_not_shared() -> None:
    cases = [
        Case(2, 1, "by-work", 256, "none"),
        Case(2, 3, "in-order", 512, "full"),
        Case(2, 2, "by-work", 256, "none", cp=2),
    ]
    biased = dataclasses.replace(SPARSE, balance="bias", shared_gate=True)
    for model in (SPARSE, biased):
        assert max(verdict.error for verdict in run_cases(cases, model)) <= FP64


def _without_balance(ranks: object, cases: list[Case], model: ModelSpec) -> list:
    """With a balance that pulls at the reference, and no more at the case."""
    plain = moe_balance.LoadBalance.pull_X
    calls = []

    def pull_X(self: moe_balance.LoadBalance, dtype: object) -> object:
        calls.append(1)
        return plain(self, dtype) * (1.0 if len(calls) <= 12 else 0.0)  # 12 pieces, one layer

    moe_balance.LoadBalance.pull_X = pull_X
    try:
        return check_cases(ranks, cases, model)
    finally:
        moe_balance.LoadBalance.pull_X = plain


def test_a_balance_that_does_nothing_is_noticed() -> None:
    case = Case(1, 1, "by-work", 512, "none")
    (verdict,) = run_ranks(1, _without_balance, [case], SPARSE)[0]
    assert not verdict.is_exact
    assert verdict.loss_error <= FP64 < verdict.gradient_error


def test_routers_begin_out_of_balance_and_the_loss_is_divided_by_labels() -> None:
    (balance,) = moe_balance.balances(make_decoder(SPARSE, 50))
    assert balance.state_X.tolist() == [0, 1, 2, 3, 4]
    assert balance.loss_scale == 1 / 50
