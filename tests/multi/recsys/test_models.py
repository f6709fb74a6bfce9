"""Every architecture on ranks is the model of one process: its loss, and every gradient."""

from pathlib import Path

import numpy as np
import pytest

from equipoise.comm.local import run_ranks
from equipoise.recsys.embedding import whole_table
from equipoise.recsys.exchange import TimedExchange
from equipoise.spec.architectures import ARCHITECTURES
from equipoise.spec.recommend import RecommendSpec, read_recommend
from support.read_run import EXACT
from support.recsys.clicks import write_clicks
from support.recsys.one_step import Step, take_step, take_steps

MODULES = '["dot", "cross", "attention", "linear", "convolution"]'


def specs_of(run_toml: Path, dp: int) -> list[RecommendSpec]:
    """A run of each architecture, in batches that do not divide by the ranks."""
    flags = [("tables.optimizer", "sgd"), ("tables.lr", "1.0"), ("train.batch", "63")]
    flags += [("layout.dp", str(dp)), ("tables.kinds", '["row", "table", "column"]')]
    more = {"dhen": [("model.modules", MODULES)]}
    return [
        read_recommend(run_toml, [*flags, ("model.architecture", name), *more.get(name, [])])[0]
        for name in ARCHITECTURES
    ]


def whole(steps: list[Step]) -> dict[str, np.ndarray]:
    """Each table's gradient from all ranks' parts."""
    parts: dict[str, list] = {}
    for step in steps:
        for name, *part in step.tables:
            parts.setdefault(name, []).append(part)
    rows = {name: 1 + max(int(part[0].max()) for part in each) for name, each in parts.items()}
    return {name: whole_table(each, rows[name]) for name, each in parts.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_every_architecture_equals_one_process(world: int, tmp_path: Path) -> None:
    run_toml = write_clicks(tmp_path)
    ranks = run_ranks(world, take_steps, tmp_path, specs_of(run_toml, world), tmp_path)
    for at, spec in enumerate(specs_of(run_toml, 1)):
        alone = take_step(tmp_path, spec, tmp_path, TimedExchange(alone=True))
        name = spec.model.architecture
        for each in ranks:
            assert each[at].loss == pytest.approx(alone.loss, rel=EXACT), name
            for weight, grad in alone.dense.items():
                error = np.abs(each[at].dense[weight] - grad).max()
                assert error <= EXACT * np.abs(grad).max(), (name, weight)
        expected = whole([alone])
        for table, moved in whole([each[at] for each in ranks]).items():
            error = np.abs(moved - expected[table]).max()
            assert error <= EXACT * np.abs(expected[table]).max(), (name, table)
