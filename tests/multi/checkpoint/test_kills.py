"""Ranks that are killed while they save: the newest checkpoint is whole, and none is lost."""

from pathlib import Path

import pytest

from equipoise.base.errors import FaultError
from equipoise.checkpoint.manifest import newest_good
from equipoise.comm.local import run_ranks
from support.checkpoints import ranks as saving_ranks
from support.make_run import MODEL

STAGES = ("staged", "written", "collected", "published", "dropped")


def check_kill(tmp_path: Path, stage: str, rank: int, nth: int, world: int = 2) -> None:
    root, notes = tmp_path / "checkpoint", tmp_path / "notes"
    notes.mkdir()
    with pytest.raises(FaultError) as caught:
        run_ranks(world, saving_ranks.save_and_die, root, notes, MODEL, stage, rank, nth)
    assert str(caught.value) == (
        f"Rank {rank} of {world} failed.\nThe process was ended by SIGKILL."
    )
    begun = [int(path.name[6:]) for path in notes.glob("begun-*")]
    saved = [int(path.name[6:]) for path in notes.glob("saved-*")]
    _, manifest, torn = newest_good(root)
    assert torn == []
    assert max(saved) <= manifest.step <= max(begun)
    if stage in ("published", "dropped"):
        assert manifest.step == nth
    # The next run saves as if nothing had been, and clears away what was left.
    step, state, _ = run_ranks(1, saving_ranks.load_and_save, root, MODEL)[0]
    assert state == (notes / f"begun-{step}").read_text()
    assert [path.name for path in root.glob(".saving-*")] == []


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_is_killed_at_a_stage(tmp_path: Path, stage: str) -> None:
    check_kill(tmp_path, stage, rank=0, nth=3)


@pytest.mark.parametrize("stage", STAGES[:2])
def test_another_rank_is_killed_at_a_stage(tmp_path: Path, stage: str) -> None:
    check_kill(tmp_path, stage, rank=1, nth=3)


@pytest.mark.parametrize("after_ms", [0, 3, 21])
def test_a_rank_is_killed_at_any_moment(tmp_path: Path, after_ms: int) -> None:
    check_kill(tmp_path, "", rank=after_ms % 2, nth=after_ms)
