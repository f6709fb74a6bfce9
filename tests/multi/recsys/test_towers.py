"""Towers change where bytes travel, and a model only by what their modules are."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from equipoise.comm.local import run_ranks
from equipoise.recsys.embedding import whole_table
from equipoise.recsys.exchange import TimedExchange
from equipoise.schedule.tables.traffic import STAGES, across_hosts, count_traffic
from equipoise.spec.recommend import RecommendSpec, read_recommend
from equipoise.spec.towers import TowerSizes
from support.read_run import EXACT
from support.recsys import towers
from support.recsys.clicks import run_part, write_clicks
from support.recsys.one_step import take_step, take_steps

SHAPES = ((2, 1), (2, 2), (4, 2))
"""Ranks, and ranks of a host."""
WIRES = {"both, int8": "int8", "both, bf16": "bf16"}
"""The module ``both`` under coarse wires, by name."""


def sizes_of(name: str) -> TowerSizes | None:
    return towers.MODULES.get(name.partition(",")[0])


@cache
def outcomes(world: int) -> dict[tuple[int, str], list[towers.Outcome]]:
    """Every module under every map of ranks to hosts, and the same placements without towers."""
    keys = [
        (per_host, name)
        for ranks, per_host in SHAPES
        if ranks == world
        for name in (*towers.MODULES, "flat", *WIRES)
    ]
    cases = [
        (towers.plan(world, per_host, sizes_of(name)), sizes_of(name), WIRES.get(name, "fp32"))
        for per_host, name in keys
    ]
    rows = run_ranks(world, towers.train_on_ranks, cases)
    return {key: list(each) for key, *each in zip(keys, *rows, strict=True)}


@cache
def alone(world: int, name: str) -> towers.Outcome:
    return towers.train_alone(world, towers.MODULES[name])


def whole(parts: list[towers.Outcome]) -> dict[str, np.ndarray]:
    return {
        table.name: whole_table(
            [row for part in parts for row in part.rows.get(table.name, [])], table.rows
        )
        for table in towers.TABLES
    }


@pytest.mark.parametrize(("world", "per_host"), SHAPES)
def test_towers_that_pass_vectors_on_are_the_flat_model_to_the_bit(
    world: int, per_host: int
) -> None:
    flat, same = (outcomes(world)[per_host, name] for name in ("flat", "identity"))
    for one, other in zip(flat, same, strict=True):
        assert [each.tobytes() for each in one.outs] == [each.tobytes() for each in other.outs]
    first, second = whole(flat), whole(same)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@pytest.mark.parametrize(("world", "per_host"), SHAPES)
@pytest.mark.parametrize("name", towers.MODULES)
def test_any_module_equals_one_process(world: int, per_host: int, name: str) -> None:
    parts, one = outcomes(world)[per_host, name], alone(world, name)
    for step in range(towers.STEPS):
        out = np.concatenate([each.outs[step] for each in parts])
        assert np.abs(out - one.outs[step]).max() <= EXACT * np.abs(one.outs[step]).max()
        seen = {}
        for part in parts:
            for key, grad in part.modules[step].items():
                assert np.array_equal(grad, seen.setdefault(key, grad)), "copies of a host differ"
        assert seen.keys() == one.modules[step].keys()
        for key, grad in one.modules[step].items():
            assert np.abs(seen[key] - grad).max() <= EXACT * np.abs(grad).max(), key
    expected = whole([one])
    for table, weight in whole(parts).items():
        assert np.abs(weight - expected[table]).max() < EXACT, table


def formula(world: int, per_host: int, name: str, step: int) -> dict[str, np.ndarray]:
    plan, wire = towers.plan(world, per_host, sizes_of(name)), WIRES.get(name, "fp32")
    batches = [towers.batch(step, rank) for rank in range(world)]
    ids = {}
    for each in plan.placements:
        owner = np.zeros(each.table.rows, dtype=np.int64)
        for shard in range(each.row_map.shards):
            owner[each.row_map.rows_of(shard)] = shard
        values = [batch.bags(each.table.name)[1].numpy() for batch in batches]
        ids[each.table.name] = np.array(
            [np.bincount(owner[own], minlength=each.row_map.shards) for own in values]
        )
    counts = [each.samples for each in batches]
    return count_traffic(plan, counts, ids, {}, forward=wire, backward=wire)


@pytest.mark.parametrize(("world", "per_host"), SHAPES)
def test_bytes_are_the_formula_on_every_link(world: int, per_host: int) -> None:
    for name in (*towers.MODULES, "flat", *WIRES):
        for step in range(towers.STEPS):
            expected = formula(world, per_host, name, step)
            for stage in STAGES:
                parts = outcomes(world)[per_host, name]
                sent = np.stack([part.sent[step][stage] for part in parts])
                assert sent.tolist() == expected[stage].tolist(), (name, step, stage)


@pytest.mark.parametrize(("world", "per_host"), SHAPES)
def test_coarse_wires_stay_near_and_are_not_exact(world: int, per_host: int) -> None:
    exact = np.concatenate([each.outs[0] for each in outcomes(world)[per_host, "both"]])
    for name, most in (("both, int8", 1 / 254), ("both, bf16", 2.0**-8)):
        coarse = np.concatenate([each.outs[0] for each in outcomes(world)[per_host, name]])
        error = np.abs(coarse - exact).max()
        # Rounded in each bucket of rows inside the host, and when it leaves.
        assert 0 < error <= (per_host + 1) * most * 4 * np.abs(exact).max(), name


def test_what_crosses_hosts_falls_by_the_compression() -> None:
    plan = towers.plan(4, 2, None)
    crossed = {}
    for name in (*towers.MODULES, "flat"):
        sent = [
            np.stack([part.sent[step][stage] for part in outcomes(4)[2, name]])
            for step in range(towers.STEPS)
            for stage in ("partial", "pooled", "gradients", "spread", "towers")
        ]
        crossed[name] = sum(across_hosts(plan, each) for each in sent)
    # Shards by column send a flat sample's rank the same floats in parts.
    assert crossed["identity"] == crossed["flat"] > 0
    for name, sizes in towers.MODULES.items():
        assert crossed["flat"] == crossed[name] * sizes.compression(towers.TOWERS), name
    assert [towers.MODULES[n].compression(towers.TOWERS) for n in ("narrow", "both", "cross")] == [
        2.0,
        3.0,
        4.0,
    ]


COLUMNS = ("model.towers", '[["ad", "words"], ["user"]]')
RUNS = {
    "flat": (),
    "identity": (COLUMNS,),
    "linear": (COLUMNS, ("model.tower_module", "linear"), ("model.tower_width", "2")),
    "cross": (COLUMNS, ("model.tower_module", "cross"), ("model.tower_vectors", "1")),
}


def spec_of(run_toml: Path, name: str, dp: int, *more: tuple[str, str]) -> RecommendSpec:
    flags = [("layout.dp", str(dp)), ("layout.ranks_per_host", str(max(1, dp // 2)))]
    flags += [("tables.kinds", '["table"]'), *RUNS[name], *more]
    return read_recommend(run_toml, flags)[0]


def test_runs_on_hosts_have_the_loss_and_gradients_of_one_process(tmp_path: Path) -> None:
    run_toml, sgd = write_clicks(tmp_path), (("tables.optimizer", "sgd"), ("tables.lr", "1.0"))
    specs = [spec_of(run_toml, name, 4, *sgd, ("train.batch", "63")) for name in RUNS]
    ranks = run_ranks(4, take_steps, tmp_path, specs, tmp_path)
    flat, identity = (list(RUNS).index(name) for name in ("flat", "identity"))
    for each in ranks:
        assert each[flat].loss == each[identity].loss
        for weight, grad in each[flat].dense.items():
            assert grad.tobytes() == each[identity].dense[weight].tobytes(), weight
    for at, name in enumerate(RUNS):
        one = spec_of(run_toml, name, 1, *sgd, ("train.batch", "63"))
        alone = take_step(tmp_path, one, tmp_path, TimedExchange(alone=True))
        moved = {name: part for name, *part in alone.tables}
        for each in ranks:
            assert each[at].loss == pytest.approx(alone.loss, rel=EXACT), name
            for weight, grad in alone.dense.items():
                error = np.abs(each[at].dense[weight] - grad).max()
                assert error <= EXACT * np.abs(grad).max(), (name, weight)
            for table, rows, _, change in each[at].tables:
                expected = moved[table][2][rows]
                assert np.abs(change - expected).max() <= EXACT * np.abs(moved[table][2]).max()


def test_a_run_goes_on_under_another_number_of_hosts(tmp_path: Path) -> None:
    run_toml = write_clicks(tmp_path)
    alone = run_part(run_toml, tmp_path / "alone", spec_of(run_toml, "cross", 1))[0]
    run_part(run_toml, tmp_path / "moved", spec_of(run_toml, "cross", 4), 10)
    parts = sorted(each.name for each in (tmp_path / "moved").glob("checkpoint/*10/tower-*"))
    assert parts == ["tower-000.pt", "tower-001.pt"]
    moved = run_part(run_toml, tmp_path / "moved", spec_of(run_toml, "cross", 1))[0]
    assert moved["measured"]["steps"] == len(alone["losses"]) - 10
    assert np.abs(np.subtract(moved["losses"], alone["losses"])).max() < 1e-5


def test_rows_in_files_train_as_those_in_memory(tmp_path: Path) -> None:
    run_toml, losses = write_clicks(tmp_path), []
    for mib in ("0", "0.001"):
        spec = spec_of(run_toml, "cross", 1, ("tables.memory_mib", mib))
        losses.append(run_part(run_toml, tmp_path / mib, spec, 6)[0]["losses"])
    assert losses[0] == losses[1]
