"""Runs whose tables exceed their memory equal those in memory, to the bit, also when they go on."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import CheckpointError, SpecError
from equipoise.comm.local import run_ranks
from equipoise.recsys import request
from equipoise.spec.recommend import RecommendSpec, read_recommend
from support.recsys.clicks import train_part

RUN = """\
name = "large"
[model]
kind = "recommend"
width = 8
bottom = [4]
top = [8]
[data]
path = "clicks.csv"
label = "click"
ids = ["user", "ad", "hour"]
[tables]
optimizer = "adam"
kinds = ["row", "column", "data"]
lr = 0.05
[train]
epochs = 2
batch = 32
[layout]
dp = 2
[checkpoint]
every_steps = 7
"""


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    source = np.random.default_rng(0)
    rows = ["user,ad,hour,click"]
    for _ in range(500):
        user, ad = int(900 * source.random() ** 2), int(source.integers(300))
        rows.append(f"u{user},a{ad},{int(source.integers(24))},{(user + ad) % 2}")
    (folder / "clicks.csv").write_text("\n".join(rows) + "\n")
    (folder / "run.toml").write_text(RUN)
    return folder / "run.toml"


def part(run_toml: Path, folder: Path, spec: RecommendSpec, stop_at: int | None = None) -> list:
    folder.mkdir(exist_ok=True)
    return run_ranks(spec.layout.dp, train_part, folder, spec, run_toml.parent, stop_at)


def test_a_run_in_files_equals_one_in_memory(run_toml: Path, tmp_path: Path) -> None:
    in_memory = read_recommend(run_toml, [])[0]
    filed = read_recommend(run_toml, [("tables.memory_mib", "0.012")])[0]
    plain = part(run_toml, tmp_path / "plain", in_memory)
    whole = part(run_toml, tmp_path / "whole", filed)
    assert whole[0]["losses"] == plain[0]["losses"]
    assert whole[0]["best"] == plain[0]["best"]
    # Stopped two steps after a checkpoint, with rows of those two written back already.
    part(run_toml, tmp_path / "parts", filed, 9)
    gone_on = part(run_toml, tmp_path / "parts", filed)
    assert gone_on[0]["measured"]["steps"] == len(plain[0]["losses"]) - 7
    assert gone_on[0]["losses"] == plain[0]["losses"]
    assert gone_on[0]["best"] == plain[0]["best"]
    counted: dict[str, float] = {}
    for row in whole:
        for table in row["measured"]["held"].values():
            for key, value in table.items():
                counted[key] = counted.get(key, 0) + value
    assert counted["bytes"] < 0.5 * counted["fp32_bytes"]
    assert 0 < counted["hits"] < counted["reads"]
    assert counted["blocks_read"] > 0 < counted["blocks_written"]
    assert counted["stall_s"] > 0


def test_what_is_wrong_is_one_sentence(run_toml: Path, tmp_path: Path) -> None:
    spec = read_recommend(run_toml, [("tables.memory_mib", "0.012")])[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.json").write_text(json.dumps(dataclasses.asdict(spec)))
    other = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, dp=1))
    with pytest.raises(
        CheckpointError, match=r"holds a run with another layout\.dp\. Give it back"
    ):
        request.run(other, run_toml.parent, out=tmp_path / "run")
    with pytest.raises(
        SpecError,
        match=r'^tables\.precision = "int8" and tables\.memory_mib = 0\.012: files hold rows as '
        r"fp32\. Set one of them\.$",
    ):
        read_recommend(run_toml, [("tables.memory_mib", "0.012"), ("tables.precision", "int8")])
