"""Cases of experts: each number of ranks that may share them, beside each other way to share."""

import dataclasses

from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.train.check.case import expert_cases, make_case


def sparse(experts: int, heads: int) -> ModelSpec:
    return dataclasses.replace(
        preset("2m"), experts=experts, top_k=1, heads=heads, kv_heads=1, expert_ffn=8
    )


def test_every_number_of_ranks_that_leaves_none_without_an_expert() -> None:
    cases = [case for case in expert_cases(4, sparse(8, 4)) if case.layout.etp == 1]
    assert {case.layout.ep for case in cases} == {2, 4}
    assert {case.layout.zero for case in cases} == {0, 1, 2, 3}
    assert {case.layout.cp for case in cases} == {1, 4} == {case.layout.tp for case in cases}
    assert {case.pack.policy for case in cases} == {"by-work", "divided"}
    assert {case.train.recompute for case in cases} == {"none", "full"}
    assert len(set(cases)) == len(cases)
    # 6 experts in runs of 2 fill 3 ranks of 4; 3 heads do not divide over 2 ranks.
    assert {case.layout.ep for case in expert_cases(4, sparse(6, 4))} == {1, 2}
    assert {case.layout.tp for case in expert_cases(2, sparse(6, 3))} == {1}


def test_hidden_units_are_shared_alone_and_beside_experts() -> None:
    cases = [case for case in expert_cases(4, sparse(8, 4)) if case.layout.etp > 1]
    assert {(case.layout.ep, case.layout.etp) for case in cases} == {(2, 2), (1, 4)}
    assert {case.layout.zero for case in cases} == {1, 3}
    # 7 experts do not divide over 2 ranks, of which each has 2 for the hidden units.
    odd = {(case.layout.ep, case.layout.etp) for case in expert_cases(4, sparse(7, 4))}
    assert odd == {(2, 1), (4, 1), (1, 2), (1, 4)}


def test_nothing_is_shared_without_experts_or_ranks() -> None:
    assert expert_cases(4, sparse(0, 4)) == []
    assert expert_cases(1, sparse(8, 4)) == []


def test_a_case_names_the_ranks_that_share_experts() -> None:
    case = make_case(preset("2m"), 4, zero=2, ep=2)
    assert str(case) == '4 ranks (zero = 2, policy = "by-work", ep = 2)'
    assert case.layout.of_ranks(4).ep == 2
    split = make_case(preset("2m"), 4, zero=2, etp=2)
    assert str(split) == '4 ranks (zero = 2, policy = "by-work", etp = 2)'
