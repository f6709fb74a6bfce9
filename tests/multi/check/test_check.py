"""Any layout equals one rank, and a gradient that does not is caught by name.

Two ranks are real ones over gloo. More take turns in one process, which costs two cores a fraction
of that; ``tests/multi/parallel`` and ``tests/multi/train`` have them over gloo.
"""

import dataclasses

import pytest

from equipoise.comm.local import run_ranks
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import (
    TOLERANCE,
    Case,
    all_cases,
    context_cases,
    divided_cases,
    make_case,
    played_cases,
)
from equipoise.train.check.prove import check_cases, run_cases
from support.progresses import RecordedProgress
from support.ranks import on_ranks

TIED = ModelSpec(
    layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=300, head_width=16, tied=True
)
UNTIED = dataclasses.replace(TIED, tied=False, layers=2, qkv_bias=True, qk_norm=True)
# Of its 3 query heads 2 and 4 ranks take unequal numbers, and there are more ranks than heads.
ODD = dataclasses.replace(UNTIED, heads=3)


def test_every_layout_of_a_tied_model_equals_one_rank() -> None:
    # Of three ranks a third: every ZeRO stage, every policy and recomputing.
    cases = [*all_cases(1, TIED), *all_cases(2, TIED), *all_cases(3, TIED)[::3]]
    progress = RecordedProgress()
    verdicts = run_cases(cases, progress)
    assert [verdict.case for verdict in verdicts] == cases
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []
    assert max(verdict.gradient_error for verdict in verdicts) <= TOLERANCE
    assert {verdict.bytes for verdict in verdicts} == {0}
    assert max(verdict.micro_batches for verdict in verdicts) >= 3
    assert progress.stages == [("1 real rank", 12), ("2 real ranks", 20), ("3 real ranks", 7)]
    assert progress.done == 39


def test_an_untied_model_with_biases_and_head_norms_equals_one_rank() -> None:
    cases = [
        case
        for case in all_cases(2, UNTIED)
        if case.pack.context_tokens == 256 or case.train.recompute == "full"
    ]
    wrong = [v for v in run_ranks(2, check_cases, cases)[0] if not v.is_exact]
    assert wrong == []


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_divide_documents_equal_one_rank(ranks: int) -> None:
    # Of more ranks than two, each policy where every document is longer than a window.
    cases = divided_cases(ranks, ODD)[ranks > 2 :: 2 if ranks > 2 else 1]
    verdicts = run_cases(cases, over_gloo=ranks == 2)
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []
    for verdict in verdicts:  # some document is longer than a window of 128 tokens
        assert verdict.bytes > 0 or verdict.case.pack.context_tokens > 128
        assert verdict.micro_batches > 1 or verdict.case.pack.context_tokens > 128


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_share_micro_batches_equal_one_rank(ranks: int) -> None:
    cases = context_cases(ranks, ODD)
    if ranks > 2:  # three and four ranks each have every second strategy, and not the same ones
        cases = cases[::2] if ranks == 3 else cases[:6:2] + cases[7::2]
    verdicts = run_cases(cases, over_gloo=ranks == 2)
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []
    assert min(verdict.bytes for verdict in verdicts) > 0
    assert min(verdict.messages for verdict in verdicts) > 0


@pytest.mark.parametrize("ranks", [3, 4])
def test_every_strategy_and_sharding_played_equals_one_rank(ranks: int) -> None:
    progress = RecordedProgress()
    # Three ranks have half of the pairs, four the others; docs/exactness.md has all of two ranks.
    cases = played_cases(ranks, ODD)[ranks % 2 :: 2]
    verdicts = run_cases(cases, progress, over_gloo=False)
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []
    assert progress.stages == [(f"{ranks} played ranks", len(verdicts))]
    assert progress.done == len(verdicts)


def test_played_ranks_send_what_real_ranks_send() -> None:
    real = [c for c in context_cases(2, UNTIED) if c.layout.sharding == "head-tail-document"]
    played = [dataclasses.replace(case, played=True) for case in real]
    for one, two in zip(run_cases(real), run_cases(played, over_gloo=False), strict=True):
        assert (one.bytes, one.messages) == (two.bytes, two.messages)
        assert one.gradient_error == pytest.approx(two.gradient_error, abs=TOLERANCE)


CASES = {
    "zero 0": make_case(TIED, 2, context_tokens=512, zero=0),
    "zero 1": make_case(TIED, 2, context_tokens=512, zero=1),
    "zero 3": make_case(TIED, 2, context_tokens=512, zero=3),
    "context": make_case(TIED, 2, context_tokens=512, zero=0, cp=2),
    "pipeline": make_case(TIED, 2, policy="in-order", context_tokens=64, pp=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("parameter", ["layers.0.attention.query.weight", "embed.weight"])
def test_a_gradient_that_is_wrong_on_one_rank_is_caught_by_name(case: Case, parameter: str) -> None:
    if case.layout.pp > 1:  # whose second rank has the second layer
        parameter = parameter.replace("layers.0", "layers.1")
    (verdict,) = run_ranks(2, on_ranks.check_with_wrong_gradient, case, parameter, 1)[0]
    assert not verdict.is_exact
    assert verdict.worst_parameter == parameter
    assert verdict.gradient_error > 0.01
    assert max(verdict.loss_error, verdict.forward_error) <= TOLERANCE


def test_the_same_gradient_left_alone_is_exact() -> None:
    arguments = (CASES["zero 0"], "embed.weight", -1)
    verdicts = run_ranks(2, on_ranks.check_with_wrong_gradient, *arguments)[0]
    assert [verdict.is_exact for verdict in verdicts] == [True]


def test_a_part_of_the_trainers_step_that_is_left_out_is_caught() -> None:
    (verdict,) = run_ranks(2, on_ranks.check_without_sum, CASES["zero 1"])[0]
    assert not verdict.is_exact
    assert verdict.gradient_error == 1.0
    assert max(verdict.loss_error, verdict.forward_error) <= TOLERANCE


@pytest.mark.parametrize("what", ["positions", "labels"])
def test_positions_and_labels_that_stay_behind_are_caught(what: str) -> None:
    case = make_case(TIED, 2, context_tokens=512, zero=0, cp=2, sharding="head-tail")
    (verdict,) = run_ranks(2, on_ranks.check_with_wrong_shares, case, what)[0]
    assert not verdict.is_exact
    assert verdict.gradient_error > 100 * TOLERANCE
    assert (verdict.forward_error > TOLERANCE) == (what == "positions")
    assert (verdict.loss_error > TOLERANCE) or what == "positions"


def test_a_byte_that_no_schedule_speaks_of_is_caught() -> None:
    case = CASES["context"]
    (verdict,) = run_ranks(2, on_ranks.check_with_a_byte_too_many, case)[0]
    assert verdict.error <= TOLERANCE
    assert verdict.bytes == verdict.scheduled_bytes + 1
    assert not verdict.is_exact
