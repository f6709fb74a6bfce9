"""Force writes to disk, so that they survive a power cut.

Sources
    A new name lasts once its folder is synchronised, too: fsync(2).
"""

import os
from pathlib import Path


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
