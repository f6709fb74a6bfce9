"""What guards of a step prevent: with each switched off, its fault passes in silence.

That they name it is tested in ``tests/multi/train/test_train.py``.
"""

import numpy as np

from equipoise.comm.local import run_ranks
from support.health import unguarded
from support.make_run import MODEL


def test_plans_that_nobody_compares_are_run(tmp_path, store) -> None:
    assert run_ranks(3, unguarded.plans_unseen, tmp_path, str(store.folder), MODEL) == [None] * 3


def test_a_norm_that_nobody_looks_at_spoils_every_weight(tmp_path, make_run) -> None:
    resolved = make_run(steps=3, lr=1e30, warmup_steps=0, dp=1)
    (ended,) = run_ranks(1, unguarded.numbers_unseen, tmp_path, resolved)
    assert ended.reason == "done"
    assert all(np.isnan(each).any() for each in ended.weights.values())
