"""Manifests: damage is found and named, the newest whole checkpoint is chosen."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import Chunk, StoredTensor, write_index
from equipoise.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    drop_older,
    find_checkpoints,
    newest_good,
    read_manifest,
)
from equipoise.checkpoint.publish import discard_partial
from equipoise.checkpoint.same import require_same
from equipoise.spec.model.presets import ModelSpec, RopeScaling
from support.checkpoints.sealed import describe_files, write_manifest

MODEL = ModelSpec(
    layers=1,
    hidden=32,
    heads=2,
    kv_heads=1,
    ffn=48,
    vocab=300,
    head_width=16,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
)
INDEX = {
    "w": StoredTensor(
        "uint8",
        (160,),
        (
            Chunk((0,), (100,), "shard-00000.bin", 0, 100),
            Chunk((100,), (60,), "shard-00001.bin", 0, 60),
        ),
    )
}
SHARDS = {"shard-00000.bin": bytes(range(100)), "shard-00001.bin": b"x" * 60}
FILES = (*SHARDS, "tensors.json", MANIFEST)


def write_checkpoint(root: Path, step: int, **changes: object) -> Path:
    """A whole checkpoint, of made-up shards."""
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    for name, data in SHARDS.items():
        (folder / name).write_bytes(data)
    write_index(folder, INDEX)
    fields = {
        "format": FORMAT,
        "version": "0.1.0",
        "step": step,
        "position_tokens": 1024 * step,
        "world": 2,
        "model": dataclasses.asdict(MODEL),
        "corpus_digest": "c" * 32,
        "seed": 0,
        "context_tokens": 256,
        "files": describe_files(folder),
    }
    write_manifest(folder, Manifest(**{**fields, **changes}))
    return folder


def fault_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 250)
    found = read_manifest(folder)
    assert list(found.files) == sorted(FILES[:-1])
    assert (found.step, found.position_tokens, found.world) == (250, 256_000, 2)
    assert found.files == describe_files(folder)
    require_same(found, folder, model=MODEL, corpus_digest="c" * 32, seed=0)


def test_a_manifest_holds_the_keys_of_its_run(tmp_path: Path) -> None:
    run = {"pack.context_tokens": 256, "pack.max_tokens": None, "train.lr": 1e-3}
    assert read_manifest(write_checkpoint(tmp_path, 250, run=run)).run == run


def test_a_manifest_of_a_version_that_wrote_no_keys(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 250)
    assert '"run"' not in (folder / MANIFEST).read_text()
    assert read_manifest(folder).run == {}


def test_a_size_that_older_versions_did_not_know_is_its_default(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    found = read_manifest(folder)
    old = {key: value for key, value in found.model.items() if not key.startswith("expert")}
    older = dataclasses.replace(found, model=old)
    require_same(older, folder, model=MODEL, corpus_digest="c" * 32, seed=0)


@given(data=st.data(), name=st.sampled_from(FILES))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_any_byte_changed_dropped_or_added_is_found_and_its_file_named(
    tmp_path: Path, data: st.DataObject, name: str
) -> None:
    shutil.rmtree(tmp_path / "step-000001", ignore_errors=True)
    folder = write_checkpoint(tmp_path, 1)
    whole = (folder / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damage = data.draw(st.sampled_from(("change", "drop", "add", "cut", "remove")))
    if damage == "change":
        other = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[at]))
        damaged = whole[:at] + bytes([other]) + whole[at + 1 :]
    elif damage == "drop":
        damaged = whole[:at] + whole[at + 1 :]
    elif damage == "add":
        damaged = whole[:at] + b"\0" + whole[at:]
    else:
        damaged = whole[:at]
    (folder / name).write_bytes(damaged)
    if damage == "remove":
        (folder / name).unlink()
    message = fault_of(folder)
    assert name in message
    assert re.match(rf"{folder} (is torn: |has checkpoint format )", message)


def test_each_damage_has_its_sentence(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1)
    shard, manifest = folder / "shard-00000.bin", folder / MANIFEST
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert fault_of(folder) == (
        f"{folder} is torn: shard-00000.bin has 99 bytes, the manifest says 100; it lacks w."
    )
    shard.unlink()
    assert fault_of(folder) == (
        f"{folder} is torn: shard-00000.bin has 0 bytes, the manifest says 100; it lacks w."
    )
    shard.write_bytes(b"\1" + whole[1:])
    assert fault_of(folder) == f"{folder} is torn: the bytes of shard-00000.bin have changed."
    shard.write_bytes(whole)
    text = manifest.read_text()
    manifest.write_text(text.replace('"position_tokens": 1024', '"position_tokens": 1025'))
    assert fault_of(folder) == f"{folder} is torn: the bytes of manifest.json have changed."
    manifest.write_text("[]")
    assert fault_of(folder) == f"{folder} is torn: its manifest.json cannot be read."
    manifest.unlink()
    assert fault_of(folder) == f"{folder} is torn: its manifest.json cannot be read."


def test_a_folder_of_another_name_is_left_out_and_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 18)
    folder = write_checkpoint(tmp_path, 19)
    for name in ("step-000999", "step-19", "step-0000019", "step-020"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "step-000777").symlink_to(folder)
    path, manifest, torn = newest_good(tmp_path)
    assert (path.name, manifest.step) == ("step-000019", 19)
    assert torn == [
        f"{tmp_path}/{name} holds the checkpoint of step 19 by its manifest.json, whose folder is "
        "named step-000019. Rename it, or delete it if it is a copy."
        for name in ("step-000999", "step-000777", "step-020", "step-19")
    ]
    assert fault_of(tmp_path / "step-0000019").startswith(f"{tmp_path}/step-0000019 holds the ")


def test_a_renamed_folder_alone_is_refused_and_not_a_fresh_start(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 19).rename(tmp_path / "step-19")
    with pytest.raises(CheckpointError) as caught:
        newest_good(tmp_path)
    assert str(caught.value) == (
        f"The only checkpoint in {tmp_path} is not whole. {tmp_path}/step-19 holds the "
        "checkpoint of step 19 by its manifest.json, whose folder is named step-000019. Rename it, "
        f"or delete it if it is a copy. Restore a copy, or delete {tmp_path} to start from the "
        "first step."
    )


def test_names_that_say_no_step_are_free_and_a_folder_may_be_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = write_checkpoint(tmp_path, 19).rename(tmp_path / "best")
    assert read_manifest(kept).step == 19
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "step-000019").symlink_to(kept)
    assert newest_good(tmp_path / "checkpoint")[1].step == 19
    other = write_checkpoint(tmp_path / "there", 3)
    monkeypatch.chdir(other)
    assert read_manifest(Path()).step == 3
    monkeypatch.chdir(Path(shutil.copytree(other, tmp_path / "step-000004")))
    assert fault_of(Path()).startswith(". holds the checkpoint of step 3 by its manifest.json")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (".hidden", lambda path: path.write_bytes(b"")),
        ("notes.txt", lambda path: path.write_bytes(b"x")),
        ("shard-00002.bin", lambda path: path.write_bytes(b"x")),
        ("sub", lambda path: path.mkdir()),
        ("link", lambda path: path.symlink_to("shard-00000.bin")),
        ("gone", lambda path: path.symlink_to("nowhere")),
        ("pipe", os.mkfifo),
    ],
)
def test_what_the_manifest_does_not_list_is_refused(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    folder = write_checkpoint(tmp_path, 1)
    make(folder / name)
    assert fault_of(folder) == (
        f"{folder} is torn: it holds {name}, which its manifest.json does not list. Delete it, or "
        "restore a copy of the checkpoint."
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_a_link_is_refused_also_to_the_same_bytes(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, 1)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert fault_of(folder) == (
        f"{folder} is torn: {name} is not a regular file. Restore a copy of it."
    )


def test_a_second_name_of_a_file_on_the_disk_is_a_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1)
    shutil.copytree(folder, tmp_path / "copy" / folder.name, copy_function=os.link)
    assert read_manifest(tmp_path / "copy" / folder.name).step == 1


def test_old_checkpoints_are_dropped_and_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 9):
        write_checkpoint(tmp_path, step)
    away = write_checkpoint(tmp_path / "away", 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000003-copy")
    shutil.rmtree(tmp_path / "step-000003")
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000003")
    shutil.rmtree(tmp_path / "step-000001")
    (tmp_path / "step-000001").symlink_to(away)
    drop_older(tmp_path, 4, keep=2, verified=set())
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == [f"step-00000{each}" for each in ("2", "3", "3-copy", "4", "9")]
    assert read_manifest(away).step == 1


def test_a_file_with_the_name_of_a_save_is_removed_too(tmp_path: Path) -> None:
    (tmp_path / ".saving-000004").write_text("it was in the place of a checkpoint")
    root = os.open(tmp_path, os.O_RDONLY)
    discard_partial(root)
    os.close(root)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "none") is None
    (tmp_path / ".saving-000004").mkdir()
    (tmp_path / "step-old").mkdir()
    assert newest_good(tmp_path) is None


def test_a_torn_newest_is_passed_over_with_a_sentence(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step-000003" / "shard-00001.bin").write_bytes(b"")
    path, manifest, torn = newest_good(tmp_path)
    assert (path.name, manifest.step) == ("step-000002", 2)
    assert torn == [
        f"{tmp_path}/step-000003 is torn: shard-00001.bin has 0 bytes, the manifest says 60; it "
        "lacks w."
    ]


def test_all_torn_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    for step in (1, 2):
        (write_checkpoint(tmp_path, step) / MANIFEST).unlink()
    with pytest.raises(CheckpointError) as caught:
        newest_good(tmp_path)
    assert str(caught.value) == (
        f"None of the 2 checkpoints in {tmp_path} is whole. {tmp_path}/step-000002 is torn: its "
        f"manifest.json cannot be read. Restore a copy, or delete {tmp_path} to start from the "
        "first step."
    )


def test_a_newer_format_is_told_and_not_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    write_checkpoint(tmp_path, 2, format=FORMAT + 1, version="9.0.0")
    with pytest.raises(CheckpointError) as caught:
        newest_good(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/step-000002 has checkpoint format {FORMAT + 1}, written by equipoise 9.0.0; "
        f"this version reads up to {FORMAT}. Upgrade equipoise."
    )


def test_the_newest_is_by_number_also_past_six_digits(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 50):
        write_checkpoint(tmp_path, step)
    assert [path.name for path in find_checkpoints(tmp_path)] == [
        "step-1000000",
        "step-999999",
        "step-000050",
    ]


def test_another_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 7)
    other = dataclasses.replace(MODEL, layers=2, tied=True, rope_scaling=None)
    with pytest.raises(CheckpointError) as caught:
        require_same(read_manifest(folder), folder, model=other, corpus_digest="c" * 32, seed=0)
    assert str(caught.value) == (
        f"{folder} holds another model: layers 1 (this run: 2), tied False (this run: True), "
        "rope_scaling {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, "
        "'original_tokens': 8192} (this run: None). Give run.toml the sizes of the checkpoint, "
        "or train into another folder with --out."
    )


def test_another_corpus(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 7)
    with pytest.raises(CheckpointError) as caught:
        require_same(read_manifest(folder), folder, model=MODEL, corpus_digest="d" * 32, seed=0)
    assert str(caught.value) == (
        f"{folder} was trained on another corpus or tokenizer (digest cccccccc; this run's is "
        "dddddddd). Restore the [data] of that run, or train into another folder with --out."
    )


def test_another_order_of_documents(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 7, seed=3)
    with pytest.raises(CheckpointError) as caught:
        require_same(read_manifest(folder), folder, model=MODEL, corpus_digest="c" * 32, seed=4)
    assert str(caught.value) == (
        f"{folder} has read the corpus in the order of train.seed = 3, but this run's is 4: "
        "documents would come twice or never. Set train.seed = 3, or train into another folder "
        "with --out."
    )


def test_a_manifest_is_json_that_anyone_can_read(tmp_path: Path) -> None:
    text = (write_checkpoint(tmp_path, 7) / MANIFEST).read_text()
    assert json.loads(text)["model"]["layers"] == 1


@pytest.mark.parametrize("key", ["step", "world", "seed", "context_tokens", "run", "model"])
def test_a_sealed_manifest_with_values_of_other_kinds_is_torn(key: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    manifest = dataclasses.replace(read_manifest(folder), **{key: "x"})
    write_manifest(folder, manifest)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    assert str(caught.value) == f"{folder} is torn: its {MANIFEST} cannot be read."
