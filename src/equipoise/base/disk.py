"""Which disk a path is on, how much of it is free, and why a write failed.

Why
    "No space left on device" names no device. Freeing space takes the mount point and the
    numbers.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.base.units import format_bytes

_FULL = {errno.ENOSPC, errno.EDQUOT}
_BROKEN = {errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO}
"""Errors of a disk, not of a file."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted disk."""

    mount: Path
    free_bytes: int | None
    """Free bytes for this user; None if the file system does not say."""

    def __str__(self) -> str:
        if self.free_bytes is None:
            return f"the disk at {self.mount} does not say what is free"
        return f"the disk at {self.mount} has {format_bytes(self.free_bytes)} free"


def disk_of(path: Path) -> Disk:
    """The disk of a path, or of the nearest existing folder above it.

    >>> disk_of(Path("/")).mount
    PosixPath('/')
    """
    place = path.absolute()
    while True:
        try:
            facts = os.statvfs(place)
            break
        except OSError:
            if place == place.parent:
                return Disk(place, None)
            place = place.parent
    mount = place
    while not mount.is_mount() and mount != mount.parent:
        mount = mount.parent
    free_bytes = facts.f_bavail * facts.f_frsize if facts.f_blocks else None
    return Disk(mount, free_bytes)


def explain_refusal(error: OSError, path: Path) -> str:
    """Why a path could not be written, with its disk if that is the cause.

    >>> explain_refusal(FileNotFoundError(2, "No such file or directory"), Path("nowhere"))
    'No such file or directory'
    """
    words = error.strerror or str(error) or type(error).__name__
    if isinstance(error, FileExistsError):  # of a folder that was to be made
        words = os.strerror(errno.ENOTDIR)
    if error.errno in _FULL:
        return f"{words}; {disk_of(path)}"
    if error.errno in _BROKEN:
        return f"{words}; it lies on the disk at {disk_of(path).mount}"
    return words


@contextmanager
def writing(flag: str, place: Path) -> Iterator[None]:
    """Say in one sentence why a file or a folder cannot be written.

    Args:
        flag: The setting that chooses another place, without dashes.
        place: The file or folder.

    Raises:
        SpecError: with the system's words.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(
            f"{place} cannot be written: {reason}. Choose another with --{flag}."
        ) from error


def why_unwritable(folder: Path) -> str:
    """Why nothing can be made in a folder that may be still to be made; empty if it can be.

    >>> why_unwritable(Path("/proc/self/status/run"))
    'Not a directory'
    """
    place = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not place.is_dir():
        number = errno.ENOTDIR
    elif os.statvfs(place).f_flag & os.ST_RDONLY:
        number = errno.EROFS
    elif not os.access(place, os.W_OK | os.X_OK):
        number = errno.EACCES
    else:
        return ""
    return explain_refusal(OSError(number, os.strerror(number)), place)


def run_unwritten(folder: Path, why: str) -> SpecError:
    """The error of a run whose folder cannot be written."""
    return SpecError(
        f"The run's folder {folder} cannot be written ({why}). Make it writable, or choose another "
        "with --out."
    )


@contextmanager
def writing_run(folder: Path) -> Iterator[None]:
    """Say in one sentence why a file of a run's folder cannot be written.

    Raises:
        SpecError: with the system's words.
    """
    try:
        yield
    except OSError as error:
        raise run_unwritten(folder, explain_refusal(error, folder)) from error
