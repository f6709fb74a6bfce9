"""Set checkpoints aside that may hold corrupted bytes.

What it decides
    They are renamed, so that no run loads or counts them, and somebody who wants to can look at
    them; those of an earlier time are removed.

Kept true (tests/multi/fault/test_flips.py)
    A run never resumes from a checkpoint that was saved after a flip.
"""

from pathlib import Path

from equipoise.base.durable import sync
from equipoise.checkpoint.manifest import find_checkpoints, remove

_ASIDE = "corrupt-"


def set_aside(root: Path, *, after: int) -> list[Path]:
    """Set aside all checkpoints of later steps than one.

    Args:
        root: Folder of a run's checkpoints; it need not exist.
        after: The last step whose checkpoint is trusted.

    Returns:
        Where they were.
    """
    later = [
        path for path in find_checkpoints(root) if int(path.name.removeprefix("step-")) > after
    ]
    for old in root.glob(f"{_ASIDE}step-*") if later else ():
        remove(old)
    for path in later:
        path.rename(root / f"{_ASIDE}{path.name}")
    if later:
        sync(root)
    return later
