"""What elsewhere leaks from the plan into the model does not here: ``bench.run recsys.leaks``.

torchrec's three: features come out in the plan's order, column shards keep a row-wise state each,
and data-parallel tables ignore the optimizer of the tables.
"""

import numpy as np
import pytest

from equipoise.comm.local import run_ranks
from equipoise.recsys.optimizer import SparseStep
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from support.recsys import tables

STEP = SparseStep("row-wise-adagrad", lr=0.5)


@pytest.fixture(scope="module")
def ours() -> dict[str, list[tables.Outcome]]:
    whole = [
        TablePlacement(t, "table", (r,)) for t, r in zip(tables.TABLES, (0, 1, 0), strict=True)
    ]
    plans = {
        "table": TablePlan(tuple(whole), 2),
        **{name: tables.plans(2)[name] for name in ("column", "data")},
    }
    rows = run_ranks(2, tables.train_plans, [(plan, STEP, "fp32") for plan in plans.values()])
    return {name: [row[at] for row in rows] for at, name in enumerate(plans)}


@pytest.fixture(scope="module")
def alone() -> tables.Outcome:
    return tables.train_alone(2, STEP)


def test_outputs_stand_in_the_order_of_the_tables(
    ours: dict[str, list[tables.Outcome]], alone: tables.Outcome
) -> None:
    # Rank 0 holds the first and the last table: elsewhere they would come out side by side.
    out = np.concatenate([each.outs[0] for each in ours["table"]])
    assert out.shape[1] == tables.WIDTH
    assert np.array_equal(out, alone.outs[0])


def test_columns_of_a_row_share_its_state(
    ours: dict[str, list[tables.Outcome]], alone: tables.Outcome
) -> None:
    _equal(ours["column"], alone)


def test_data_parallel_tables_obey_the_optimizer(
    ours: dict[str, list[tables.Outcome]], alone: tables.Outcome
) -> None:
    _equal(ours["data"], alone)
    first = tables.train_alone(2, SparseStep("sgd", lr=0.0))
    before, after = (tables.tables_of([each]) for each in (first, alone))
    assert all(np.abs(after[name] - before[name]).max() > 0.1 for name in before)


def _equal(parts: list[tables.Outcome], alone: tables.Outcome) -> None:
    whole = tables.tables_of([alone])
    for name, weight in tables.tables_of(parts).items():
        assert np.abs(weight - whole[name]).max() < 1e-5, name
