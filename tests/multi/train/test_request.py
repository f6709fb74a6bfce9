"""``train.run``: what ``equipoise train`` does, from Python; real ranks, real files."""

import json
from pathlib import Path

import pytest

from equipoise import train
from equipoise.base.errors import SpecError
from equipoise.cli.main import main
from equipoise.spec.run.spec import RunSpec, TrainSpec
from equipoise.train.request import resolve_run
from support.make_run import share_curve


def test_a_run_from_python_is_the_verbs_to_the_bit(
    texts: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice two ranks, and a third time to resume: some 10 s."""
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(
        f"[model]\nlayers = 2\nhidden = 32\nheads = 2\nkv_heads = 1\nffn = 48\nhead_width = 16\n"
        f'[data]\nsource = "text"\npath = "{texts}"\nvocab = 300\ncache = "{cache}"\n'
        f"[pack]\ncontext_tokens = 64\nstep_tokens = 256\n"
        f"[train]\nsteps = 3\nwarmup_steps = 1\n[layout]\ndp = 2\n"
    )
    record = train.run(run_toml, out=tmp_path / "python")
    assert record.step.tolist() == [1, 2, 3]
    assert record.busy_s.shape == (3, 2)
    share_curve(tmp_path / "python", tmp_path / "verb")
    assert main(["train", str(run_toml), "--out", str(tmp_path / "verb"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"run": str(tmp_path / "verb"), "step": 3, "loss": float(record.loss[-1])}
    again = train.run(resolve_run(run_toml).spec, out=tmp_path / "python")
    assert again.loss.tolist() == record.loss.tolist()  # it was finished


def test_a_spec_is_judged_as_a_file_is() -> None:
    run = RunSpec(name="mine", train=TrainSpec(steps=50))
    assert resolve_run(run).spec == run
    assert resolve_run(resolve_run(run)).spec == run
    with pytest.raises(SpecError) as caught:
        resolve_run(RunSpec(train=TrainSpec(steps=3, warmup_steps=4)))
    assert str(caught.value) == (
        "--train.warmup_steps: 4 is more than train.steps = 3 (--train.steps). Give at most 3."
    )
