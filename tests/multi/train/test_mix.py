"""A mixture trains the same tokens on any ranks and through any resume."""

import json
from pathlib import Path

import pytest

from equipoise import train
from equipoise.cli.main import main
from equipoise.spec.run.load import read_run
from support.make_run import share_curve

SIZES = "[model]\nlayers = 2\nhidden = 32\nheads = 2\nkv_heads = 1\nffn = 48\nhead_width = 16\n"


def test_shares_hold_on_any_ranks_and_through_a_resume(
    texts: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of one rank, and one of two in two sessions: some 20 s."""
    lines = [json.dumps({"a": {"text": f"line {number} " * 20}}) for number in range(30)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(
        f'{SIZES}[data]\nvocab = 300\ncache = "{cache}"\nsource = "text"\n'
        f'[[data.mix]]\npath = "{texts}"\nweight = 1\n'
        f'[[data.mix]]\nsource = "jsonl"\npath = "lines.jsonl"\nfield = "a.text"\nweight = 3\n'
        f"[pack]\ncontext_tokens = 64\nstep_tokens = 256\n[train]\nsteps = 4\n"
    )
    losses = []
    for ranks, ends in ((1, (4,)), (2, (2, 4))):
        if ranks == 2:
            share_curve(tmp_path / "1-1", tmp_path / "2-2")
        for steps in ends:
            keys = [("layout.dp", str(ranks)), ("train.steps", str(steps))]
            keys += [("train.schedule", "constant"), ("train.warmup_steps", "0")]
            run = read_run(run_toml, keys)
            record = train.run(run, out=tmp_path / f"{ranks}-{len(ends)}", is_quiet=False)
        losses.append(record.loss.tolist())
        ranks_of = "2 data-parallel ranks" if ranks == 2 else "one data-parallel rank"
        out = capsys.readouterr().out
        assert f"text:{texts.name}: " in out and "25.0% of every step" in out
        assert "jsonl:lines.jsonl: 30 documents, " in out and "75.0% of every step" in out
        assert f"A step is 256 tokens: {ranks_of}" in out
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    other = run_toml.read_text().replace("weight = 3", "weight = 2")
    run_toml.write_text(other)
    assert main(["train", str(run_toml), "--out", str(tmp_path / "2-2"), "--train.steps", "5"]) == 4
    assert "corpus" in capsys.readouterr().err
