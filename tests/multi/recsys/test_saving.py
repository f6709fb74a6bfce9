"""Recommenders that save while they train, and die meanwhile: what is saved is whole and right."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.errors import FaultError
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.observe.event import Kind
from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.recsys.whole import newest_whole, step_of
from equipoise.spec.recommend import RecommendSpec, read_recommend
from support.recsys.clicks import write_clicks

STEPS = 12
FLAGS = {
    "few bits": [("tables.precision", "int4"), ("tables.cache", "0.3")],
    "towers": [("model.towers", '[["user", "ad"], ["words"]]'), ("model.tower_module", "cross")],
    "files": [("tables.memory_mib", "0.002")],
}


class Steps(EventSink):
    """Which steps have been trained, and what saves took."""

    def __init__(self) -> None:
        self.trained = threading.Semaphore(0)
        self.saved: list[dict[str, Any]] = []

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        del kind, t
        if name == "recommend":
            self.trained.release()
        if name == "saved":
            self.saved.append(fields)


def trainer_of(ranks: Ranks, folder: Path, spec: RecommendSpec, sink: EventSink) -> RankTrainer:
    samples = read_samples(spec.data, folder.parent)
    plan = plan_samples(spec, samples).plan
    exchange = TimedExchange(alone=ranks.world == 1)
    trainer = RankTrainer(folder, spec, samples, plan, sink, exchange)
    trainer.resume()
    return trainer


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(checkpoint.iterdir())}


def save_late(ranks: Ranks, folder: Path, specs: dict[str, RecommendSpec]) -> list[dict[str, Any]]:
    """Each run to step 8, whose save of step 5 does not write before step 7 has ended; and a run
    that ends at step 5: the files of both checkpoints, and what the first one's save took."""
    both = []
    for name, spec in specs.items():
        sides = {}
        for is_late in (True, False):
            own, sink = folder / f"{name}-{is_late}", Steps()
            trainer = trainer_of(ranks, own, spec, sink)

            def wait(stage: str, sink: Steps = sink) -> None:
                for _ in range(7 if stage == "copied" else 0):
                    assert sink.trained.acquire(timeout=60)

            if is_late:
                trainer.saver.reached = wait
            trainer.run(lambda _: None, stop_at=8 if is_late else 5)
            ranks.barrier()
            sides[is_late] = files_of(own / "checkpoint" / "step-000005")
            if is_late:
                sides["took"] = sink.saved
        both.append(sides)
    return both


def test_a_checkpoint_holds_what_was_there_when_its_save_began(tmp_path: Path) -> None:
    run_toml = write_clicks(tmp_path)
    specs = {name: read_recommend(run_toml, flags)[0] for name, flags in FLAGS.items()}
    for rank, rows in enumerate(run_ranks(2, save_late, tmp_path, specs)):
        for name, sides in zip(specs, rows, strict=True):
            assert sides[True] == sides[False], name
            (took,) = sides["took"]
            assert took["step"] == 5
            own = [f"rank-{rank:05d}.safetensors", *(["dense.pt"] if rank == 0 else [])]
            sizes = {file: len(data) for file, data in sides[True].items()}
            towers = sum(size for file, size in sizes.items() if file.startswith("tower"))
            assert took["size_bytes"] == sum(sizes[file] for file in own) + (
                towers if rank == 0 else 0
            )
            # It waited for two steps of training in its thread, and training did not wait for it.
            assert took["written_s"] > took["staged_s"] > 0


def die_at(stage: str, save: int) -> Callable[[str], None]:
    """Kill this process at a stage of its n-th save, however many steps are trained meanwhile."""
    seen: list[str] = []

    def reach(reached: str) -> None:
        seen.append(reached)
        if reached == stage and seen.count(stage) == save:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def save_and_die(ranks: Ranks, folder: Path, spec: RecommendSpec, stage: str, rank: int) -> None:
    """Save every third step; die in the second save."""
    trainer = trainer_of(ranks, folder, spec, EventSink())
    if ranks.rank == rank:
        trainer.saver.reached = die_at(stage, 2)
    trainer.run(lambda _: None)


def go_on(ranks: Ranks, folder: Path, spec: RecommendSpec) -> int:
    trainer = trainer_of(ranks, folder, spec, EventSink())
    resumed = trainer.step
    trainer.run(lambda _: None)
    return resumed


def test_a_rank_that_is_killed_in_a_save_costs_that_save_at_most(tmp_path: Path) -> None:
    flags = [("checkpoint.every_steps", "3"), ("train.epochs", "1")]
    spec = read_recommend(write_clicks(tmp_path), flags)[0]
    straight, last = tmp_path / "straight", Path("checkpoint") / f"step-{STEPS:06}"
    run_ranks(2, go_on, straight, spec)
    for stage, rank, left in (("copied", 1, 3), ("written", 0, 3), ("published", 0, 6)):
        folder = tmp_path / stage
        with pytest.raises(FaultError, match=rf"^Rank {rank} of 2 failed\.\n.*SIGKILL"):
            run_ranks(2, save_and_die, folder, spec, stage, rank)
        newest, damaged = newest_whole(folder)
        assert damaged == [] and newest is not None and step_of(newest) == left
        assert run_ranks(2, go_on, folder, spec) == [left, left]
        assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == [
            "step-000009",
            last.name,
        ]
        assert files_of(folder / last) == files_of(straight / last)
