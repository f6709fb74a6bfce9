"""Conversations on ranks: steps without an answer, answers on every axis, and text beside them."""

import json
from pathlib import Path

import pytest
import torch

from equipoise.checkpoint.export import read_checkpoint_weights
from equipoise.checkpoint.manifest import newest_good
from equipoise.nn.decoder import Decoder, initialize
from equipoise.spec.model.presets import ModelSpec
from equipoise.train import run
from support.chat.corpus import write_model, write_run, write_talks
from support.make_run import share_curve
from support.read_run import events

MODEL = ModelSpec(layers=2, hidden=32, heads=2, kv_heads=2, ffn=48, vocab=320, head_width=16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", MODEL)
    return tmp_path


def learn(folder: Path, layouts: tuple[str, ...], data: str = "") -> None:
    """Three steps on each layout: the same labels, and the same losses."""
    losses, labels = [], []
    for number, layout in enumerate(layouts):
        file = write_run(folder, steps=3, window=256, layout=layout, data=data)
        out = folder / f"run-{number}"
        if number:
            share_curve(folder / "run-0", out)
        losses.append(run(file, out=out).loss)
        steps = [each for each in events(out) if each["name"] == "step"]
        labels.append([each["labels"] for each in steps])
    assert all(each == labels[0] for each in labels) and min(labels[0]) > 0
    for each in losses[1:]:
        assert torch.allclose(torch.tensor(each), torch.tensor(losses[0]), rtol=1e-5, atol=0)


def test_steps_without_an_answer_change_no_weight(folder: Path, capfd) -> None:
    """One conversation whose question alone fills more than two steps."""
    talk = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "yes"}]
    write_talks(folder, [talk])
    file = write_run(folder, steps=2, window=64, layout="dp = 1")
    record = run(file, out=folder / "run", is_quiet=False)
    said = capfd.readouterr().out
    assert (
        "1 of 1 conversations exceed pack.context_tokens = 64 and get cut there: the rest "
        "of an answer is learned without what came before it. The longest has 4"
    ) in said
    assert "Step 2 has no token to learn; no weight was changed." in said
    steps = [each for each in events(folder / "run") if each["name"] == "step"]
    assert [each["labels"] for each in steps] == [0, 0] and record.loss.tolist() == [0, 0]
    newest = newest_good(folder / "run" / "checkpoint")
    assert newest is not None
    weights = read_checkpoint_weights(*newest[:2])[1]
    first = Decoder(MODEL)
    initialize(first, 0)
    assert all(torch.equal(weights[name], each) for name, each in first.state_dict().items())


def test_every_layout_learns_the_same_answers_beside_text(folder: Path) -> None:
    """Four short runs: some 20 s."""
    talks = [
        [{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "cd" * (n % 7)}]
        for n in range(1, 60)
    ]
    write_talks(folder, talks)
    text = "".join(json.dumps({"text": "a rank waits " * n}) + "\n" for n in range(1, 40))
    (folder / "text.jsonl").write_text(text)
    data = """
[[data.mix]]
path = "chat.jsonl"
format = "messages"
[[data.mix]]
path = "text.jsonl"
weight = 2
"""
    learn(folder, ("dp = 1", "dp = 2\nzero = 3", "dp = 1\ncp = 2", "dp = 1\ntp = 2"), data)
