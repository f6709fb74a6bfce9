"""Copy published checkpoints to a second folder, on a disk that is slower and safer.

What it decides
    One thread of rank 0 copies. The files of a checkpoint are opened when it is published, so that
    it may be dropped from the first folder meanwhile. One copy is under way at a time; of those
    that are published meanwhile the newest comes next, and others are left out. A copy is verified
    and published as the checkpoint itself was, and as many are kept.

    The folder belongs to one run, whose path stands in its file ``run``.

Kept true (tests/multi/checkpoint/test_second.py)
    A copy is whole or absent; a run whose own folder has lost its checkpoints goes on from it.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from equipoise.base.disk import explain_refusal
from equipoise.base.durable import sync
from equipoise.base.errors import SpecError
from equipoise.base.read import real_path, user_path
from equipoise.base.shown import shorten
from equipoise.checkpoint.manifest import (
    drop_older,
    find_checkpoints,
    folder_name,
    read_manifest,
    remove,
)
from equipoise.checkpoint.publish import SAVING, give_name, sync_above
from equipoise.spec.names import CHECKPOINTS

OWNER = "run"
"""File with the path of the run whose checkpoints are copied here."""

_PART_BYTES = 4 << 20
_LONGEST_PATH = 400


def take_second(path: str, base: Path, run: Path) -> str:
    """Take the second folder for a run.

    Args:
        path: ``checkpoint.second_path``.
        base: The folder that it is relative to.
        run: The run's folder.

    Returns:
        The folder's absolute path; empty if ``path`` is.

    Raises:
        SpecError: it cannot be written, is the first one, or has checkpoints of another run.
    """
    if not path:
        return ""
    try:
        second = real_path(base / user_path(path))
    except RuntimeError as error:
        raise SpecError(
            f"--checkpoint.second_path {path}: there is no such user. Write the whole path of the "
            f"folder."
        ) from error
    if second == real_path(run / CHECKPOINTS):
        raise SpecError(
            f"{second} is where the run itself keeps its checkpoints. Choose another folder with "
            f"--checkpoint.second_path, on another disk."
        )
    owner = second / OWNER
    try:
        second.mkdir(parents=True, exist_ok=True)
        other = os.fsdecode(owner.read_bytes()).strip() if owner.exists() else ""
        # It may be another run's own folder; those of this one would replace what is there.
        if not other and not any(find_checkpoints(second)):
            owner.write_bytes(os.fsencode(f"{run}\n"))
            sync(owner)
            sync(second)
            other = str(run)
    except OSError as error:
        raise SpecError(
            f"The second folder {second} cannot be written ({explain_refusal(error, second)}). "
            f"Choose another with --checkpoint.second_path."
        ) from error
    if other != str(run):
        whose = (
            f"has the checkpoints of {shorten(other, _LONGEST_PATH)}"
            if other
            else f"has checkpoints but no file {OWNER} that says of which run"
        )
        raise SpecError(
            f"{second} {whose}. Choose another folder with --checkpoint.second_path; or if they "
            f"are of {run}, write that path into {owner}."
        )
    return str(second)


class SecondFolder:
    """Copies in the background; on rank 0 alone.

    Args:
        root: The second folder; it exists.
        keep: Number of checkpoints to keep there.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self._verified: set[Path] = set()
        self._is_lasting = False
        """Whether the folder's own name was flushed."""
        self._changed = threading.Condition()
        self._next: tuple[int, dict[str, BinaryIO]] | None = None
        self._is_busy = self._is_closed = False
        self._faults: list[str] = []
        self._thread = threading.Thread(target=self._work, name="second", daemon=True)
        self._thread.start()

    def copy(self, checkpoint: Path, step: int) -> None:
        """Copy a checkpoint that was just published, when the last copy is done."""
        with ExitStack() as stack:
            try:
                files: dict[str, BinaryIO] = {
                    path.name: stack.enter_context(path.open("rb"))
                    for path in sorted(checkpoint.iterdir())
                }
            except OSError as error:
                self._note(step, error)
                return
            stack.pop_all()
        with self._changed:
            left_out, self._next = self._next, (step, files)
            self._changed.notify_all()
        if left_out is not None:
            _close(left_out[1])

    def take_faults(self) -> list[str]:
        """Sentences about copies that failed, since the last call."""
        faults, self._faults = self._faults, []
        return faults

    def wait(self) -> None:
        """Wait until the newest checkpoint is copied."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None and not self._is_busy)

    def drop(self) -> None:
        """Copy nothing more; returns when the copy under way has ended."""
        with self._changed:
            left_out, self._next = self._next, None
            self._changed.wait_for(lambda: not self._is_busy)
        if left_out is not None:
            _close(left_out[1])

    def close(self) -> None:
        """End the thread after the copy under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._is_closed)
                if self._next is None or self._is_closed:
                    return
                (step, files), self._next, self._is_busy = self._next, None, True
            try:
                self._copy(step, files)
            except Exception as error:  # whatever it is, training goes on, and the next is copied
                self._note(step, error)
            finally:
                _close(files)
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _copy(self, step: int, files: dict[str, BinaryIO]) -> None:
        for stale in self._root.glob(f"{SAVING}*"):
            remove(stale)
        partial, final = self._root / f"{SAVING}{step:06d}", self._root / folder_name(step)
        try:
            partial.mkdir()
            for name, file in files.items():
                with (partial / name).open("wb") as out:
                    shutil.copyfileobj(file, out, _PART_BYTES)
                    out.flush()
                    os.fsync(out.fileno())
                    os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            read_manifest(partial)
            if not self._is_lasting:
                sync_above(self._root)
                self._is_lasting = True
            with _opened(self._root) as root, _opened(partial) as folder:
                give_name(root, partial.name, folder, final.name, 0)
        except BaseException:
            remove(partial)
            raise
        self._verified.add(final)
        drop_older(self._root, step, self._keep, self._verified)

    def _note(self, step: int, error: Exception) -> None:
        why = explain_refusal(error, self._root) if isinstance(error, OSError) else str(error)
        why = why.rstrip(".") or type(error).__name__
        self._faults.append(
            f"The checkpoint of step {step} could not be copied to {self._root} ({why})."
        )


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _close(files: dict[str, BinaryIO]) -> None:
    for file in files.values():
        with suppress(OSError):
            file.close()
