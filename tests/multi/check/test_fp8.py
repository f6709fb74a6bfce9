"""Float8 products: data and context parallelism and every ZeRO stage equal one rank."""

import dataclasses

import pytest

from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.train.check.case import (
    FP8_TOLERANCE,
    Case,
    all_cases,
    context_cases,
    divided_cases,
    make_case,
    tensor_cases,
)
from equipoise.train.check.partial import masked_cases
from equipoise.train.check.prove import run_cases
from equipoise.train.check.variants import of_fp8
from support.make_run import MODEL
from support.ranks import on_ranks

LAYERED = dataclasses.replace(MODEL, layers=2)


def test_every_layout_and_policy_equals_one_rank() -> None:
    """Two ranks; the command below has every case of one."""
    cases = [
        *all_cases(2, LAYERED),
        *divided_cases(2, LAYERED),
        *context_cases(2, LAYERED, "ring", "head-tail-document"),
        *masked_cases(2, LAYERED),
    ]
    chosen = of_fp8(cases)[::2]  # every policy too, and every ZeRO stage
    assert {case.layout.zero for case in chosen} == {0, 1, 2, 3}
    assert {case.layout.cp > 1 for case in chosen} == {False, True}
    for verdict in run_cases(chosen):
        assert verdict.is_exact, f"{verdict.case}: {verdict}"


def test_layouts_that_float8_is_not_proven_in_are_left_out() -> None:
    assert tensor_cases(2, LAYERED) and not of_fp8(tensor_cases(2, LAYERED))


def test_the_command_proves_a_run_in_float8(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "1", "--processes", "--model.preset", "2m", "--train.precision", "fp8"]
    assert main(["check", *words]) == 0
    said = capsys.readouterr().out
    assert ", fp8 on a CPU." in said
    assert said.endswith(" cases equal one rank to 0.001 of each gradient's scale.\n")


ZERO = of_fp8([make_case(LAYERED, 2, context_tokens=512, zero=1)])[0]
CONTEXT = of_fp8([make_case(LAYERED, 2, context_tokens=512, zero=0, cp=2)])[0]


@pytest.mark.parametrize("case", [ZERO, CONTEXT], ids=["zero 1", "context"])
def test_a_rank_that_does_not_round_is_caught(case: Case) -> None:
    (verdict,) = run_ranks(2, on_ranks.check_with_plain_products, case)[0]
    assert not verdict.is_exact
    assert verdict.gradient_error > 5 * FP8_TOLERANCE


@pytest.mark.parametrize("what", ["positions", "labels"])
def test_positions_and_labels_that_stay_behind_are_caught(what: str) -> None:
    (verdict,) = run_ranks(2, on_ranks.check_with_wrong_shares, CONTEXT, what)[0]
    assert not verdict.is_exact
    assert verdict.gradient_error > 5 * FP8_TOLERANCE


def test_a_gradient_that_is_wrong_on_one_rank_is_caught_by_name() -> None:
    name = "layers.0.attention.query.weight"
    (verdict,) = run_ranks(2, on_ranks.check_with_wrong_gradient, ZERO, name, 1)[0]
    assert not verdict.is_exact
    assert verdict.worst_parameter == name
