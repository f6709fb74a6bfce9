"""Cases of balanced experts: every policy and kind is there, is exact, and copies something."""

from equipoise.balance.expert.workload import WORKLOADS
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.train.check.balanced import balanced_cases, with_experts
from equipoise.train.check.case import scaled_down
from equipoise.train.check.prove import run_cases

POLICIES = ("exact", "hecate", "eplb", "tutel", "auto")
MODEL = ModelSpec(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=61, head_width=8)


def test_every_policy_and_kind_is_in_some_case() -> None:
    cases = balanced_cases(4, scaled_down(with_experts(preset("2m"))))
    kinds = {(case.experts.policy, case.router) for case in cases}
    every = {(policy, kind) for policy in POLICIES for kind in WORKLOADS}
    assert kinds == every | {("fixed", "W4")}  # with experts that have no weights
    assert {case.layout.zero for case in cases} == {0, 1, 2, 3}
    policies = {case.experts.policy for case in balanced_cases(3, with_experts(MODEL))}
    assert policies == {*POLICIES, "fixed"} - {"eplb"}
    assert len(balanced_cases(2, with_experts(MODEL))) == 45 and not balanced_cases(1, MODEL)


def test_cases_are_exact_and_say_what_they_are() -> None:
    chosen = [case for case in balanced_cases(2, with_experts(MODEL)) if case.router == "W2"]
    verdicts = run_cases(chosen, over_gloo=False)
    assert str(verdicts[0].case) == (
        '2 ranks (zero = 2, policy = "by-work", ep = 2, exact experts, W2)'
    )
    for verdict in verdicts:
        assert verdict.is_exact and verdict.is_repeated
        assert verdict.error <= 1e-10
