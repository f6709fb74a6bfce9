"""Checkpoints of a recommender that are damaged, and disks that refuse them."""

import dataclasses
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import CheckpointError
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.folder import prepare
from equipoise.recsys.place import plan_samples
from equipoise.recsys.rank.stored import read_stored
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.recsys.whole import MANIFEST, newest_whole
from equipoise.spec.recommend import RankSaveSpec, RecommendSpec, read_recommend
from support.recsys.clicks import run_part, write_clicks

STEPS = 12
RANK_0, RANK_1, DENSE = "rank-00000.safetensors", "rank-00001.safetensors", "dense.pt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RecommendSpec]:
    """A run of two ranks, with checkpoints of steps 10 and 12, and its folder's specification."""
    folder = tmp_path_factory.mktemp("torn")
    run_toml = write_clicks(folder)
    kinds = [("tables.kinds", '["row"]'), ("train.epochs", "1")]
    spec = read_recommend(run_toml, kinds)[0]
    run_part(run_toml, folder / "run", spec)
    return run_toml, spec


def held(folder: Path) -> dict[str, bytes]:
    """Every file of the last checkpoint."""
    return {f.name: f.read_bytes() for f in (folder / "checkpoint" / f"step-{STEPS:06}").iterdir()}


def _halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path, place: float = 0.7) -> None:
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 1
    file.write_bytes(data)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link(file: Path) -> None:
    shutil.copy(file, file.parents[2] / "elsewhere")
    file.unlink()
    file.symlink_to(file.parents[2] / "elsewhere")


def _older(file: Path) -> None:
    shutil.copy(file.parent.with_name("step-000010") / file.name, file)


def _other_step(file: Path) -> None:
    shutil.rmtree(file.parent)
    shutil.copytree(file.parent.with_name("step-000010"), file.parent)


def _edit(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"number": 3}))


CHANGED = "{file} is damaged: its bytes have changed"
DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    (RANK_0, _flip, CHANGED + " (rows of ad, user, words)."),
    (RANK_1, _flip, CHANGED + " (rows of ad, user, words)."),
    (RANK_1, lambda file: _flip(file, 0.0), CHANGED + "."),
    (RANK_0, _older, CHANGED + " (rows of ad, user, words)."),
    (RANK_0, _halve, "{file} has {half:,} bytes, and recommend.json says {size:,}."),
    (RANK_0, Path.unlink, "{file} cannot be read: no such file or directory."),
    (RANK_0, _pipe, "{file} cannot be read: it is not a regular file."),
    (RANK_1, _link, "{file} cannot be read: it is not a regular file."),
    (DENSE, _flip, CHANGED + "."),
    (
        DENSE,
        lambda file: file.write_bytes(b""),
        "{file} has 0 bytes, and recommend.json says {size:,}.",
    ),
    (MANIFEST, _edit, "{file} cannot be read: its bytes have changed."),
    (MANIFEST, Path.unlink, "{file} cannot be read: no such file or directory."),
    (MANIFEST, _pipe, "{file} cannot be read: it is a pipe, a socket or a device, not a file."),
    (
        MANIFEST,
        lambda file: file.write_text("[]"),
        "{file} cannot be read: it does not say step as a checkpoint does.",
    ),
    (
        MANIFEST,
        lambda file: (file.parent / "rank-00007.safetensors").write_bytes(b"x"),
        "{folder} holds rank-00007.safetensors, which its recommend.json does not list.",
    ),
    (
        MANIFEST,
        _other_step,
        "{folder} holds the checkpoint of step 10 by its recommend.json, whose folder is named "
        "step-000010.",
    ),
]


