"""Documents of which only some tokens have a label: every axis equals one rank."""

import pytest

from equipoise.train.check.case import Case
from equipoise.train.check.partial import masked_cases
from equipoise.train.check.prove import run_cases
from equipoise.train.check.sample import Sample
from multi.check.test_expert import SPARSE
from support.make_run import MODEL


def axes(case: Case) -> set[str]:
    layout = case.layout
    degrees = {"cp": layout.cp, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    return {name for name, ranks in degrees.items() if ranks > 1} | {case.pack.policy}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_masked_labels_have_the_gradients_of_one_rank(ranks: int) -> None:
    cases = masked_cases(ranks, MODEL)
    assert all(case.masks and "masked labels" in str(case) for case in cases)
    for verdict in run_cases(cases, over_gloo=ranks <= 2):
        assert verdict.is_exact, f"{verdict.case}: {verdict}"


def test_experts_with_masked_labels_have_the_gradients_of_one_rank() -> None:
    cases = [case for case in masked_cases(2, SPARSE) if case.layout.ep > 1]
    assert cases
    for verdict in run_cases(cases):
        assert verdict.is_exact, f"{verdict.case}: {verdict}"


def test_every_axis_is_in_some_case() -> None:
    covered = set().union(*(axes(case) for case in masked_cases(2, SPARSE)))
    assert covered >= {"cp", "tp", "pp", "ep", "divided", "by-work", "in-order"}


def test_samples_have_documents_without_a_label_and_labels_at_their_ends() -> None:
    sample = Sample.draw(64, (173, 5, 1, 64, 97, 31), masks=True)
    assert sample.is_learned is not None
    shares = [float(each.float().mean()) for each in sample.is_learned]
    assert shares[0] == shares[4] == 0 and 0.2 < shares[3] < 0.8
    assert 0 < sample.labels < sum(len(each) for each in sample.tokens) / 2
