"""Any layout equals one rank, and a gradient that does not is caught by name."""

import dataclasses

import on_ranks
import pytest

from equipoise.comm.local import run_ranks
from equipoise.spec.model import ModelSpec
from equipoise.train.check import TOLERANCE, all_cases, check_cases, check_layouts

TIED = ModelSpec(
    layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=300, head_width=16, tied=True
)
UNTIED = dataclasses.replace(TIED, tied=False, layers=2, qkv_bias=True, qk_norm=True)


def test_every_layout_of_a_tied_model_equals_one_rank() -> None:
    verdicts = check_layouts(TIED, [1, 2, 3])
    assert [verdict.case for verdict in verdicts] == [
        case for world in (1, 2, 3) for case in all_cases(world)
    ]
    wrong = [verdict for verdict in verdicts if not verdict.is_exact]
    assert wrong == []
    assert max(verdict.gradient_error for verdict in verdicts) <= TOLERANCE
    assert {verdict.case.recompute for verdict in verdicts} == {"none", "full"}
    assert max(verdict.micro_batches for verdict in verdicts) >= 3


def test_an_untied_model_with_biases_and_head_norms_equals_one_rank() -> None:
    cases = [
        case for case in all_cases(2) if case.context_tokens == 256 or case.recompute == "full"
    ]
    wrong = [v for v in run_ranks(2, check_cases, cases, UNTIED)[0] if not v.is_exact]
    assert wrong == []


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("parameter", ["layers.0.attention.query.weight", "embed.weight"])
def test_a_gradient_that_is_wrong_on_one_rank_is_caught_by_name(zero: int, parameter: str) -> None:
    (verdict,) = run_ranks(2, on_ranks.check_with_wrong_gradient, TIED, zero, parameter, 1)[0]
    assert not verdict.is_exact
    assert verdict.worst_parameter == parameter
    assert verdict.gradient_error > 0.01
    assert verdict.loss_error <= TOLERANCE


def test_the_same_gradient_left_alone_is_exact() -> None:
    verdicts = run_ranks(2, on_ranks.check_with_wrong_gradient, TIED, 0, "embed.weight", -1)[0]
    assert [verdict.is_exact for verdict in verdicts] == [True]
