"""Runs with float8 products: what they learn, other layouts, and going on."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from support.make_run import MakeRun
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended
from support.read_run import assert_close, events

STEPS = 16


def run(folder: Path, resolved) -> Ended:
    return run_ranks(resolved.ranks, on_ranks.train, folder, resolved, {})[0]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, store) -> dict[str, np.ndarray]:
    """Losses of the same steps in each precision, beside fp32 in another layout."""
    make, root = MakeRun(store), tmp_path_factory.mktemp("learned")
    same = {"steps": STEPS, "lr": 3e-3}
    one = {each: make(dp=1, precision=each, **same) for each in ("fp32", "bf16", "fp8")}
    two = {
        "fp8 on two": make(dp=2, zero=3, precision="fp8", **same),
        "fp8 shared": make(dp=1, cp=2, precision="fp8", **same),
    }
    ended = [run_ranks(n, on_ranks.train_each, root, runs)[0] for n, runs in ((1, one), (2, two))]
    return {name: np.array(each.losses) for runs in ended for name, each in runs.items()}


def test_losses_stay_within_the_noise_of_narrow_numbers(learned: dict[str, np.ndarray]) -> None:
    gaps = {name: np.abs(losses / learned["fp32"] - 1) for name, losses in learned.items()}
    assert learned["fp32"][-1] < 0.7 * learned["fp32"][0]  # there was something to learn
    assert gaps["fp8"].max() < 0.01
    assert gaps["fp8"].mean() < 5 * gaps["bf16"].mean()
    assert gaps["fp8"][0] > 10 * gaps["bf16"][0]  # products were rounded


@pytest.mark.parametrize("layout", ["fp8 on two", "fp8 shared"])
def test_other_layouts_learn_the_same(learned: dict[str, np.ndarray], layout: str) -> None:
    gap = np.abs(learned[layout] / learned["fp8"] - 1)
    assert gap[0] < 1e-6
    assert gap.max() < 0.01


def test_a_run_that_goes_on_ends_where_a_whole_run_does(tmp_path: Path, make_run: MakeRun) -> None:
    whole = run(tmp_path / "whole", make_run(steps=4, precision="fp8"))
    run(tmp_path / "resumed", make_run(steps=2, precision="fp8"))
    resumed = run(tmp_path / "resumed", make_run(steps=4, precision="fp8"))
    assert resumed.losses == whole.losses[2:]
    assert_close(dataclasses.replace(resumed, losses=whole.losses), whole)
    assert whole.dtypes == {"torch.float32"}
    (memory, *_) = events(tmp_path / "whole", "memory")
    assert 0.5 < memory["forecast_bytes"] / memory["measured_bytes"] < 4
    (start, *_) = events(tmp_path / "whole", "start")
    assert start["spec"]["train"]["precision"] == "fp8"


def test_another_precision_is_reported(tmp_path: Path, make_run: MakeRun) -> None:
    run(tmp_path, make_run(steps=2, precision="fp8"))
    again = run(tmp_path, make_run(steps=3, precision="bf16"))
    assert 'train.precision = "fp8" before and "bf16" now' in " ".join(again.said)


def test_layouts_without_proof_are_refused_on_the_ranks_too(tmp_path: Path, make_run) -> None:
    with pytest.raises(LayoutError) as caught:
        run(tmp_path, make_run(dp=1, tp=2, precision="fp8"))
    assert str(caught.value) == "float8 products are not proven with tp = 2. Use bf16."
