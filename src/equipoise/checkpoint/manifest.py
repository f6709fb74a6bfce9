"""The manifest of a checkpoint: its description, and digests of all its bytes.

What it decides
    A checkpoint is the folder ``step-000250`` with a ``manifest.json`` that names every other
    file with its size and digest, and ends with a digest of itself. It is written under
    another name and renamed when whole, so a folder of that name without a sound manifest is
    torn and is never loaded.

    The folder's name follows from its manifest's step, and the folder holds only the files of the
    manifest: no other file, no folder, no link. Hard links count as files and are verified. The
    folder itself may be a link.

Kept true (tests/unit/checkpoint/test_manifest.py)
    Any byte changed in, dropped from or added to a file of a checkpoint is detected, and the file
    named; so is a folder with another name, and a file that the manifest does not list.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from equipoise.base.digest import digest, digest_file
from equipoise.base.errors import CheckpointError
from equipoise.base.read import parse_json, read_bytes
from equipoise.checkpoint.blocks import (
    BlockReader,
    DamagedBlockError,
    SummedFile,
    digest_sums,
)
from equipoise.checkpoint.blocks import blocks as blocks_of
from equipoise.checkpoint.index import Index, name_tensors, parse_index, read_index
from equipoise.checkpoint.index_first import read_first_index

_Read = TypeVar("_Read")

_TRIES = 5
"""Checkpoints that are opened before a run that replaces them faster is given up."""

FORMAT, FIRST_FORMAT = 3, 1
OWN_ENGINE = "equipoise"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's description of itself."""

    format: int
    version: str
    step: int
    position_tokens: int
    world: int
    model: dict[str, Any]
    corpus_digest: str
    seed: int
    context_tokens: int
    files: dict[str, tuple[int, str]]
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of run.toml that decide a step's contents and its training (``spec.run.resume``)."""
    engine: str = OWN_ENGINE
    """Whose modules named the weights: ``model.engine``."""
    blocks: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Sums of the blocks of each shard; before format 3 there are none."""

    def summed(self, name: str) -> SummedFile | None:
        """A file with the sums of its blocks, if it has any."""
        sums = self.blocks.get(name)
        return None if sums is None else SummedFile(self.files[name][0], sums)


def render_manifest(manifest: Manifest) -> str:
    """The canonical text of a manifest; any other text counts as damaged."""
    data = dataclasses.asdict(manifest)
    if not manifest.run:  # written by a version that did not have it
        del data["run"]
    if manifest.engine == OWN_ENGINE:  # likewise
        del data["engine"]
    if not manifest.blocks:  # likewise
        del data["blocks"]
    return json.dumps(data | {"digest": digest(data)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and verify every file against it.

    Raises:
        CheckpointError: it has a newer format (which is always reported), or is torn.
    """
    manifest = open_manifest(folder)
    index = parse_index(folder) if manifest.blocks else {}
    for name in manifest.blocks:
        _verify_blocks(folder, manifest, index, name)
    return manifest


