"""Recommenders that train: two ranks equal one, resumed runs go on, reports show both sides."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import DataError
from equipoise.cli.main import main
from equipoise.recsys import request
from equipoise.recsys.foresight.forecast import count_shards
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.spec.recommend import RecommendSpec, read_recommend
from support.recsys.clicks import run_part, write_clicks


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clicks(tmp_path_factory.mktemp("clicks"))


def spec_of(run_toml: Path, *flags: tuple[str, str]) -> RecommendSpec:
    return read_recommend(run_toml, flags)[0]


def test_two_ranks_equal_one_and_a_run_goes_on_under_another_plan(
    run_toml: Path, tmp_path: Path
) -> None:
    two, one = (spec_of(run_toml, ("layout.dp", ranks)) for ranks in ("2", "1"))
    whole = run_part(run_toml, tmp_path / "two", two)
    alone = run_part(run_toml, tmp_path / "one", one)
    assert np.abs(np.subtract(whole[0]["losses"], alone[0]["losses"])).max() < 1e-5
    assert whole[0]["best"]["test_auc"] == pytest.approx(alone[0]["best"]["test_auc"], abs=1e-3)
    # Five steps on two ranks by rows, the dense part in shards, five on one, the rest on two again:
    # as if nothing had happened.
    rows = spec_of(run_toml, ("tables.kinds", '["row"]'), ("layout.zero", "3"))
    for spec, stop_at in ((rows, 5), (one, 10), (rows, None)):
        moved = run_part(run_toml, tmp_path / "moved", spec, stop_at)
    assert moved[0]["measured"]["steps"] == len(alone[0]["losses"]) - 10
    assert np.abs(np.subtract(moved[0]["losses"], alone[0]["losses"])).max() < 1e-5
    # Scoring after every epoch gathers all weights, and is none of a step's bytes.
    samples = read_samples(rows.data, run_toml.parent)
    shards = count_shards(rows, samples, plan_samples(rows, samples).plan)
    assert shards is not None and moved[0]["measured"]["dense_sent"] == shards.sent


def test_ranks_without_samples_equal_one(run_toml: Path, tmp_path: Path) -> None:
    """Batches of three samples, the last of one, over four ranks; tables of every kind."""
    few = (("train.batch", "3"), ("data.train_share", "0.011"), ("train.epochs", "1"))
    for kind in ("table", "row", "column", "data"):
        four, one = (
            spec_of(run_toml, *few, ("layout.dp", ranks), ("tables.kinds", f'["{kind}"]'))
            for ranks in ("4", "1")
        )
        many = run_part(run_toml, tmp_path / f"four-{kind}", four)
        alone = run_part(run_toml, tmp_path / f"one-{kind}", one)
        assert len(many[0]["losses"]) == 3
        assert np.abs(np.subtract(many[0]["losses"], alone[0]["losses"])).max() < 1e-6


def test_a_command_trains_above_guessing_and_reports_both_sides(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(run_toml), "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"]["test_auc"] > 0.6
    for row in answer["traffic"]:
        assert row["ids"] == pytest.approx(row["predicted_ids"], rel=0.15)
        assert row["sent_bytes"] == pytest.approx(row["predicted_sent_bytes"], rel=0.1)
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.startswith("On later samples: AUC 0.")
    page = (out / "report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in ("user", "ad", "words"))
    # Asked again, nothing is left to do; asked for another model, the run is refused.
    assert main(["train", str(run_toml), "--out", str(out), "--quiet"]) == 0
    assert main(["train", str(run_toml), "--out", str(out), "--model.width", "8"]) == 4
    assert "holds a run with another model.width." in capsys.readouterr().err
    assert main(["train", str(run_toml), "--compare", "in-order,by-work"]) == 2
    assert '--compare: not for a run with model.kind = "recommend"' in capsys.readouterr().err


def test_what_is_wrong_is_said_once(run_toml: Path, tmp_path: Path) -> None:
    spec = spec_of(run_toml)
    data = dataclasses.replace(spec.data, ids=("user", "adv"))
    with pytest.raises(DataError, match='has no column "adv" among its 6'):
        request.run(dataclasses.replace(spec, data=data), run_toml.parent, out=tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


_DELETE = (
    "Delete it, and run the same `equipoise train` again, which writes it from the newest "
    "checkpoint."
)
RECORDS = {
    "recommend.json": ("[]", f"it does not hold a JSON object. {_DELETE}"),
    "spec.json": (
        "{}",
        "it does not hold a run's tables. Copy it from a backup, or choose another folder with "
        "--out.",
    ),
}


def test_a_record_that_is_torn_is_refused_before_ranks_start(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    flags = ["--checkpoint.every_steps=5", "--train.epochs=1", "--json"]
    assert main(["train", str(run_toml), "--out", str(whole), *flags]) == 0
    capsys.readouterr()

    beneath = whole / "recommend.json" / "run"
    assert main(["train", str(run_toml), "--out", str(beneath), *flags]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == (
        f"The run's folder {beneath} cannot be written (Not a directory). Make it writable, or "
        "choose another with --out."
    )

    def said(place: str, damage: Callable[[Path], object]) -> tuple[int, str, Path]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(whole, folder)
        damage(folder / place)
        again = ["train", str(run_toml), "--out", str(folder), *flags, "--train.epochs=2"]
        return main(again), capsys.readouterr().err, folder / place

    for place, (text, why) in RECORDS.items():
        code, err, file = said(place, lambda file, text=text: file.write_text(text))
        assert (code, err) == (
            4,
            f"{file} cannot be read: {why}\n",
        )
