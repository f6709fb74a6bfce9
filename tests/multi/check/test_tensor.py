"""``equipoise check`` proves layouts whose ranks share weights, and catches one that is wrong."""

import pytest

from equipoise.comm.local import run_ranks
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import TOLERANCE, make_case, tensor_cases
from equipoise.train.check.prove import run_cases
from support.ranks import on_ranks

MODEL = ModelSpec(
    layers=1,
    hidden=24,
    heads=6,
    kv_heads=2,
    ffn=50,
    vocab=301,
    head_width=4,
    qkv_bias=True,
    qk_norm=True,
)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_share_weights_equal_one_rank(ranks: int) -> None:
    # Two ranks have all; three even ZeRO stages, four odd ones alone and beside context ranks.
    cases = tensor_cases(ranks, MODEL)[(ranks == 4) :: 1 if ranks == 2 else 2]
    verdicts = run_cases(cases, over_gloo=ranks == 2)
    assert [verdict.case for verdict in verdicts] == cases
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []
    for verdict in verdicts:  # of attention: other ranks' keys, of each rank's own heads
        case = verdict.case
        is_divided = POLICIES[case.pack.policy].runs_together and case.layout.tp < case.ranks
        assert (verdict.bytes > 0) == (case.layout.cp > 1 or is_divided)


def test_a_gradient_that_is_wrong_on_one_rank_is_caught_by_name() -> None:
    case = make_case(MODEL, 2, context_tokens=512, tp=2)
    parameter = "layers.0.attention.key.weight"
    (verdict,) = run_ranks(2, on_ranks.check_with_wrong_gradient, case, parameter, 1)[0]
    assert not verdict.is_exact
    assert verdict.worst_parameter == parameter
    assert verdict.gradient_error > 0.01
    assert max(verdict.loss_error, verdict.forward_error) <= TOLERANCE
