"""Let one process build a cache, and clean up after processes that were killed.

What it decides
    Whatever lies beside a lock that nobody holds is left over from a kill: whole shards are
    reused, the rest is removed.

Kept true (tests/unit/data/cache/test_store.py)
    If several processes start together, one builds and the others wait; a killed build leaves
    nothing that looks whole.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from equipoise.base.errors import DataError
from equipoise.base.read import reason
from equipoise.base.units import format_bytes
from equipoise.data.progress import Progress
from equipoise.data.source import Source

# Leftovers of a build that was killed and never restarted are removed after this long.
_LEFTOVER_S = 86_400
# Text per token of the 4,096-token BPE on the standard library: 3.2 bytes. For estimates.
_BYTES_PER_TOKEN = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)


def leftovers(target: Path) -> list[Path]:
    """Files that builds of a target have left beside it."""
    return [
        *target.parent.glob(f"{target.name}.building-*"),
        *target.parent.glob(f"{target.name}.parts*"),
    ]


def parts_folder(target: Path) -> Path:
    """The folder of a build's shards."""
    return target.with_name(f"{target.name}.parts")


def building_path(target: Path) -> Path:
    """Where this process builds a target until it is whole."""
    return target.with_name(f"{target.name}.building-{os.getpid()}")


def remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Renamed first: a worker whose parent was killed may still be about to put a file there.
    doomed = path if ".building-" in path.name else path.replace(building_path(path))
    shutil.rmtree(doomed, ignore_errors=True)


def _take(lock: Path, *, block: bool) -> int | None:
    """The lock's file descriptor, or None if another process holds it."""
    while True:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB))
            # Its last holder may have removed the file while this process waited for it.
            if lock.exists() and os.path.samestat(lock.stat(), os.fstat(handle)):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def make_once(target: Path, progress: Progress) -> Iterator[bool]:
    """Hold the lock on building ``target``; yields whether this process must build it.

    A kill releases the lock and leaves its file, which marks the leftovers.
    """
    lock = target.with_name(f"{target.name}.lock")
    if target.exists() and not lock.exists():
        yield False
        return
    _sweep(target.parent)
    try:
        handle = _take(lock, block=False)
    except OSError as error:
        raise DataError(
            f"data.cache {lock.parent} cannot be written: {reason(error)}. Set data.cache to a "
            "writable folder."
        ) from None
    if handle is None:
        progress.start(f"wait for another process that builds {target.name}", 1)
        try:
            handle = _take(lock, block=True)
        finally:
            progress.finish()
    try:
        is_wanted = not target.exists()
        if not is_wanted:
            for path in leftovers(target):
                remove(path)
        yield is_wanted
    finally:
        # The lock file stays beside whatever a later build can use, so that _sweep finds it.
        if not leftovers(target):
            lock.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)


def _sweep(cache: Path) -> None:
    """Remove what killed builds left behind if nobody has resumed them for a day."""
    for lock in cache.glob("*.lock"):
        try:
            is_old = time.time() - lock.stat().st_mtime > _LEFTOVER_S
        except FileNotFoundError:
            continue
        if is_old and (handle := _take(lock, block=False)) is not None:
            for path in leftovers(lock.with_suffix("")):
                remove(path)
            lock.unlink()
            os.close(handle)


@contextmanager
def clean_if_full(source: Source, target: Path) -> Iterator[None]:
    """If the disk fills up, remove what the build has written and say how much it needs.

    Raises:
        DataError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free_bytes = shutil.disk_usage(target.parent).free
        for path in leftovers(target):
            remove(path)
        # Twice, because shards and the assembled cache exist side by side for a moment.
        need_bytes = 2 * 2 * source.size_bytes // _BYTES_PER_TOKEN
        raise DataError(
            f"The disk of data.cache {target.parent} is full: it had {format_bytes(free_bytes)} "
            f"left, and building {target.name} needs about {format_bytes(need_bytes)} in all. "
            "Free some space or set data.cache to a folder on a larger disk."
        ) from None
