"""Bits of a run's checkpoint: which text judges them, the next step, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from equipoise.base.errors import CheckpointError, SpecError
from equipoise.checkpoint.export import read_moments
from equipoise.checkpoint.manifest import newest_good
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.fault.vulnerability.campaign import measure
from equipoise.fault.vulnerability.decoder import MOMENTS
from equipoise.fault.vulnerability.request import BitFlipRequest, flip_bits
from equipoise.fault.vulnerability.run import open_run, subjects_of, take_step
from equipoise.spec.names import CHECKPOINTS
from equipoise.spec.run.resolved import write_resolved
from support.make_run import MakeRun
from support.ranks import on_ranks


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path) -> Path:
    """Four steps of two ranks."""
    resolved = make_run(steps=4, every_steps=4, zero=2)
    write_resolved(tmp_path, resolved)
    run_ranks(2, on_ranks.train, tmp_path, resolved, {})
    return tmp_path


def test_the_bits_of_a_run(run: Path) -> None:
    opened = open_run(run, positions=96)
    assert opened.step == 4 and not opened.is_held_out
    for pieces in (opened.held_out, opened.gradient_pieces):
        assert 64 < len(pieces.tokens_T) == sum(pieces.doc_tokens) <= 96
    assert not torch.equal(opened.held_out.tokens_T[:32], opened.gradient_pieces.tokens_T[:32])

    # One number's update is that of the whole step, as torch computes it.
    decoder, step = take_step(opened)
    after = dict(decoder.named_parameters())
    assert set(step.moments) == set(after) == set(opened.state)
    for name, weight in after.items():
        assert not torch.equal(weight, step.before[name])
        moments = step.moments[name]
        again = step.update(name, step.before[name], step.gradients[name], *moments.values())
        assert list(moments) == list(MOMENTS)
        assert torch.equal(again, weight), name
    # A frozen weight has no moments, no gradient, and stays.
    frozen = {name: each for name, each in opened.moments.items() if name != "embed.weight"}
    decoder, step = take_step(dataclasses.replace(opened, moments=frozen))
    assert not step.gradients["embed.weight"].any() and "embed.weight" not in step.moments
    for name, weight in decoder.named_parameters():
        assert torch.equal(weight, step.before[name]) == (name == "embed.weight")

    folder = run / CHECKPOINTS / "step-000004"
    assert newest_good(run / CHECKPOINTS) is not None
    for name, moments in read_moments(folder).items():
        assert torch.equal(moments["exp_avg_sq"], opened.moments[name]["exp_avg_sq"])
        assert float(moments["step"]) == 4

    subjects = list(subjects_of(opened, ["fp32", "bf16"]))
    assert [each.dtype for each in subjects] == ["fp32", "bf16", "fp32"]
    assert {each.component for each in subjects[2].places()} == {"Adam m", "Adam v"}
    place = next(each for each in subjects[2].places() if each.name == "embed.weight.exp_avg_sq")
    held = {name: each.clone() for name, each in subjects[2].decoder.named_parameters()}
    assert not subjects[2].strike(place, 0, [0]).is_wrong  # the lowest bit of a moment
    used = int(opened.held_out.tokens_T[0]) * opened.model.hidden
    effects = [subjects[2].strike(place, used + at, [30]) for at in range(8)]
    assert effects == [subjects[2].strike(place, used + at, [30]) for at in range(8)]
    for name, each in subjects[2].decoder.named_parameters():
        assert torch.equal(each, held[name]), name


# It trains the two small models, which takes seconds.
def test_the_same_seed_gives_the_same_answer_and_bad_requests_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = run / CHECKPOINTS / "step-000005"
    torn.mkdir()
    assert main(["drill", str(run), "--bit-flips", "--flips", "1", "--seed", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed_over"] == [f"{torn} is torn: its manifest.json cannot be read."]
    assert answer["is_whole"] and answer["seed"] == 3 and answer["run"] == str(run)
    assert [(each["model"], each["dtype"]) for each in answer["models"]] == [
        ("decoder", "fp32"),
        ("decoder", "bf16"),
        ("decoder", "fp32"),
        *((model, dtype) for dtype in ("fp32", "bf16") for model in ("CNN", "DLRM")),
    ]
    for each in answer["models"]:
        assert each["flips"] == each["planned"] > 0
    again = measure(
        next(iter(subjects_of(open_run(run), ["bf16"]))), flips=1, uniform_flips=30, seed=3
    )
    said = {
        (each["component"], field): (count["flips"], count["wrong"])
        for each in answer["models"][1]["components"]
        for field, count in each["fields"].items()
    }
    assert said == {key: (each.flips, each.wrong) for key, each in again.cells.items()}
    assert not answer["models"][2]["uniform"]  # moments are no weights

    for bad, message in (
        (BitFlipRequest(run, flips=0), "flips must be at least 1; it is 0."),
        (BitFlipRequest(run, seed=-1), "seed must be between 0 and 2**63 - 1; it is -1."),
        (BitFlipRequest(run, dtypes=("fp8",)), "Bits are flipped in fp32 and bf16, not in fp8."),
    ):
        with pytest.raises(SpecError) as refused:
            flip_bits(bad)
        assert str(refused.value) == message
    with pytest.raises(SpecError, match="it is not the folder of a run"):
        open_run(tmp_path / "nothing")
    (run / CHECKPOINTS).rename(run / "elsewhere")
    with pytest.raises(CheckpointError) as missing:
        open_run(run)
    assert str(missing.value) == (
        f"{run} has no checkpoint whose bits could be flipped. Train it first: equipoise train "
        f"run.toml."
    )
