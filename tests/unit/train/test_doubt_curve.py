"""A price curve that a whole run has shown to be wrong is not kept."""

from pathlib import Path

from equipoise.train.curves import doubt_curve


def test_curve_far_off_is_dropped_and_said(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    file.write_text("{}")
    said = doubt_curve(file, [1.9, 1.5, 1.5, 1.4, 1.5])
    assert said == (
        "Computing took 50% more than the price curve foresaw (median of 5 steps); the kept curve "
        "is dropped, and the next run measures it anew."
    )
    assert not file.exists()
    file.write_text("{}")
    assert doubt_curve(file, [0.5] * 5).startswith("Computing took 50% less than the price curve")


def test_curve_is_kept_when_near_or_when_little_is_known(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    file.write_text("{}")
    assert doubt_curve(file, [1.1, 0.9, 1.05, 1.0, 1.15]) == ""
    assert doubt_curve(file, [3.0, 3.0]) == ""
    assert file.exists()
