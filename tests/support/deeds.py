"""What others do to a run's folder and its disk while it trains."""

import os
from pathlib import Path


def fill(disk: Path, *, leave: int = 0) -> None:
    """Take what is free on a disk, but for some bytes."""
    facts = os.statvfs(disk)
    with (disk / "filler").open("wb", buffering=0) as file:
        left = facts.f_bavail * facts.f_frsize - leave
        try:
            while left > 0:
                left -= file.write(bytes(min(4096, left)))
        except OSError:
            pass


def free(disk: Path) -> None:
    (disk / "filler").unlink()
