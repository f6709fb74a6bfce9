"""Experts inside pipelines, and every ZeRO stage: equal to one rank, and in one order."""

import dataclasses

from equipoise.comm.local import run_ranks
from equipoise.spec.layout import Layout
from support.ranks.composed_ranks import BIASED, DENSE, Case, compare, hold, miss

BOUND = 1e-10


def check(world: int, cases: list[Case]) -> None:
    for answers in run_ranks(world, compare, cases):
        for case, (found, is_bitwise) in zip(cases, answers, strict=True):
            assert found.loss_error <= BOUND, case
            assert found.gradient_error <= BOUND, (case, found.worst)
            assert found.loads_agree, case
            assert is_bitwise, case
            layout = case.layout
            if layout.ep > 1 and layout.zero <= 1 and case.recompute == "none":
                assert found.meetings[0] == found.meetings[1], case


EP, ETP = Layout(dp=2, pp=2, ep=2), Layout(dp=2, pp=2, etp=2)


def at(layout: Layout, zero: int) -> Layout:
    return dataclasses.replace(layout, zero=zero)


def test_experts_on_the_replicas_of_a_stage() -> None:
    """Dense layers come first, so stages have unequal numbers of sparse layers, and some none."""
    check(
        4,
        [
            *(Case(at(EP, zero), strategy="zb-h1") for zero in (0, 2, 3)),
            Case(at(ETP, 3)),
            Case(at(ETP, 0), strategy="zb-v", chunks=2),
            Case(EP, BIASED, "interleaved", chunks=2),
            Case(EP, recompute="full", strategy="zb-h1"),
        ],
    )


def test_experts_on_ranks_that_share_weights_or_nothing() -> None:
    check(
        4,
        [
            Case(Layout(tp=2, pp=2, ep=2), strategy="zb-h1"),
            Case(Layout(tp=2, pp=2, etp=2, zero=3)),
            Case(Layout(dp=2, pp=2), recompute="full"),
            Case(Layout(pp=4, zero=3)),
        ],
    )


def test_zero_2_and_3_of_a_dense_pipeline() -> None:
    two, three = (Layout(dp=2, pp=2, zero=zero) for zero in (2, 3))
    check(4, [Case(two, DENSE, "zb-h2"), Case(three, DENSE, "v-half", 2)])


def test_zero_frees_what_it_says() -> None:
    """After every instruction but the last is the end of the step; 2 ranks share each weight."""
    cases = [Case(at(Layout(dp=2, pp=2), zero), DENSE, "zb-h1") for zero in (1, 2, 3)]
    padding = 1.005  # of 61 words, which two ranks do not divide
    for one, two, three in run_ranks(4, hold, cases):
        (weights,) = one["weights"]
        assert max(one["whole gradients"]) == weights
        for found, keeps in ((one, True), (two, True), (three, False)):
            during, end = found["whole weights"][:-1], found["whole weights"][-1]
            assert end == 0 == found["whole gradients"][-1]
            assert keeps * weights <= min(during) <= max(during) <= keeps * weights * padding
            assert found["split gradients"][-1] <= weights / 2 * padding
        for found in (two, three):
            assert max(found["whole gradients"]) == 0
            assert max(found["split gradients"]) <= weights / 2 * padding


SAID = (
    "Rank 0 of the pipeline meets its replicas out of order: meeting {at} is the {one} of "
    "micro-batch {first} on stage 0 ({count}) on replica 0 and {other} on replica 1. Give all "
    "replicas equally many micro-batches and one schedule, written from the highest price of each "
    "micro-batch."
)


def test_replicas_that_would_miss_each_other_are_told_before_one_waits() -> None:
    forward = "the forward of micro-batch 2 on stage 0 (3 collectives)"
    said = run_ranks(4, miss, Case(EP), False, timeout_s=60)
    expected = {"at": 2, "one": "backward", "first": 0, "count": "2 collectives", "other": forward}
    assert set(said) == {SAID.format(**expected)}
    said = run_ranks(4, miss, Case(at(Layout(dp=2, pp=2), 2)), True, timeout_s=60)
    expected = {"at": 2, "one": "backward", "first": 2, "count": "1 collective", "other": "none"}
    assert set(said) == {SAID.format(**expected)}
