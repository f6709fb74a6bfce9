"""Runs whose tables exceed their memory equal those in memory, to the bit, also when they go on."""

import dataclasses
import json
from pathlib import Path

import pytest

from equipoise.base.errors import CheckpointError, SpecError
from equipoise.recsys import request
from equipoise.spec.recommend import read_recommend
from support.recsys.clicks import run_part, write_parity_clicks

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
    return write_parity_clicks(folder, RUN, rows=500, users=900, ads=300)


def test_a_run_in_files_equals_one_in_memory(run_toml: Path, tmp_path: Path) -> None:
    in_memory = read_recommend(run_toml, [])[0]
    filed = read_recommend(run_toml, [("tables.memory_mib", "0.012")])[0]
    plain = run_part(run_toml, tmp_path / "plain", in_memory)
    whole = run_part(run_toml, tmp_path / "whole", filed)
    assert whole[0]["losses"] == plain[0]["losses"]
    assert whole[0]["best"] == plain[0]["best"]
    # Stopped two steps after a checkpoint, with rows of those two written back already.
    run_part(run_toml, tmp_path / "parts", filed, 9)
    gone_on = run_part(run_toml, tmp_path / "parts", filed)
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