def test_each_damage_is_named_and_the_checkpoint_before_is_taken(
    run: tuple[Path, RecommendSpec], tmp_path: Path
) -> None:
    for number, (name, damage, said) in enumerate(DAMAGES):
        folder = tmp_path / str(number)
        shutil.copytree(run[0].with_name("run"), folder)
        file = folder / "checkpoint" / f"step-{STEPS:06}" / name
        size = file.stat().st_size
        damage(file)
        sentence = said.format(file=file, folder=file.parent, size=size, half=size // 2)
        assert newest_whole(folder) == (file.parent.with_name("step-000010"), [sentence])
    with pytest.raises(CheckpointError) as caught:
        read_stored_of(folder, *run)
    assert str(caught.value) == (
        f"{sentence} Run the same `equipoise train` again, or remove its folder to read the "
        "checkpoint before."
    )
    _halve(folder / "checkpoint" / "step-000010" / DENSE)
    with pytest.raises(
        CheckpointError, match=r"^None of the 2 checkpoints in .* is whole\. .*step"
    ):
        newest_whole(folder)


def read_stored_of(folder: Path, run_toml: Path, spec: RecommendSpec) -> None:
    prepare(folder, spec, run_toml.parent)
    read_stored(folder)


@settings(max_examples=20)
@given(st.data())
def test_any_changed_byte_is_found(run: tuple[Path, RecommendSpec], data: st.DataObject) -> None:
    newest = run[0].with_name("run") / "checkpoint" / f"step-{STEPS:06}"
    file = data.draw(st.sampled_from(sorted(newest.iterdir())))
    whole = file.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    bits = data.draw(st.integers(1, 255))
    try:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
        taken, damaged = newest_whole(newest.parents[1])
    finally:
        file.write_bytes(whole)
    assert taken == newest.with_name("step-000010") and str(file) in damaged[0]


def test_a_newer_format_is_refused(run: tuple[Path, RecommendSpec], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run[0].with_name("run"), folder)
    manifest = folder / "checkpoint" / f"step-{STEPS:06}" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 3}))
    with pytest.raises(CheckpointError) as caught:
        newest_whole(folder)
    assert str(caught.value) == (
        f"{manifest.parent} has checkpoint format 3; this version of equipoise reads up to 2. "
        "Upgrade equipoise."
    )


class _Narrow(EventSink):
    """Lets no file of rank 1 grow while the checkpoint of step 11 is written."""

    trainer: RankTrainer

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        is_narrow = (name, fields.get("step"), self.rank) == ("save", 11, 1)
        if is_narrow:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        yield
        if is_narrow:
            self.trainer.saver.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def go_on(ranks: Ranks, folder: Path, spec: RecommendSpec, base: Path) -> tuple[list[str], int]:
    """Go on on this rank: what is told, and the step after which it began."""
    samples = read_samples(spec.data, base)
    plan = plan_samples(spec, samples).plan
    sink = _Narrow(ranks.rank)
    trainer = sink.trainer = RankTrainer(folder, spec, samples, plan, sink, TimedExchange())
    told, resumed = [*trainer.damaged], trainer.resume()
    trainer.run(told.append)
    return told, resumed


def test_ranks_pass_over_it_together_and_end_with_the_same_weights(
    run: tuple[Path, RecommendSpec], tmp_path: Path
) -> None:
    """A cut file of rank 0; then rank 1 cannot write its part of step 11."""
    run_toml, spec = run
    folder = tmp_path / "run"
    shutil.copytree(run_toml.with_name("run"), folder)
    cut = folder / "checkpoint" / f"step-{STEPS:06}" / RANK_0
    size = cut.stat().st_size
    _halve(cut)
    (folder / "checkpoint" / ".saving-000007-0").mkdir()  # as a killed save leaves it
    often = dataclasses.replace(spec, checkpoint=RankSaveSpec(every_steps=1))
    (first, resumed), (other, _) = run_ranks(2, go_on, folder, often, run_toml.parent)
    assert held(folder) == held(run_toml.with_name("run"))
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == [
        "step-000010",
        f"step-{STEPS:06}",
    ]
    assert resumed == 10
    assert first[0] == f"{cut} has {size // 2:,} bytes, and recommend.json says {size:,}."
    final = folder / "checkpoint" / "step-000011"
    said = (
        rf"Rank 1 could not write the checkpoint {final} \(File too large; the disk at .* free\)\. "
        r"Free some space there, or make it writable\. Training goes on\."
    )
    epoch, sentence = first[1:]  # ranks hear of it when the next save begins
    assert epoch.startswith("epoch 1: ") and re.fullmatch(said, sentence)
    assert first == other
