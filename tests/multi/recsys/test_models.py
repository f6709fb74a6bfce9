"""Every architecture on ranks is the model of one process: its loss, and every gradient.

Copied to all ranks, or divided over the ranks of a host and copied on hosts.
"""

from pathlib import Path

import numpy as np
import pytest

from equipoise.comm.local import run_ranks
from equipoise.recsys.embedding import whole_table
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.models.catalog import build_model
from equipoise.recsys.models.shards import unit_shapes
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.schedule.tables.traffic import count_dense_bytes
from equipoise.spec.architectures import ARCHITECTURES
from equipoise.spec.recommend import RecommendSpec, read_recommend
from support.read_run import EXACT
from support.recsys.clicks import write_clicks
from support.recsys.one_step import Step, take_step, take_steps

NOTHING = {"gather": 0, "scatter": 0, "across": 0}
MODULES = '["dot", "cross", "attention", "linear", "convolution"]'


def specs_of(run_toml: Path, dp: int, zero: int = 0) -> list[RecommendSpec]:
    """A run of each architecture, in batches that do not divide by the ranks; hosts have two."""
    flags = [("layout.zero", str(zero)), ("layout.ranks_per_host", str(min(dp, 2)))]
    flags += [("tables.optimizer", "sgd"), ("tables.lr", "1.0"), ("train.batch", "63")]
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
    alone = [
        take_step(tmp_path, spec, tmp_path, TimedExchange(alone=True))
        for spec in specs_of(run_toml, 1)
    ]
    stages = (0, 3) if world == 2 else (3,)
    specs = [spec for zero in stages for spec in specs_of(run_toml, world, zero)]
    ranks = run_ranks(world, take_steps, tmp_path, [*specs, *specs[-1:]], tmp_path)
    for at, spec in enumerate(specs):
        own, one = [each[at] for each in ranks], alone[at % len(alone)]
        name = spec.model.architecture, spec.layout.zero
        for step in own:
            assert step.loss == pytest.approx(one.loss, rel=EXACT), name
            for weight, grad in one.dense.items():
                error = np.abs(step.dense[weight] - grad).max()
                assert error <= EXACT * np.abs(grad).max(), (name, weight)
        expected = whole([one])
        for table, moved in whole(own).items():
            error = np.abs(moved - expected[table]).max()
            assert error <= EXACT * np.abs(expected[table]).max(), (name, table)
        tables = plan_samples(spec, samples := read_samples(spec.data, tmp_path)).plan.outputs
        model = build_model(spec.model, tables, samples.numbers.shape[1], seed=0)
        sent = count_dense_bytes(unit_shapes(model), hosts=world // 2, per_host=2)
        assert all(step.sent == (sent if spec.layout.zero else NOTHING) for step in own), name
        assert sum(step.held for step in own) == world // (1 + (spec.layout.zero > 0)) * one.held
    for each in ranks:  # once more, to the bit
        before, after = each[-2:]
        assert after.loss == before.loss
        assert all((after.dense[key] == grad).all() for key, grad in before.dense.items())
