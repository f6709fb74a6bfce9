"""Bytes of a rank's rows are predicted as they are, however rows are kept."""

from pathlib import Path

import pytest

from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.place import plan_samples
from equipoise.recsys.request import can_shrink
from equipoise.recsys.samples import read_samples
from equipoise.recsys.tiers.run import count_bytes, predict_bytes
from equipoise.recsys.trainer import RankTrainer
from equipoise.spec.recommend import read_recommend
from support.recsys.clicks import RUN, write_parity_clicks


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RUN.replace('time = "t"\n', "").replace('bags = ["words"]\nnumbers = ["price"]\n', "")
    return write_parity_clicks(tmp_path_factory.mktemp("kept"), run, rows=900, users=700, ads=90)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tables.optimizer": "sgd", "tables.precision": "int4", "tables.cache": "0.3"},
        {"tables.precision": "int8", "tables.cache": "0.2", "tables.cache_policy": "lfu"},
        {"tables.memory_mib": "0.01", "tables.optimizer": "row-wise-adagrad"},
    ],
    ids=["fp32", "int4", "int8", "files"],
)
def test_bytes_are_those_predicted(run_toml: Path, tmp_path: Path, flags: dict[str, str]) -> None:
    spec, base = read_recommend(run_toml, [("layout.dp", "1"), *flags.items()])
    samples = read_samples(spec.data, base)
    answer = plan_samples(spec, samples)
    predicted = predict_bytes(spec, samples, answer.plan).tolist()
    alone = TimedExchange(alone=True)
    trainer = RankTrainer(tmp_path, spec, samples, answer.plan, EventSink(), alone)
    assert predicted == [count_bytes(trainer.tables)]
    # The plan prices fp32 rows in memory.
    assert (predicted == answer.held_bytes.tolist()) == (not flags)


def test_rows_in_files_belong_to_their_ranks(run_toml: Path) -> None:
    """A run that shrank was refused by its own folder."""
    spec, base = read_recommend(run_toml, [("layout.dp", "2")])
    samples = read_samples(spec.data, base)
    assert can_shrink(spec, samples, 1)
    filed, _ = read_recommend(run_toml, [("layout.dp", "2"), ("tables.memory_mib", "0.01")])
    assert not can_shrink(filed, samples, 1)
    alone = [("layout.dp", "2"), ("layout.ranks_per_host", "2"), ("tables.kinds", '["table-row"]')]
    hosted, _ = read_recommend(run_toml, alone)
    assert not can_shrink(hosted, samples, 1)
