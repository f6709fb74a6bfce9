"""A price curve that a whole run has shown to be wrong is not kept."""

import dataclasses
from pathlib import Path

from equipoise.cost.curve import counted_curve
from equipoise.spec.model.presets import preset
from equipoise.train.curves import Measuring, disturbed_sentence, doubt_curve, fair_share


def test_curve_far_off_is_dropped_and_said(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    file.write_text("{}")
    said = doubt_curve(file, [1.9, 1.5, 1.5, 1.4, 1.5])
    assert said == (
        "Computing took 50% more than the price curve predicted (median of 5 steps). This run "
        "keeps its curve; the next run measures it again."
    )
    assert not file.exists()
    file.write_text("{}")
    assert doubt_curve(file, [0.5] * 5).startswith("Computing took 50% less than the price curve")


def test_a_first_step_that_warms_up_is_no_reason(tmp_path: Path) -> None:
    assert doubt_curve(tmp_path / "none.json", [9.0, 1.1, 1.0, 0.9, 1.05]) == ""


def test_ranks_that_share_cores_have_what_they_may_have() -> None:
    def rank(host: str, cores: set[int], share: float) -> Measuring:
        return Measuring(host, frozenset(cores), share)

    assert fair_share([rank("a", {0}, 0.99), rank("a", {1}, 0.97)]) == 0.97
    assert fair_share([rank("a", {0, 1}, 0.45)] * 4) == 0.9  # two of four compute at a time
    assert fair_share([rank("a", {0}, 1.0), rank("b", {0}, 0.5)]) == 0.5


def test_a_disturbed_curve_is_said_to_be() -> None:
    curve = counted_curve(preset("2m"))
    assert disturbed_sentence(curve) == ""
    assert disturbed_sentence(dataclasses.replace(curve, busy_share=0.41)) == (
        "The price curve was measured while other programs used the cores: a rank had 41% of its "
        "processor time. This run packs by it; the next run measures again."
    )


def test_curve_is_kept_when_near_or_when_little_is_known(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    file.write_text("{}")
    assert doubt_curve(file, [1.1, 0.9, 1.05, 1.0, 1.15]) == ""
    assert doubt_curve(file, [3.0, 3.0]) == ""
    assert file.exists()
