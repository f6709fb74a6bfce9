"""Hand what was written to the disk, so that it outlives a power cut.

Sources
    A new name lasts once its folder is synchronised, too: fsync(2).
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk.

    >>> sync(Path("."))
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
