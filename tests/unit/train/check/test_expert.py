"""Cases of experts: each number of ranks that may share them, beside each other way to share."""

from equipoise.train.check.case import Case, expert_cases


def test_every_number_of_ranks_that_leaves_none_without_an_expert() -> None:
    cases = [case for case in expert_cases(4, 8, heads=4) if case.etp == 1]
    assert {case.ep for case in cases} == {2, 4}
    assert {case.zero for case in cases} == {0, 1, 2, 3}
    assert {case.cp for case in cases} == {1, 4} == {case.tp for case in cases}
    assert {case.policy for case in cases} == {"by-work", "divided"}
    assert {case.recompute for case in cases} == {"none", "full"}
    assert len(set(cases)) == len(cases)
    # 6 experts in runs of 2 fill 3 ranks of 4; 3 heads do not divide over 2 ranks.
    assert {case.ep for case in expert_cases(4, 6, heads=4)} == {1, 2}
    assert {case.tp for case in expert_cases(2, 6, heads=3)} == {1}


def test_hidden_units_are_shared_alone_and_beside_experts() -> None:
    cases = [case for case in expert_cases(4, 8, heads=4) if case.etp > 1]
    assert {(case.ep, case.etp) for case in cases} == {(2, 2), (1, 4)}
    assert {case.zero for case in cases} == {1, 3}
    # 7 experts do not divide over 2 ranks, of which each has 2 for the hidden units.
    odd = {(case.ep, case.etp) for case in expert_cases(4, 7, heads=4)}
    assert odd == {(2, 1), (4, 1), (1, 2), (1, 4)}


def test_nothing_is_shared_without_experts_or_ranks() -> None:
    assert expert_cases(4, 0, heads=4) == []
    assert expert_cases(1, 8, heads=4) == []


def test_a_case_names_the_ranks_that_share_experts() -> None:
    case = Case(4, 2, "by-work", 256, "none", ep=2)
    assert str(case) == '4 ranks (zero = 2, policy = "by-work", ep = 2)'
    assert case.layout.of_ranks(4).ep == 2
    split = Case(4, 2, "by-work", 256, "none", etp=2)
    assert str(split) == '4 ranks (zero = 2, policy = "by-work", etp = 2)'
    assert split.shares_weights and not Case(4, 2, "by-work", 256, "none").shares_weights
