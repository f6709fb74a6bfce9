"""``train.run``: what ``equipoise train`` does, from Python; real ranks, real files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise import train
from equipoise.base.errors import LayoutError, SpecError
from equipoise.cli.main import main
from equipoise.launch.local import claim_folder, folder_taken
from equipoise.spec.run.spec import DataSpec, PackSpec, RunSpec, TrainSpec
from equipoise.train import request
from equipoise.train.request import resolve_run
from support.make_run import share_curve

RUN: Any = RunSpec
DATA: Any = DataSpec
TRAIN: Any = TrainSpec
"""Called with values of other kinds than theirs."""


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
    # Paths and NumPy's numbers are what they stand for.
    data, train_spec = DATA(source="text", path=Path("corpus")), TRAIN(steps=np.int64(50))
    resolved = resolve_run(RunSpec(data=data, train=train_spec)).spec
    assert (resolved.data.path, resolved.train.steps) == ("corpus", 50)
    assert type(resolved.train.steps) is int


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (5, "run is 5. Give a run.toml, or a RunSpec."),
        ({"train": {}}, "run is (a table). Give a run.toml, or a RunSpec."),
        (
            RUN(train={"steps": 5}),
            "train of the RunSpec is (a table). Give a TrainSpec.",
        ),
        (
            RunSpec(train=TRAIN(steps={5})),
            "train.steps of the RunSpec is (a set). Give what run.toml can hold: a number, a text, "
            "a flag, or a tuple of texts.",
        ),
        (
            RunSpec(train=TrainSpec(lr=float("nan"))),
            "--train.lr: nan is not a finite number.",
        ),
        (
            RunSpec(train=TRAIN(steps=np.arange(2))),
            "train.steps of the RunSpec is (a ndarray). Give what run.toml can hold: a number, a "
            "text, a flag, or a tuple of texts.",
        ),
    ],
)
def test_what_is_not_a_run_is_refused(run: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_run(run)
    assert str(caught.value) == message


def test_a_second_command_leaves_what_ranks_will_read(
    texts: Path, cache: Path, tmp_path: Path
) -> None:
    """The first has prepared its folder, and its rank 0 does not hold the lock yet."""
    data = DataSpec(source="text", path=str(texts), vocab=300, cache=str(cache))
    run = RunSpec(data=data, pack=PackSpec(context_tokens=64, step_tokens=256))
    folder = request.prepare(run, out=tmp_path / "run").folder
    resolved = (folder / "resolved.json").read_bytes()
    other = dataclasses.replace(run, train=TrainSpec(lr=0.5))
    with claim_folder(folder), pytest.raises(LayoutError) as caught:
        request.prepare(other, out=folder)
    assert str(caught.value) == folder_taken(folder)
    assert (folder / "resolved.json").read_bytes() == resolved
    request.prepare(other, out=folder)
    assert (folder / "resolved.json").read_bytes() != resolved
