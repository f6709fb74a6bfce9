"""Every plan of embedding tables is one model: weights equal one process's, bytes the formula's."""

from functools import cache

import numpy as np
import pytest

from equipoise.comm.local import run_ranks
from equipoise.recsys.optimizer import SparseStep
from equipoise.schedule.tables.traffic import STAGES, count_traffic
from equipoise.spec.tables.table import SPARSE_OPTIMIZERS
from support.recsys import tables

STEP_OF = {name: SparseStep(name, lr=0.1, eps=1e-6) for name in SPARSE_OPTIMIZERS}


@cache
def outcomes(world: int) -> dict[tuple[str, str, str], list[tables.Outcome]]:
    """Every case on one set of ranks; "again" repeats one."""
    plans = tables.plans(world)
    keys = [(plan, optimizer, "fp32") for plan in plans for optimizer in SPARSE_OPTIMIZERS]
    keys += [("mixed", optimizer, "again") for optimizer in SPARSE_OPTIMIZERS]
    keys += [(plan, "sgd", wire) for plan in ("row", "mixed") for wire in ("bf16", "fp16", "int8")]
    cases = [
        (plans[plan], STEP_OF[optimizer], "fp32" if wire == "again" else wire)
        for plan, optimizer, wire in keys
    ]
    rows = run_ranks(world, tables.train_plans, cases)
    return {key: list(each) for key, *each in zip(keys, *rows, strict=True)}


@cache
def alone(world: int, optimizer: str) -> tables.Outcome:
    return tables.train_alone(world, STEP_OF[optimizer])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("optimizer", SPARSE_OPTIMIZERS)
def test_every_plan_equals_one_process(world: int, optimizer: str) -> None:
    whole = tables.tables_of([alone(world, optimizer)])
    for plan in tables.plans(world):
        parts = outcomes(world)[plan, optimizer, "fp32"]
        for name, weight in tables.tables_of(parts).items():
            error = np.abs(weight - whole[name]).max()
            assert error < 1e-5, (plan, name, error)
        for step in range(tables.STEPS):
            out = np.concatenate([each.outs[step] for each in parts])
            assert np.abs(out - alone(world, optimizer).outs[step]).max() < 1e-5, (plan, step)


@pytest.mark.parametrize("world", [2, 4])
def test_two_runs_are_equal_to_the_bit(world: int) -> None:
    for optimizer in SPARSE_OPTIMIZERS:
        first, again = (
            tables.tables_of(outcomes(world)["mixed", optimizer, wire])
            for wire in ("fp32", "again")
        )
        assert all(first[name].tobytes() == again[name].tobytes() for name in first)


@pytest.mark.parametrize("world", [2, 4])
def test_copies_of_data_parallel_tables_stay_equal(world: int) -> None:
    for optimizer in SPARSE_OPTIMIZERS:
        parts = outcomes(world)["data", optimizer, "fp32"]
        for table in tables.TABLES:
            copies = {each.shards[table.name][0][2].tobytes() for each in parts}
            assert len(copies) == 1


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_the_formula_on_every_link(world: int) -> None:
    plans, seen = tables.plans(world), set()
    for (name, optimizer, wire), parts in outcomes(world).items():
        plan = plans[name]
        for step in range(tables.STEPS):
            batches = [tables.batch(step, rank) for rank in range(world)]
            ids, touched = {}, {}
            for each in plan.placements:
                table = each.table.name
                values = [batch.bags(table)[1].numpy() for batch in batches]
                row_map = each.row_map
                owner = np.zeros(each.table.rows, dtype=np.int64)
                for shard in range(row_map.shards):
                    owner[row_map.rows_of(shard)] = shard
                ids[table] = np.array(
                    [np.bincount(owner[own], minlength=row_map.shards) for own in values]
                )
                distinct = [np.unique(own) for own in values]
                touched[table] = (
                    np.array([len(own) for own in distinct])
                    if each.kind == "data"
                    else np.array([len(np.unique(np.concatenate(values)))])
                )
            codec = "fp32" if wire == "again" else wire
            formula = count_traffic(
                plan,
                [batch.samples for batch in batches],
                ids,
                touched,
                forward=codec,
                backward=codec,
                is_row_wise=optimizer == "row-wise-adagrad",
            )
            for stage in STAGES:
                sent = np.stack([part.sent[step][stage] for part in parts])
                assert sent.tolist() == formula[stage].tolist(), (name, optimizer, wire, stage)
                if sent.any():
                    seen.add(stage)
    assert seen == set(STAGES) - {"towers"}


@pytest.mark.parametrize("world", [2, 4])
def test_no_rank_holds_more_rows_than_its_share(world: int) -> None:
    for plan in ("row", "modulo"):
        for part in outcomes(world)[plan, "sgd", "fp32"]:
            for table in tables.TABLES:
                assert part.resident[table.name] <= -(-table.rows // world)


@pytest.mark.parametrize("world", [2, 4])
def test_coarse_wires_stay_near_and_are_not_exact(world: int) -> None:
    """One step under each format: what arrives differs by that format's rounding alone."""
    exact = np.concatenate([each.outs[0] for each in outcomes(world)["row", "sgd", "fp32"]])
    for wire, most in (("bf16", 2.0**-8), ("fp16", 2.0**-11), ("int8", 1 / 254)):
        parts = outcomes(world)["row", "sgd", wire]
        coarse = np.concatenate([each.outs[0] for each in parts])
        error = np.abs(coarse - exact).max()
        # Each sample's sum has one rounded part for each bucket of rows.
        assert 0 < error <= world * most * 4 * np.abs(exact).max(), wire


@pytest.mark.parametrize("world", [2, 4])
def test_fp16_moves_rows_as_fp32_does(world: int) -> None:
    """Gradients travel times a power of two: inside hosts, across them, and to columns."""
    whole = tables.tables_of([alone(world, "sgd")])
    for plan in ("row", "mixed"):
        for name, weight in tables.tables_of(outcomes(world)[plan, "sgd", "fp16"]).items():
            assert np.abs(weight - whole[name]).max() < 5e-4, (plan, name)
