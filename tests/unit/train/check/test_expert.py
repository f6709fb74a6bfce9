"""Cases of experts: each number of ranks that may share them, beside each other way to share."""

from equipoise.train.check.case import Case, expert_cases


def test_every_number_of_ranks_that_leaves_none_without_an_expert() -> None:
    cases = [case for case in expert_cases(4, 8, heads=4) if case.expert_tensor == 1]
    assert {case.expert for case in cases} == {2, 4}
    assert {case.zero for case in cases} == {0, 1, 2, 3}
    assert {case.context for case in cases} == {1, 4} == {case.tensor for case in cases}
    assert {case.policy for case in cases} == {"by-work", "divided"}
    assert {case.recompute for case in cases} == {"none", "full"}
    assert len(set(cases)) == len(cases)
    # 6 experts in runs of 2 fill 3 ranks of 4; 3 heads do not divide over 2 ranks.
    assert {case.expert for case in expert_cases(4, 6, heads=4)} == {1, 2}
    assert {case.tensor for case in expert_cases(2, 6, heads=3)} == {1}


def test_hidden_units_are_shared_alone_and_beside_experts() -> None:
    cases = [case for case in expert_cases(4, 8, heads=4) if case.expert_tensor > 1]
    assert {(case.expert, case.expert_tensor) for case in cases} == {(2, 2), (1, 4)}
    assert {case.zero for case in cases} == {1, 3}
    # 7 experts do not divide over 2 ranks, of which each has 2 for the hidden units.
    odd = {(case.expert, case.expert_tensor) for case in expert_cases(4, 7, heads=4)}
    assert odd == {(2, 1), (4, 1), (1, 2), (1, 4)}


def test_nothing_is_shared_without_experts_or_ranks() -> None:
    assert expert_cases(4, 0, heads=4) == []
    assert expert_cases(1, 8, heads=4) == []


def test_a_case_names_the_ranks_that_share_experts() -> None:
    case = Case(4, 2, "by-work", 256, "none", expert=2)
    assert str(case) == '4 ranks (zero = 2, policy = "by-work", expert = 2)'
    assert case.layout.of_ranks(4).ep == 2
    split = Case(4, 2, "by-work", 256, "none", expert_tensor=2)
    assert str(split) == '4 ranks (zero = 2, policy = "by-work", expert_tensor = 2)'
    assert split.shares_weights and not Case(4, 2, "by-work", 256, "none").shares_weights
