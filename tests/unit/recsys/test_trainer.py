"""Scores that are not numbers, and weights of another model, end a run in a sentence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise.base.errors import CheckpointError, NonFiniteError
from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.folder import prepare
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.recsys.whole import MANIFEST, seal
from equipoise.spec.recommend import read_recommend
from support.recsys.clicks import write_clicks


def test_scores_that_overflow_are_no_scores(tmp_path: Path) -> None:
    spec, base = read_recommend(write_clicks(tmp_path), [("layout.dp", "1")])
    samples, folder = read_samples(spec.data, base), tmp_path / "run"
    prepare(folder, spec, base)
    plan = plan_samples(spec, samples).plan
    trainer = RankTrainer(folder, spec, samples, plan, EventSink(), TimedExchange(alone=True))
    trainer.run(lambda _: None, stop_at=2)
    with torch.no_grad():
        for weight in trainer.dense.parameters():
            weight.fill_(float("inf"))  # 3e38 leaves some samples a finite score on some CPUs
    begin, end = samples.bounds("validation")
    with pytest.raises(NonFiniteError) as error:
        trainer.score("validation")
    assert str(error.value) == (
        f"After step 2, scores of {end - begin:,} of {end - begin:,} samples of the validation "
        "split are not numbers. Lower train.lr or tables.lr."
    )


def test_weights_of_another_model_are_not_loaded(tmp_path: Path) -> None:
    spec, base = read_recommend(write_clicks(tmp_path), [("layout.dp", "1")])
    samples, folder = read_samples(spec.data, base), tmp_path / "run"
    prepare(folder, spec, base)
    plan = plan_samples(spec, samples).plan
    other = replace(spec, model=replace(spec.model, top=(9,)))
    first = RankTrainer(folder, spec, samples, plan, EventSink(), TimedExchange(alone=True))
    first.run(lambda _: None, stop_at=5)
    checkpoint = folder / "checkpoint" / "step-000005"
    facts = json.loads((checkpoint / MANIFEST).read_text())
    for key in ("run", "digest", "format"):  # as a version that did not say whose it is
        del facts[key]
    (checkpoint / MANIFEST).write_text(seal(facts, facts["files"]))
    second = RankTrainer(folder, other, samples, plan, EventSink(), TimedExchange(alone=True))
    with pytest.raises(CheckpointError) as error:
        second.resume()
    assert str(error.value) == (
        f"{checkpoint} holds another model: its top.0.weight is (8, 22) (this run: (9, 22)). "
        "Restore a checkpoint of this run, or choose another folder with --out."
    )


def test_a_run_that_goes_on_obeys_another_weight_decay(tmp_path: Path) -> None:
    """The optimizer's state in a checkpoint has one, too, which was taken instead; and a rate."""
    spec, base = read_recommend(write_clicks(tmp_path), [("layout.dp", "1")])
    samples, folder = read_samples(spec.data, base), tmp_path / "run"
    prepare(folder, spec, base)
    plan = plan_samples(spec, samples).plan
    made = []
    for decay in (0.0, 0.5):
        given = replace(spec, train=replace(spec.train, weight_decay=decay, lr=0.01 + decay))
        prepare(folder, given, base)
        alone = TimedExchange(alone=True)
        made.append(RankTrainer(folder, given, samples, plan, EventSink(), alone))
        made[-1].resume()
        made[-1].run(lambda _: None, stop_at=5 if decay == 0 else 6)
    (group,) = made[1].optimizer.param_groups
    assert (group["weight_decay"], group["lr"]) == (0.5, 0.51)
    steps = {int(each["step"]) for each in made[1].optimizer.state.values()}
    assert steps == {6}


def test_weights_that_overflow_are_not_saved(tmp_path: Path) -> None:
    """A run that went on from them could not take a step, whatever its rates."""
    flags = [("layout.dp", "1"), ("tables.lr", "1e300"), ("checkpoint.every_steps", "1")]
    spec, base = read_recommend(write_clicks(tmp_path), flags)
    samples, folder = read_samples(spec.data, base), tmp_path / "run"
    plan = plan_samples(spec, samples).plan
    trainer = RankTrainer(folder, spec, samples, plan, EventSink(), TimedExchange(alone=True))
    with pytest.raises(NonFiniteError) as error:
        trainer.run(lambda _: None)
    assert str(error.value) == (
        "Weights after step 1 are not numbers, so they are not saved. Lower train.lr or tables.lr, "
        "and run again: it goes on from the checkpoint before."
    )
    assert not [*folder.glob("checkpoint/*")]
