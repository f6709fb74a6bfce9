"""Write a rank's part of a checkpoint, and publish the whole once every part is there.

What it decides
    Ranks write into ``.saving-000250-...``, whose name no other attempt has. A rank writes its
    shard, flushes it, reads it back from the disk and only then leaves its report beside it: the
    sum of each block. Rank 0 waits for the reports of all, writes the manifest, flushes
    everything, and gives the folder its name in one instant. Only then are older checkpoints
    dropped, and only while ``keep`` are left of which every byte has been verified.

    ::

        rank 0  | shard-00000.bin | read back | report | wait for all | manifest | rename | drop |
        rank 1  | shard-00001.bin | read back | report |

    Ranks meet through these files alone, since collectives belong to the thread that trains.
    Folders are held open: whoever moves the run's folder moves the checkpoint with it, and nothing
    is written to another folder that takes its place.

Kept true (tests/multi/checkpoint/test_kills.py)
    Killed anywhere, what has a checkpoint's name is whole, and the older ones are still there.
"""

import dataclasses
import json
import os
import shutil
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from equipoise.base.digest import digest_bytes
from equipoise.base.durable import swap_names, sync
from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.blocks import SummedFile, blocks, digest_sums, read_whole, sum_block
from equipoise.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    drop_older,
    folder_name,
    render_manifest,
    shard_name,
)

SAVING = ".saving-"
"""How the folder of a checkpoint begins until it is whole."""

_LOOK_S, _MOST_LOOK_S = 0.002, 0.1
"""First and longest pause between two looks for the reports of other ranks."""


class AbandonedError(Exception):
    """The save was given up, because another rank's part failed or the run ends."""


