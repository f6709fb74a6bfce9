"""Force writes to disk, so that they survive a power cut.

Sources
    A new name lasts once its folder is synchronised, too: fsync(2). Swapped names: rename(2).
"""

import ctypes
import os
from pathlib import Path

_RENAME_EXCHANGE = 2
"""From Linux's fs.h: swap two names."""


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all: the old text stays until the new one is complete.

    Raises:
        OSError: it could not be written.
    """
    if path.exists() and not path.is_file():  # a pipe, or the terminal
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk.

    >>> sync(Path("."))
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap_names(folder: int, one: str, other: str) -> bool:
    """Swap two names of an open folder in one instant, so that neither is ever missing.

    Returns:
        Whether they were swapped; not if one does not exist, or the system cannot.
    """
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # another system than Linux, or an old one
        return False
    names = folder, os.fsencode(one), folder, os.fsencode(other)
    return bool(rename(*names, _RENAME_EXCHANGE) == 0)
