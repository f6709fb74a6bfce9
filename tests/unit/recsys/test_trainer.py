"""Scores that are not numbers, and weights of another model, end a run in a sentence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise.base.errors import CheckpointError, LayoutError, NonFiniteError
from equipoise.cost.recommend import StepRates, TableRates
from equipoise.launch.local import claim_folder, folder_taken
from equipoise.observe.journal import EventSink
from equipoise.recsys import request
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.folder import held_rates, prepare, read_prepared
from equipoise.recsys.foresight.forecast import placing_rates, rates_file
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.recsys.whole import MANIFEST, seal
from equipoise.spec.device.here import cpu_model
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


def test_a_second_command_leaves_what_ranks_will_read(tmp_path: Path) -> None:
    """The first has prepared its folder, and its rank 0 does not hold the lock yet."""
    spec, base = read_recommend(write_clicks(tmp_path), [("layout.dp", "1")])
    folder = tmp_path / "run"
    prepare(folder, spec, base)
    written = (folder / "spec.json").read_bytes()
    other = replace(spec, tables=replace(spec.tables, lr=0.5))
    with claim_folder(folder), pytest.raises(LayoutError) as caught:
        request.run(other, base, out=folder)
    assert str(caught.value) == folder_taken(folder)
    assert (folder / "spec.json").read_bytes() == written
    assert not (folder / "columns.json").exists()


def test_a_run_keeps_the_rates_that_placed_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured anew, they would move its tables: its ranks, and files of rows, know their own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    spec, base = read_recommend(write_clicks(tmp_path), [("layout.dp", "4")])
    samples, folder = read_samples(spec.data, base), tmp_path / "run"
    assert placing_rates(folder) == TableRates()
    parts = {"lookup": (0.0, 1e-2, 1e-10), "exchange": (0.0, 1e-9)}
    parts |= {"dense": (0.0, 0.0), "reduce": (0.0, 0.0), "rest": (0.0, 0.0)}
    measured = StepRates(parts, cpu_model(), "2026-01-01", 0.1, 0.0)
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text(json.dumps(measured.as_row()))
    rates = placing_rates(folder)
    assert (rates.words, rates.shard_s) == ("rates of 2026-01-01", 1e-2)
    prepare(folder, spec, base, rates)
    rates_file().unlink()
    assert (held_rates(folder), placing_rates(folder)) == (rates, rates)
    assert read_prepared(folder) == (spec, base)
    # A shard's calls cost more than what rows over ranks gain: tables stay whole.
    kinds = [
        {each.kind for each in plan_samples(spec, samples, own).plan.placements}
        for own in (None, rates)
    ]
    assert kinds[0] != kinds[1] == {"table"}
    file = folder / "spec.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rates": {"shard_s": "x"}}))
    with pytest.raises(CheckpointError) as error:
        placing_rates(folder)
    assert str(error.value) == (
        f"{file} cannot be read: its rates are not numbers. Copy it from a backup, or choose "
        "another folder with --out."
    )
