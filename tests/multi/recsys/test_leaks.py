"""What elsewhere leaks from the plan into the model does not here; the peer shows that it does.

torchrec's three: features come out in the plan's order, column shards keep a row-wise state each,
and data-parallel tables ignore the optimizer of the tables.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.comm.local import run_ranks
from equipoise.recsys.optimizer import SparseStep
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from support.recsys import tables

STEP = SparseStep("row-wise-adagrad", lr=0.5)
PEER = Path(__file__).parents[3] / "bench" / "recsys" / "torchrec_leaks.py"


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


@pytest.mark.skipif(
    "TORCHREC_PYTHON" not in os.environ,
    reason="TORCHREC_PYTHON names no environment with torchrec 1.8 and fbgemm-gpu-cpu 1.8",
)
def test_the_peer_leaks_all_three() -> None:
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        port = str(at.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [os.environ["TORCHREC_PYTHON"], str(PEER), str(rank), port],
            stdout=subprocess.PIPE if rank == 0 else sys.stderr,
        )
        for rank in (0, 1)
    ]
    said: dict[str, Any] = json.loads(ranks[0].communicate(timeout=240)[0].splitlines()[-1])
    assert ranks[1].wait(60) == 0
    assert said["alone"]["order"] == ["f0", "f1", "f2"]
    assert said["table"]["order"] == ["f0", "f2", "f1"]
    assert said["table"]["off"] < 1e-4 > said["row"]["off"]
    assert said["column"]["off"] > 0.01
    assert said["alone"]["moved"] > 0.1
    assert said["data"]["moved"] == 0.0
