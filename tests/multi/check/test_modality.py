"""``equipoise check`` proves encoders beside a decoder in every layout, and catches a wrong one."""

import json

import pytest

from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.comm.turns import play_ranks
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import TOLERANCE, Case
from equipoise.train.check.modal import modal_cases
from equipoise.train.check.prove import check_cases
from support.ranks import on_ranks

MODEL = ModelSpec(layers=1, hidden=16, heads=4, kv_heads=2, ffn=20, vocab=67, head_width=4)


def _of(ranks: int) -> list[Case]:
    """Every case of 1 and 2 ranks; of 4, those that 2 cannot have."""
    cases = modal_cases(ranks, MODEL)
    if ranks < 4:
        return cases
    piped = [each for each in cases if each.router and each.layout.pp == 2]
    halves = [
        each
        for each in cases
        if not each.router
        and not each.train.freeze
        and 4 not in (each.layout.cp, each.layout.tp, each.layout.pp)
    ]
    copied = [each for each in cases if each.train.freeze and each.layout.replicas == 2]
    return halves + piped + copied


def test_every_axis_is_beside_every_stage_of_encoders() -> None:
    for ranks in (2, 4):
        cases = modal_cases(ranks, MODEL)
        layouts = [each.layout for each in cases if not each.router and not each.train.freeze]
        for axis in ("dp", "cp", "tp", "pp"):
            stages = {each.zero for each in layouts if getattr(each, axis) > 1}
            assert stages == {0, 1, 2, 3}, (ranks, axis)
    assert {each.zero for each in layouts if each.replicas == 2} == {2, 3}


def test_every_axis_is_beside_encoders_and_experts() -> None:
    cases = [each for each in modal_cases(4, MODEL) if each.router]
    for axis in ("cp", "tp", "pp", "ep", "etp"):
        assert any(getattr(each.layout, axis) > 1 for each in cases), axis
    assert {each.experts.policy for each in cases} == {"exact", "fixed", "tutel"}
    assert all(each.resolved.spec.encoders and each.precision == "fp64" for each in cases)


def test_decoders_and_encoders_are_frozen_beside_every_axis() -> None:
    cases = [each for each in modal_cases(2, MODEL) if each.train.freeze]
    kinds: dict[tuple[bool, bool], set[str]] = {}
    for case in cases:
        spec, layout = case.resolved.spec, case.layout
        trains = any(not each.is_frozen for each in spec.encoders), "head" not in case.train.freeze
        axes = [axis for axis in ("cp", "tp", "pp", "ep") if getattr(layout, axis) > 1]
        kinds.setdefault(trains, set()).update(axes or ["dp"])
    assert kinds[True, False] == {"dp", "cp", "tp", "pp", "ep"}  # encoders alone
    assert kinds[False, True] == {"dp", "cp", "pp", "ep"}  # the decoder alone
    assert kinds[True, True] == {"dp", "tp", "pp"}
    assert {each.layout.zero for each in cases} == {0, 1, 2, 3}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_encoders_on_all_ranks_equal_one_rank(ranks: int) -> None:
    cases = _of(ranks)
    assert len(cases) >= 4
    verdicts = play_ranks(ranks, check_cases, cases)[0]
    assert [verdict.case for verdict in verdicts] == cases
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []
    for verdict in verdicts:  # items cross wherever there is somebody to cross to
        assert (verdict.bytes > 0) == (ranks > 1)


def test_they_do_over_gloo() -> None:
    dense = [each for each in modal_cases(2, MODEL) if not each.router]
    whole = [each for each in dense if not each.train.freeze]
    cases = [each for each in whole if each.layout.zero == 3 or each.layout.pp == 2]
    cases = cases[:-1]  # what zb-v sends is what 1f1b sends
    some = [each for each in dense if each.train.freeze]
    cases += [each for each in some if each.layout.zero == 3 or each.layout.pp == 2]
    verdicts = run_ranks(2, check_cases, cases)[0]
    assert len(verdicts) == 7 + 6
    assert [verdict for verdict in verdicts if not verdict.is_exact] == []


@pytest.mark.parametrize("parameter", ["encoders.image.layers.0.up.weight", "embed.weight"])
def test_a_gradient_that_is_wrong_on_one_rank_is_caught_by_name(parameter: str) -> None:
    case = modal_cases(2, MODEL)[0]
    (verdict,) = play_ranks(2, on_ranks.check_with_wrong_gradient, case, parameter, 1)[0]
    assert not verdict.is_exact
    assert verdict.worst_parameter == parameter
    assert verdict.gradient_error > 0.01
    assert max(verdict.loss_error, verdict.forward_error) <= TOLERANCE


def test_the_verb_proves_a_run_with_encoders(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--modality", "--ranks", "1", "--model.hidden=32", "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert len(cases) == len(modal_cases(1, MODEL))
    assert main(["check", "--modality", "--full-size"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(
        "Encoders of images and sound are proven small, on real ranks and in cases of their own, "
        "which --full-size does not choose. Leave it out."
    )
