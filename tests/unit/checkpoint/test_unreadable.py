"""What cannot be looked into, read or loaded is said, and is no fresh start."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint import manifest, publish
from equipoise.checkpoint.manifest import MANIFEST, newest_good, open_manifest, read_manifest
from equipoise.train.saving.trust import set_aside
from support.checkpoints.sealed import write


def file_in_place(root: Path) -> None:
    root.write_bytes(b"")


def link_to_nothing(root: Path) -> None:
    root.symlink_to(root.parent / "unmounted")


def link_to_itself(root: Path) -> None:
    root.symlink_to(root)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (file_in_place, "Not a directory"),
        (link_to_nothing, "No such file or directory"),
        (link_to_itself, "Too many levels of symbolic links"),
    ],
)
@pytest.mark.parametrize("is_second", [False, True])
def test_a_folder_that_cannot_be_looked_into_is_not_a_fresh_start(
    tmp_path: Path, make: Callable[[Path], None], why: str, is_second: bool
) -> None:
    bad = tmp_path / "bad"
    assert newest_good(bad) is None
    make(bad)
    roots = (tmp_path / "none", bad) if is_second else (bad, None)
    with pytest.raises(CheckpointError) as caught:
        newest_good(roots[0], second=roots[1])
    assert str(caught.value) == (
        f"{bad}, a folder of checkpoints, cannot be read ({why}). Make it a folder that can be, or "
        "train into another with --out."
    )


def test_a_checkpoint_that_vanishes_while_it_is_loaded_is_not_a_fresh_start(
    tmp_path: Path,
) -> None:
    """Some of its bytes may be in the weights by then."""
    older, newest = write(tmp_path, 1), write(tmp_path, 2)
    torn = {newest: f"{newest} could not be loaded (No such file or directory: it)."}
    shutil.rmtree(newest)
    path, _, passed_over = newest_good(tmp_path, torn=torn)
    assert (path, passed_over) == (older, [torn[newest]])
    shutil.rmtree(older)
    for second in (None, tmp_path / "second"):
        where = f"{tmp_path} and {second}" if second else f"{tmp_path}"
        with pytest.raises(CheckpointError) as caught:
            newest_good(tmp_path, torn=torn, second=second)
        assert str(caught.value) == (
            f"The only checkpoint in {where} is not whole. {torn[newest]} Restore a copy, or "
            f"delete {where} to start from the first step."
        )


def test_a_file_that_cannot_be_read_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user, or on a disk that fails."""
    older, newest = write(tmp_path, 1), write(tmp_path, 2)
    digest = manifest.digest_file

    def fail(path: Path) -> str:
        if path.parent == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return digest(path)

    monkeypatch.setattr(manifest, "digest_file", fail)
    path, _, passed_over = newest_good(tmp_path)
    assert path == older
    assert passed_over == [f"{newest} is torn: tensors.json cannot be read (Input/output error)."]


def test_a_folder_that_is_taken_away_while_it_is_read_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, 1)
    render = manifest.render_manifest

    def take_away(held: manifest.Manifest) -> str:
        shutil.rmtree(folder)
        return render(held)

    monkeypatch.setattr(manifest, "render_manifest", take_away)
    with pytest.raises(CheckpointError, match=r"is torn: step-000001 cannot be read \(No such fil"):
        open_manifest(folder)


def test_a_mark_of_byte_order_before_a_manifest_is_a_change(tmp_path: Path) -> None:
    file = write(tmp_path, 1) / MANIFEST
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    with pytest.raises(CheckpointError, match=r"its manifest.json cannot be read"):
        read_manifest(file.parent)


def test_what_is_set_aside_stays_so_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    names: list[set[str]] = []
    monkeypatch.setattr(
        "equipoise.base.durable.os.fsync",
        lambda handle: names.append(set(os.listdir(os.readlink(f"/proc/self/fd/{handle}")))),
    )
    aside = {"step-000001", "corrupt-step-000002", "corrupt-step-000003"}
    assert [path.name for path in set_aside(tmp_path, after=1)] == ["step-000003", "step-000002"]
    assert names == [aside]
    assert set_aside(tmp_path, after=1) == []
    publish.sync_above(tmp_path)
    assert names[1] == set(os.listdir(tmp_path.parent))


def test_a_run_that_replaces_its_checkpoints_is_read_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    steps = iter(range(1, 20))

    def read(least: int) -> str:
        write(root, step := next(steps))
        if step < least:
            raise CheckpointError("It is torn.")
        return f"{step}"

    assert manifest.read_steadily(root, lambda: read(3)) == "3"
    with pytest.raises(CheckpointError) as caught:
        manifest.read_steadily(root, lambda: read(20))
    assert str(caught.value) == (
        f"{tmp_path} replaces its checkpoints before they are read. Wait until it is trained, or "
        "let it keep more (checkpoint.keep)."
    )

    def fail() -> None:
        raise CheckpointError("It is torn.")

    with pytest.raises(CheckpointError, match=r"^It is torn\.$"):
        manifest.read_steadily(root, fail)
