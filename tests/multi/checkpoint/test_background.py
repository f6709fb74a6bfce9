"""Saves in the background: what is loaded is what was there when the save began."""

from pathlib import Path

import numpy as np
import pytest

from equipoise.checkpoint.manifest import find_checkpoints, newest_good
from equipoise.comm.local import run_ranks
from support.make_run import MODEL
from support.ranks import on_ranks, saving_ranks


def is_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].tobytes() == other[name].tobytes() for name in one
    )


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_steps_that_follow_at_once_are_not_in_the_checkpoint(tmp_path: Path, zero: int) -> None:
    states = run_ranks(2, saving_ranks.save_then_step, tmp_path, MODEL, zero, True)[0]
    for step, state in enumerate(states, 1):
        folder = tmp_path / f"step-{step:06d}"
        assert is_same(run_ranks(1, on_ranks.load_fresh, folder, MODEL, 1)[0], state)


def test_without_its_guard_they_would_be(tmp_path: Path) -> None:
    states = run_ranks(2, saving_ranks.save_then_step, tmp_path, MODEL, 1, False)[0]
    loaded = run_ranks(1, on_ranks.load_fresh, tmp_path / "step-000001", MODEL, 1)[0]
    assert loaded.keys() == states[0].keys()
    assert not is_same(loaded, states[0])


def test_moments_that_were_replaced_are_saved_as_they_are_now(tmp_path: Path) -> None:
    state = run_ranks(2, saving_ranks.save_replaced, tmp_path, MODEL)[0]
    loaded = run_ranks(1, on_ranks.load_fresh, tmp_path / "step-000002", MODEL, 1)[0]
    assert is_same(loaded, state)


def test_a_buffer_is_saved_before_a_forward_changes_it(tmp_path: Path) -> None:
    assert run_ranks(1, saving_ranks.save_counted, tmp_path)[0] == [1, 1, 1]


def test_two_whole_checkpoints_are_there_at_every_stage_of_a_save(tmp_path: Path) -> None:
    seen = run_ranks(2, saving_ranks.count_whole, tmp_path, MODEL, 4)[0]
    stages = [stage for stage, _ in seen]
    assert stages == ["staged", "written", "collected", "published", "dropped"] * 4
    assert [whole for _, whole in seen[:10]] == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert [whole for _, whole in seen[10:]] == [2, 2, 2, 3, 2] * 2


def test_a_checkpoint_that_has_rotted_is_not_one_of_those_that_are_kept(tmp_path: Path) -> None:
    run_ranks(1, saving_ranks.save_steps, tmp_path, MODEL, 2)
    shard = tmp_path / "step-000002" / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    run_ranks(1, on_ranks.save, tmp_path, MODEL, 1, [3])
    assert [path.name[-1] for path in find_checkpoints(tmp_path)] == ["3", "2", "1"]
    run_ranks(1, on_ranks.save, tmp_path, MODEL, 1, [4])
    assert [path.name[-1] for path in find_checkpoints(tmp_path)] == ["4", "3"]


@pytest.mark.parametrize("spoil", ["size", "files"])
def test_a_rank_that_cannot_write_costs_that_save_alone(tmp_path: Path, spoil: str) -> None:
    ends = run_ranks(2, saving_ranks.save_past_a_fault, tmp_path, MODEL, spoil)
    reason = {"size": "[Errno 27] File too large", "files": "[Errno 24] Too many open files"}
    said = {sentence for sentence, _ in ends}
    assert len(said) == 1  # the same on every rank
    assert said.pop().startswith(
        f"The checkpoint of step 2 could not be written to {tmp_path} ({reason[spoil]}"
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000001", "step-000003"]
    assert newest_good(tmp_path)[2] == []
    step, state, torn = run_ranks(2, saving_ranks.load_newest_of, tmp_path, MODEL)[0]
    assert (step, state, torn) == (3, ends[0][1], [])


def test_many_saves_use_no_more_than_a_few(tmp_path: Path) -> None:
    # It takes 10 s: an allocator settles over its first hundred saves.
    # bench/local/checkpoint.py makes 2,000.
    ((before, after),) = run_ranks(1, saving_ranks.save_often, tmp_path, MODEL, 150, 100)
    assert after[:2] == before[:2]  # descriptors, threads
    assert after[2] - before[2] <= 1024  # KiB
