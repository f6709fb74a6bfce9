"""Recommenders with rows of few bits: they train, go on as if never stopped, and report."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.cli.main import main
from equipoise.spec.recommend import read_recommend
from support.recsys.clicks import run_part, write_parity_clicks

RUN = """\
name = "coarse"
[model]
kind = "recommend"
width = 4
bottom = [4]
top = [8]
[data]
path = "clicks.csv"
label = "click"
ids = ["user", "ad"]
[tables]
optimizer = "row-wise-adagrad"
precision = "int4"
cache = 0.2
cache_policy = "trace"
kinds = ["row"]
lr = 0.05
[train]
epochs = 2
batch = 16
[layout]
dp = 1
[checkpoint]
every_steps = 7
"""


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coarse")
    return write_parity_clicks(folder, RUN, rows=300, users=200, ads=60)


@pytest.mark.parametrize("policy", ["trace", "lfu"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    run_toml: Path, tmp_path: Path, policy: str
) -> None:
    """Stopped inside an epoch: slots, stamps, draws and coming steps go on, to the bit."""
    spec = read_recommend(run_toml, [("tables.cache_policy", policy)])[0]
    whole = run_part(run_toml, tmp_path / "whole", spec)
    run_part(run_toml, tmp_path / "parts", spec, 7)
    gone_on = run_part(run_toml, tmp_path / "parts", spec)
    assert gone_on[0]["measured"]["steps"] == len(whole[0]["losses"]) - 7
    assert gone_on[0]["losses"] == whole[0]["losses"]
    for row in (whole[0]["measured"], gone_on[0]["measured"]):
        held = {name: (each["hits"], each["reads"]) for name, each in row["held"].items()}
        assert row["predicted_hits"] == held  # of its own steps, exactly
    assert gone_on[0]["best"] == whole[0]["best"]
    if policy == "lfu":
        return
    # On other ranks, rows that lay in slots are rounded first; the run goes on near by.
    run_part(run_toml, tmp_path / "moved", spec, 7)
    two = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, dp=2))
    moved = run_part(run_toml, tmp_path / "moved", two)
    assert np.abs(np.subtract(moved[0]["losses"], whole[0]["losses"])).max() < 0.05


def test_a_run_reports_bytes_and_hits(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    planned = ["plan", str(run_toml), "--layout.dp", "2", "--tables.kinds", '["row", "data"]']
    planned += ["--tables.cache", "0.5"]
    assert main([*planned, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["hit_rates"]["user"]
    assert main(planned) == 0
    words = f"Rows that caches will have in the first epoch: user {100 * expected:.1f}%, ad "
    assert words in capsys.readouterr().out
    flags = ["--layout.dp", "2", "--tables.kinds", '["row", "data"]', "--tables.cache", "0.5"]
    assert main(["train", str(run_toml), "--out", str(out), "--quiet", *flags]) == 0
    users, _ads = json.loads((out / "recommend.json").read_text())["held"]
    assert users["name"] == "user" and users["form"] == "int4"
    assert 0.2 < users["hits"] / users["reads"] < 1
    assert users["bytes"] < users["fp32_bytes"]
    # The second epoch begins with full caches, the planned first one with empty ones.
    assert expected == pytest.approx(users["hits"] / users["reads"], abs=0.15)
    assert users["predicted_hit_rate"] == users["hits"] / users["reads"]
    assert main(["report", str(out)]) == 0
    assert "rows in the cache" in (out / "report.html").read_text()
    capsys.readouterr()
    again = ["train", str(run_toml), "--out", str(out), *flags, "--tables.precision", "int8"]
    assert main(again) == 4
    assert "holds a run with another tables.precision." in capsys.readouterr().err


def test_columns_alone_are_refused(run_toml: Path) -> None:
    with pytest.raises(
        SpecError,
        match=r'^tables\.precision = "int4": its rows have one scale each and are not divided by '
        r"columns\. Add another kind to tables\.kinds\.$",
    ):
        read_recommend(run_toml, [("tables.kinds", '["column"]')])