def open_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and verify every file but the blocks of its shards.

    Those are verified as they are read (``checkpoint.parts``). Shards of formats that have no
    blocks are verified here.

    Raises:
        CheckpointError: as ``read_manifest``.
    """
    try:
        return _open(folder)
    except OSError as error:  # the disk's, or somebody takes the folder away meanwhile
        name = Path(os.fsdecode(error.filename)).name if error.filename else folder.name
        raise CheckpointError(
            f"{folder} is torn: {name} cannot be read ({error.strerror})."
        ) from error


def _open(folder: Path) -> Manifest:
    try:
        text = read_bytes(folder / MANIFEST).decode()
        data = parse_json(text)
        if data["format"] > FORMAT:
            raise NewerCheckpointError(
                f"{folder} has checkpoint format {data['format']}, written by equipoise "
                f"{data['version']}; this version reads up to {FORMAT}. Upgrade equipoise."
            )
        files = {name: (int(size), str(name_)) for name, (size, name_) in data["files"].items()}
        blocks = {name: tuple(map(str, sums)) for name, sums in data.get("blocks", {}).items()}
        if not blocks.keys() <= files.keys():
            raise KeyError(MANIFEST)
        fields = {
            f.name: data[f.name]
            for f in dataclasses.fields(Manifest)
            if f.name not in _LATER or f.name in data
        }
        manifest = Manifest(**{**fields, "files": files, "blocks": blocks})
        TypeAdapter(Manifest).validate_json(text, strict=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is torn: its {MANIFEST} cannot be read.") from error
    if text != render_manifest(manifest):
        raise CheckpointError(f"{folder} is torn: the bytes of {MANIFEST} have changed.")
    _require_name(folder, manifest.step)
    _require_listed(folder, manifest)
    for name, (size, expected) in manifest.files.items():
        file = folder / name
        held = file.stat().st_size if file.is_file() else 0
        if held != size:
            raise CheckpointError(
                f"{folder} is torn: {name} has {held:,} bytes, the manifest says {size:,}"
                f"{_lost(folder, name, held)}."
            )
        summed = manifest.summed(name)
        actual = digest_file(file) if summed is None else digest_sums(summed.sums)
        if actual != expected or (summed and len(summed.sums) != len(list(blocks_of(size)))):
            raise CheckpointError(f"{folder} is torn: the bytes of {name} have changed.")
    (read_first_index if manifest.format == FIRST_FORMAT else read_index)(folder)
    return manifest


_LATER = ("run", "engine", "blocks")
"""Fields that the first versions did not write."""


def _verify_blocks(folder: Path, manifest: Manifest, index: Index, name: str) -> None:
    """Verify the blocks of a shard.

    Raises:
        CheckpointError: names the bytes that have changed, and the tensors in them.
    """
    summed = manifest.summed(name)
    if summed is None:
        return
    try:
        with BlockReader(folder / name, summed) as reader:
            reader.verify()
    except DamagedBlockError as error:
        raise damaged(folder, index, error) from error
    except OSError as error:
        raise CheckpointError(
            f"{folder} is torn: {name} cannot be read ({error.strerror})."
        ) from error


def damaged(folder: Path, index: Index, error: DamagedBlockError) -> CheckpointError:
    """What a damaged block costs, in one sentence."""
    lost = name_tensors(index, error.file, error.start, error.stop)
    return CheckpointError(
        f"{folder} is torn: the bytes of {error.file} have changed between {error.start:,} and "
        f"{error.stop:,}, where it holds {lost}."
    )


def _lost(folder: Path, name: str, held: int) -> str:
    """The tensors that a shard lacks; empty if the index does not say."""
    try:
        index = parse_index(folder)
    except CheckpointError:
        return ""
    lost = name_tensors(index, name, held, None)
    return f"; it lacks {lost}" if lost else ""


def folder_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:06d}"


def shard_name(rank: int) -> str:
    """The file of a checkpoint that a rank writes."""
    return f"shard-{rank:05d}.bin"


def _require_name(folder: Path, step: int) -> None:
    """Refuse a folder that says another step than its manifest; other names say none."""
    name = folder.name if folder.name not in ("", "..") else folder.resolve().name
    if name.startswith("step-") and name != folder_name(step):
        raise CheckpointError(
            f"{folder} holds the checkpoint of step {step} by its {MANIFEST}, whose folder is "
            f"named {folder_name(step)}. Rename it, or delete it if it is a copy."
        )


def _require_listed(folder: Path, manifest: Manifest) -> None:
    """Refuse anything in the folder except the files of the manifest."""
    for path in sorted(folder.iterdir()):
        if path.name not in (*manifest.files, MANIFEST):
            raise CheckpointError(
                f"{folder} is torn: it holds {path.name}, which its {MANIFEST} does not list. "
                "Delete it, or restore a copy of the checkpoint."
            )
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(
                f"{folder} is torn: {path.name} is not a regular file. Restore a copy of it."
            )


class NewerCheckpointError(CheckpointError):
    """A whole checkpoint in a format that this version does not know."""


def find_checkpoints(root: Path) -> Iterator[Path]:
    """Folders named like a checkpoint, newest first, sound or not."""
    named = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d{1,18}", path.name)]
    yield from sorted(named, key=lambda path: (_step_of(path), path.name), reverse=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def drop_older(root: Path, step: int, keep: int, verified: set[Path]) -> None:
    """Remove all but the ``keep`` newest whole checkpoints from a step downwards.

    Checkpoints that are not whole are not counted, since counting one would cost a sound one; those
    that their name or manifest shows to be unusable are not removed either.

    Args:
        root: Folder of the run's checkpoints.
        step: The newest one that counts.
        keep: How many stay.
        verified: Checkpoints whose every byte is known to be right; others are read, and added.
    """
    kept = 0
    for path in find_checkpoints(root):
        if not _says_its_step(path, up_to=step):
            continue
        if kept == keep:
            remove(path)
        elif path in verified or _is_whole(path):
            verified.add(path)
            kept += 1


def _is_whole(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _says_its_step(folder: Path, *, up_to: int) -> bool:
    try:
        step = json.loads((folder / MANIFEST).read_bytes())["step"]
        return bool(step <= up_to and folder.name == folder_name(step))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def remove(path: Path) -> None:
    """Remove a folder, or a link to one, as far as possible."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def newest_good(
    root: Path,
    *,
    read: Callable[[Path], Manifest] = read_manifest,
    torn: Mapping[Path, str] | None = None,
    second: Path | None = None,
) -> tuple[Path, Manifest, list[str]] | None:
    """The newest whole checkpoint, its manifest, and a sentence for each torn one skipped.

    Args:
        root: Folder of the run's checkpoints.
        read: ``read_manifest``, or ``open_manifest`` where blocks are verified as they are loaded.
        torn: What is known of checkpoints that could not be loaded.
        second: Another folder of them; of equal steps, that of ``root`` comes first.

    Raises:
        CheckpointError: there are checkpoints but none is whole, or one has a newer format; or a
            folder of them cannot be looked into.
    """
    known, roots = torn or {}, [root, *([] if second is None else [second])]
    for each in roots:
        _require_readable(each)
    folders = [folder for each in roots for folder in find_checkpoints(each)]
    # One that has vanished since it could not be loaded is not a fresh start either.
    skipped = [why for folder, why in known.items() if folder not in folders]
    for folder in sorted(folders, key=lambda path: -_step_of(path)):
        if folder in known:
            skipped.append(known[folder])
            continue
        try:
            return folder, read(folder), skipped
        except NewerCheckpointError:
            raise
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        where, count = " and ".join(map(str, roots)), len(skipped)
        which = "The only checkpoint" if count == 1 else f"None of the {count} checkpoints"
        is_whole = "is not whole" if count == 1 else "is whole"
        raise CheckpointError(
            f"{which} in {where} {is_whole}. {skipped[0]} Restore a copy, or delete {where} to "
            f"start from the first step."
        )
    return None


def read_steadily(root: Path, read: Callable[[], _Read]) -> _Read:
    """Read checkpoints of a run that may still train, and so replace them meanwhile.

    Args:
        root: Folder of the run's checkpoints.
        read: Chooses one and reads it; called again where it fails and others are there by then.

    Raises:
        CheckpointError: as ``read``, or the run replaces them faster than they are read.
    """
    for _ in range(_TRIES):
        listed = list(find_checkpoints(root))
        try:
            return read()
        except (CheckpointError, OSError):
            if list(find_checkpoints(root)) == listed:
                raise
    raise CheckpointError(
        f"{root.parent} replaces its checkpoints before they are read. Wait until it is trained, "
        "or let it keep more (checkpoint.keep)."
    )


def _require_readable(root: Path) -> None:
    """Refuse a folder of checkpoints that cannot be looked into: that would be a fresh start.

    Raises:
        CheckpointError: says why.
    """
    try:
        list(root.iterdir())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not root.is_symlink():
            return  # there is none yet
        raise CheckpointError(
            f"{root}, a folder of checkpoints, cannot be read ({error.strerror}). Make it a folder "
            f"that can be, or train into another with --out."
        ) from error
