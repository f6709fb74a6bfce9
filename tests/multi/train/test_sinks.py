"""A run and its resume are one run of W&B and of MLflow, with a row for each step."""

from pathlib import Path

import pytest

from equipoise import train
from equipoise.spec.run.load import read_run
from support.wandb_log import read_runs


def test_a_resumed_run_goes_on_in_its_sinks(
    texts: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank, started twice, each time with wandb's own process: some 12 s."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(
        f"[model]\nlayers = 2\nhidden = 32\nheads = 2\nkv_heads = 1\nffn = 48\nhead_width = 16\n"
        f'[data]\nsource = "text"\npath = "{texts}"\nvocab = 300\ncache = "{cache}"\n'
        f"[pack]\ncontext_tokens = 64\nstep_tokens = 256\n[layout]\ndp = 1\n"
        f"[journal]\nwandb = true\nmlflow = true\n"
    )
    for steps in (2, 3):
        resolved = read_run(run_toml, [("train.steps", str(steps))])
        record = train.run(resolved, out=tmp_path / "run")
    first, second = read_runs(tmp_path / "run")
    assert first["id"] == second["id"]
    assert first["config"]["pack.step_tokens"] == 256
    rows = [*first["history"], *second["history"]]
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert [row["train/loss"] for row in rows] == record.loss.tolist()
    (folder,) = (tmp_path / "run" / "mlflow").glob("*/*/metrics/train")
    lines = (folder / "loss").read_text().splitlines()
    kept = [(int(line.split()[2]), float(line.split()[1])) for line in lines]
    assert kept == list(zip((1, 2, 3), record.loss.tolist(), strict=True))
