"""Checkpoints of another run, with tables of the very same shapes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.base.digest import digest
from equipoise.base.errors import CheckpointError
from equipoise.recsys import request
from equipoise.recsys.lowbit.request import convert_run
from equipoise.recsys.rank.stored import read_stored
from equipoise.recsys.samples import read_samples
from equipoise.recsys.whole import MANIFEST, seal
from equipoise.spec.recommend import read_recommend
from support.recsys.runs import trained_run

NEWEST = Path("checkpoint", "step-000024")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with clicks, a run of them, and one of another seed."""
    folder = tmp_path_factory.mktemp("same")
    (folder / "other").mkdir()
    trained_run(folder)
    trained_run(folder / "other", ("train.seed", "1"))
    return folder


def copy_of(place: Path, to: Path) -> Path:
    shutil.copytree(place, to, dirs_exist_ok=True)
    return to / "run"


def refusals(folder: Path) -> dict[str, str]:
    """What training, a server and a conversion say of a run."""
    spec, base = read_recommend(folder.with_name("run.toml"), [("layout.dp", "1")])
    acts: dict[str, Callable[[], object]] = {
        "train": lambda: request.run(spec, base, out=folder),
        "serve": lambda: read_stored(folder),
        "convert": lambda: convert_run(folder, folder.with_name("small"), 0.1),
    }
    said = {}
    for name, act in acts.items():
        with pytest.raises(CheckpointError) as caught:
            act()
        said[name] = str(caught.value)
    return said


def test_a_checkpoint_of_another_seed_is_told_apart(place: Path, tmp_path: Path) -> None:
    folder = copy_of(place, tmp_path)
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(place / "other" / "run" / "checkpoint", folder / "checkpoint")
    sentence = (
        f"{folder / NEWEST} was saved by another run: its train.seed is 1 (this run: 0). Restore "
        "this run's own checkpoints, or train into another folder."
    )
    assert refusals(folder) == dict.fromkeys(("train", "serve", "convert"), sentence)


def test_data_that_has_changed_is_told_apart(place: Path, tmp_path: Path) -> None:
    """Labels the other way round, and users of other names: every shape stays."""
    folder, clicks = copy_of(place, tmp_path), tmp_path / "clicks.csv"
    spec, files = read_stored(folder).spec, ("columns.json", "spec.json")
    held = [(folder / name).read_bytes() for name in files]
    whole = clicks.read_text()
    was = read_samples(spec.data, tmp_path)
    flipped = [line.rpartition(",") for line in whole.splitlines()]
    clicks.write_text(
        "\n".join(
            f"{left},{last if last == 'click' else 1 - int(last)}" for left, _, last in flipped
        )
    )
    now = read_samples(spec.data, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        request.run(spec, tmp_path, out=folder)
    assert str(caught.value) == (
        f"{folder / NEWEST} was trained on other samples (digest {was.digest()[:8]}; this run's is "
        f"{now.digest()[:8]}). Restore the data of that run, or train into another folder."
    )
    clicks.write_text(whole.replace("\nu", "\nv"))
    now = read_samples(spec.data, tmp_path)
    assert now.digest() == was.digest() and now.rows == was.rows
    before, after = (digest(each.coding.as_facts())[:8] for each in (was, now))
    with pytest.raises(CheckpointError) as caught:
        request.run(spec, tmp_path, out=folder)
    assert str(caught.value) == (
        f"{folder / NEWEST} was trained with other values of the columns (digest {before}; this "
        f"run's data has {after}). Restore the data and the checkpoints of one run, or train into "
        "another folder."
    )
    assert [(folder / name).read_bytes() for name in files] == held
    (folder / "columns.json").write_text(json.dumps(now.coding.as_facts()))
    with pytest.raises(CheckpointError) as caught:
        read_stored(folder)
    assert str(caught.value) == (
        f"{folder / NEWEST} was trained with other values of the columns (digest {before}; "
        f"columns.json has {after}). Restore the data and the checkpoints of one run, or train "
        "into another folder."
    )


def test_a_server_rounds_as_the_checkpoint_was_scored(place: Path, tmp_path: Path) -> None:
    """A run that is trained, asked again with another wire, has not been scored under it."""
    folder = copy_of(place, tmp_path)
    spec_json = folder / "spec.json"
    spec_json.write_text(spec_json.read_text().replace('"wire": "fp32"', '"wire": "bf16"'))
    stored = read_stored(folder)
    assert stored.spec.tables.wire == "bf16"
    assert {each.division.wire for each in stored.scorer.tables} == {"fp32"}


def test_checkpoints_that_do_not_say_whose_they_are_are_taken(place: Path, tmp_path: Path) -> None:
    folder = copy_of(place, tmp_path)
    manifest = folder / NEWEST / MANIFEST
    facts = json.loads(manifest.read_text())
    assert facts["run"]["train.seed"] == 0 and facts["run"]["model.width"] == 4
    for key in ("run", "columns", "samples", "digest", "format"):
        del facts[key]
    manifest.write_text(seal(facts, facts["files"]))
    assert read_stored(folder).step == 24
    # A key that its version did not know had the effect of its default.
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(place / "run" / "checkpoint", folder / "checkpoint")
    facts = json.loads(manifest.read_text())
    for key in ("digest", "format"):
        del facts[key]
    del facts["run"]["tables.cache_policy"]
    manifest.write_text(seal(facts, facts["files"]))
    assert read_stored(folder).step == 24


def test_what_older_checkpoints_do_not_say_is_refused_by_their_shapes(
    place: Path, tmp_path: Path
) -> None:
    folder = copy_of(place, tmp_path)
    manifest, spec_json = folder / NEWEST / MANIFEST, folder / "spec.json"
    facts = json.loads(manifest.read_text())
    for key in ("run", "columns", "samples", "digest", "format"):
        del facts[key]
    manifest.write_text(seal(facts, facts["files"]))
    columns = json.loads((folder / "columns.json").read_text())
    del columns["words"]["ad"]
    (folder / "columns.json").write_text(json.dumps(columns))
    with pytest.raises(CheckpointError) as caught:
        read_stored(folder)
    assert str(caught.value) == (
        f"{folder / 'columns.json'} cannot be read: it is not what a run writes. Run the same "
        "`equipoise train` again, which writes it."
    )
    shutil.copy(place / "run" / "columns.json", folder / "columns.json")
    spec_json.write_text(spec_json.read_text().replace('"dlrm"', '"dcn"'))
    with pytest.raises(CheckpointError) as caught:
        read_stored(folder)
    assert str(caught.value) == (
        f"{folder / NEWEST} holds another model: its crosses.0.down.weight is missing (this run: "
        "(16, 16)). Restore a checkpoint of this run, or choose another folder with --out."
    )


def test_a_run_is_trained_where_its_record_and_its_last_checkpoint_are_whole(
    place: Path, tmp_path: Path
) -> None:
    """What messages advise, the same command again, then does something."""
    folder = copy_of(place, tmp_path)
    record = folder / "recommend.json"
    assert not request.is_trained(folder, 24)
    whole = {"step": 24, "losses": [], "best": None, "spec": {}, "tables": [], "traffic": []}
    record.write_text(json.dumps(whole))
    assert request.is_trained(folder, 24) and not request.is_trained(folder, 25)
    record.write_text('{"step": 24}')
    assert not request.is_trained(folder, 24)
    record.write_text(json.dumps(whole))
    (folder / NEWEST / "dense.pt").write_bytes(b"")
    assert not request.is_trained(folder, 24)