def write_part(folder: int, rank: int, data: memoryview, abandoned: threading.Event) -> None:
    """Write a rank's shard, verify it, and leave the report that it is whole.

    Args:
        folder: The open folder of the save.
        rank: Whose part.
        data: The shard's bytes.
        abandoned: Set when nobody waits for it any more.

    Raises:
        OSError: the disk refused it.
        CheckpointError: the disk holds other bytes than were written.
        AbandonedError: ``abandoned`` was set.
    """
    name = shard_name(rank)
    sums = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(name, flags, 0o666, dir_fd=folder)
    try:
        for start, stop in blocks(len(data)):
            if abandoned.is_set():
                raise AbandonedError
            block = data[start:stop]
            sums.append(sum_block(block))
            while len(block):
                block = block[os.write(handle, block) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    summed = SummedFile(len(data), tuple(sums))
    _read_back(folder, name, summed)
    leave_report(folder, rank, dataclasses.asdict(summed))


def leave_report(folder: int, rank: int, facts: Mapping[str, Any]) -> None:
    """Leave word that a rank's part is whole, in the open folder of the save.

    Raises:
        OSError: the disk refused it.
    """
    report = _report_name(rank)
    _write(folder, f".{report}", json.dumps(facts))
    os.rename(f".{report}", report, src_dir_fd=folder, dst_dir_fd=folder)


def _read_back(folder: int, name: str, summed: SummedFile) -> None:
    """Compare what the disk holds, not what the system remembers of it.

    Raises:
        CheckpointError: names the bytes.
    """
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb", 0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for (start, stop), expected in zip(blocks(summed.size_bytes), summed.sums, strict=True):
            if sum_block(read_whole(file, stop - start)) != expected:
                raise CheckpointError(
                    f"{name} does not read back as it was written between bytes {start:,} and "
                    f"{stop:,}"
                )


def collect(folder: int, world: int, abandoned: threading.Event) -> dict[str, SummedFile]:
    """Wait for the reports of all ranks.

    Returns:
        What each shard holds, by name.

    Raises:
        AbandonedError: ``abandoned`` was set before the last came.
    """
    reports = collect_reports(folder, world, abandoned)
    return {
        shard_name(rank): SummedFile(report["size_bytes"], tuple(report["sums"]))
        for rank, report in enumerate(reports)
    }


def collect_reports(folder: int, world: int, abandoned: threading.Event) -> list[dict[str, Any]]:
    """Wait for the reports of all ranks, in the open folder of the save; what each says.

    Raises:
        AbandonedError: ``abandoned`` was set before the last came.
    """
    missing, pause_s = {_report_name(rank) for rank in range(world)}, _LOOK_S
    while missing:
        is_last_look = abandoned.is_set()
        missing -= set(os.listdir(folder))
        if missing and is_last_look:
            raise AbandonedError
        if missing:
            abandoned.wait(pause_s)
            pause_s = min(2 * pause_s, _MOST_LOOK_S)
    reports = []
    for rank in range(world):
        with os.fdopen(os.open(_report_name(rank), os.O_RDONLY, dir_fd=folder)) as file:
            reports.append(json.load(file))
    return reports


def publish(
    root: int,
    name: str,
    folder: int,
    manifest: Manifest,
    shards: Mapping[str, SummedFile],
    texts: Mapping[str, str],
) -> None:
    """Write what describes a checkpoint whose shards are written, and give it its name.

    Args:
        root: The open folder of the run's checkpoints.
        name: The folder of the save in it.
        folder: That folder, open.
        manifest: The checkpoint's description; its files are filled in.
        shards: As ``collect`` returns them.
        texts: Other files, by name.

    Raises:
        OSError: the disk refused it; the folder does not have its name.
    """
    files = {
        each: (len(text.encode()), digest_bytes(text.encode())) for each, text in texts.items()
    }
    files |= {each: (held.size_bytes, digest_sums(held.sums)) for each, held in shards.items()}
    whole = dataclasses.replace(
        manifest,
        files=dict(sorted(files.items())),
        blocks={each: held.sums for each, held in shards.items()},
    )
    for each, text in (*texts.items(), (MANIFEST, render_manifest(whole))):
        _write(folder, each, text)
    give_name(root, name, folder, folder_name(manifest.step), len(shards))


def give_name(root: int, name: str, folder: int, final: str, world: int) -> None:
    """Give a whole checkpoint its name, in one instant where the file system can.

    Args:
        root: The open folder of the run's checkpoints.
        name: The folder of the save in it.
        folder: That folder, open.
        final: The name.
        world: How many ranks have left reports, which are removed.

    Raises:
        OSError: the disk refused it; the folder does not have its name.
    """
    for rank in range(world):
        os.unlink(_report_name(rank), dir_fd=folder)
    os.fsync(folder)
    if not swap_names(root, name, final):  # there is none, or the file system cannot swap
        discard(root, final)
        os.rename(name, final, src_dir_fd=root, dst_dir_fd=root)
    os.fsync(root)
    discard(root, name)


def sync_above(root: Path) -> None:
    """Flush the names of all folders that lead to one: a checkpoint lasts no longer than they do.

    Those that this user may not open are left out.
    """
    for above in root.absolute().parents:
        with suppress(OSError):
            sync(above)


def drop_others(root: int, path: Path, step: int, keep: int, verified: set[Path]) -> None:
    """Remove older checkpoints and what killed saves have left, in the folder that is open.

    Args:
        root: The open folder of the run's checkpoints.
        path: Its path; nothing is removed if another folder is there now.
        step: The checkpoint that was just published.
        keep: Number of checkpoints to keep.
        verified: Checkpoints whose every byte has been verified; those verified here are added.
    """
    with suppress(OSError):
        discard_partial(root)
        if os.path.samestat(os.fstat(root), path.stat()):
            drop_older(path, step, keep, verified)


def discard_partial(root: int, *, but: str = "") -> None:
    """Remove what killed or failed saves have left."""
    for name in os.listdir(root):
        if name.startswith(SAVING) and name != but:
            discard(root, name)


def discard(root: int, name: str) -> None:
    """Remove a folder, or whatever has its name, as far as possible."""
    with suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=root)
        else:
            os.unlink(name, dir_fd=root)


def _report_name(rank: int) -> str:
    return f"report-{rank:05d}.json"


def _write(folder: int, name: str, text: str) -> None:
    """Write a small file and flush it to disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
