"""Pickles that run code, planted wherever a checkpoint has bytes: no verb runs them."""

import dataclasses
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.manifest import (
    MANIFEST,
    Manifest,
)
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import TokenStore
from equipoise.spec.run.resolved import write_resolved
from support.make_run import MakeRun
from support.ranks import on_ranks
from support.sealed import describe_files, write_manifest


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.mark,)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict[str, Path]:
    """A run of two ranks in each format, with documents that wait."""
    make, root = MakeRun(store), tmp_path_factory.mktemp("runs")
    delayed = make(steps=2, policy="delayed", queues=4, max_delay_steps=3)
    for name, train in (("now", on_ranks.train), ("first", on_ranks.train_first)):
        extra = ({},) if train is on_ranks.train else ()
        run_ranks(2, train, root / name, delayed, *extra)
        write_resolved(root / name, dataclasses.replace(delayed, origins={}))
    return {name: root / name for name in ("now", "first")}


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def seal(folder: Path) -> None:
    """Write the manifest that goes with what the folder holds now: digests prove nothing."""
    data = json.loads((folder / MANIFEST).read_text())
    del data["digest"]
    write_manifest(folder, Manifest(**data | {"files": describe_files(folder), "blocks": {}}))


def states(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What ``inspect`` says of a checkpoint, and of the run around it."""
    said = []
    for path in (folder, folder.parent.parent):
        assert main(["inspect", str(path), "--json"]) == 4
        facts = json.loads(capsys.readouterr().out)
        said.append(facts["state"] if path == folder else facts["checkpoints"][0]["state"])
    return said


def check_nothing_runs(
    folder: Path,
    mark: Path,
    capsys: pytest.CaptureFixture[str],
    make_run: MakeRun,
) -> str:
    """Every verb that reads a checkpoint: it says one sentence, and nothing was run."""
    run = folder.parent.parent
    alone, within = states(folder, capsys)
    assert alone == within
    text = ""
    for source in (folder, run):
        assert main(["convert", str(source), str(run / "hf")]) == 4
        text = capsys.readouterr().err.splitlines()[-1]
        assert text.endswith(".")
        assert "Traceback" not in text
        assert not (run / "hf").exists()
    resolved = make_run(steps=3, policy="delayed", queues=4, max_delay_steps=3)
    with pytest.raises(CheckpointError) as caught:
        run_ranks(2, on_ranks.train, run, resolved, {})
    assert "\n" not in str(caught.value)
    assert main(["report", str(run)]) == 0
    capsys.readouterr()
    assert not mark.exists()
    return text


def files_of(runs: dict[str, Path], name: str) -> list[str]:
    folder = runs[name] / "checkpoint" / "step-000002"
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    "name",
    ["manifest.json", "packer.json", "shard-00000.bin", "shard-00001.bin", "tensors.json"],
)
def test_a_pickle_in_the_place_of_any_file(
    runs, tmp_path, mark, capsys, make_run, name: str, protocol: int
) -> None:
    # Of the shards, whose bytes may be anything, and of what waits, training alone reads on.
    assert name in files_of(runs, "now")
    run = Path(shutil.copytree(runs["now"], tmp_path / "run"))
    folder = run / "checkpoint" / "step-000002"
    data = pickle.dumps(Planted(mark), protocol)
    (folder / name).write_bytes(data)
    pickle.loads(data)
    mark.rmdir()  # it would have run
    if name != MANIFEST:
        seal(folder)
    if name == "packer.json":
        resolved = make_run(steps=3, policy="delayed", queues=4, max_delay_steps=3)
        with pytest.raises(CheckpointError) as caught:
            run_ranks(2, on_ranks.train, run, resolved, {})
        assert str(caught.value) == f"{folder} is torn: its packer.json cannot be read."
        assert not mark.exists()
    else:
        check_nothing_runs(folder, mark, capsys, make_run)


def in_metadata(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(mark)))


def within_metadata(folder: Path, mark: Path) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = {"model.embed.weight": Planted(mark)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def after_metadata(folder: Path, mark: Path) -> None:
    """One that rank-local metadata falls back to, in torch."""
    (folder / ".metadata").write_bytes(b"")
    for rank in range(2):
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(Planted(mark)))


def as_settings(folder: Path, mark: Path) -> None:
    """A weight that is said to be no tensor: torch would unpickle it with nothing held back."""
    metadata = FileSystemReader(folder).read_metadata()
    name = "model.embed.weight"
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    place = next(each for key, each in metadata.storage_data.items() if key.fqn == name)
    stream = io.BytesIO()
    torch.save(Planted(mark), stream)
    file = folder / place.relative_path
    place.offset, place.length = file.stat().st_size, len(stream.getvalue())
    file.write_bytes(file.read_bytes() + stream.getvalue())
    metadata.storage_data[MetadataIndex(name)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_tensor(folder: Path, mark: Path) -> None:
    """In the archive of a weight, under the offsets that the metadata has."""
    metadata = FileSystemReader(folder).read_metadata()
    name = "model.embed.weight"
    place = next(each for key, each in metadata.storage_data.items() if key.fqn == name)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Planted(mark)))
        archive.writestr("archive/data/0", bytes(20480))
        archive.writestr("archive/version", "3")
    (folder / place.relative_path).write_bytes(stream.getvalue())
    for other in metadata.storage_data.values():
        if other.relative_path == place.relative_path:
            other.offset, other.length = 0, len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (in_metadata, "its .metadata is unsafe (it asks for posix.mkdir)."),
        (within_metadata, "its .metadata is unsafe (it asks for posix.mkdir)."),
        (after_metadata, "its .metadata cannot be read."),
        (
            as_settings,
            "its model has embed.weight of shape [320, 32], and the checkpoint does not have it.",
        ),
        (
            in_tensor,
            "model.embed.weight in it: a tensor of it is unsafe (it asks for posix.mkdir).",
        ),
    ],
)
def test_a_pickle_in_a_checkpoint_of_the_first_format(
    runs,
    tmp_path,
    mark,
    capsys,
    make_run,
    plant: Callable[[Path, Path], None],
    text: str,
) -> None:
    run = Path(shutil.copytree(runs["first"], tmp_path / "run"))
    folder = run / "checkpoint" / "step-000002"
    plant(folder, mark)
    seal(folder)
    said = check_nothing_runs(folder, mark, capsys, make_run)
    assert f"{folder} is torn: {text}" in said


@pytest.mark.parametrize("name", ["now", "first"])
def test_a_pickle_beside_the_files_is_refused(
    runs, tmp_path, mark, capsys, make_run, name: str
) -> None:
    run = Path(shutil.copytree(runs[name], tmp_path / "run"))
    folder = run / "checkpoint" / "step-000002"
    (folder / "__0.metadata").write_bytes(pickle.dumps(Planted(mark)))
    text = check_nothing_runs(folder, mark, capsys, make_run)
    assert "holds __0.metadata, which its manifest.json does not list." in text
