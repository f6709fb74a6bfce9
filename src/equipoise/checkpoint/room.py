"""The room that checkpoints take on their disk, and why one could not be written."""

from contextlib import suppress
from pathlib import Path

from equipoise.base.disk import disk_of
from equipoise.base.units import format_bytes
from equipoise.checkpoint.manifest import find_checkpoints


def stored_bytes(folder: Path) -> int:
    """Bytes that a checkpoint's files take on disk; 0 if it cannot be read."""
    try:
        return sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    except OSError:
        return 0


def explain_unwritten(root: Path, step: int, fault: str, least_bytes: int) -> str:
    """Why a checkpoint could not be written, what it needs, and what is kept.

    Args:
        root: Folder of the run's checkpoints.
        step: Its step.
        fault: What the system said.
        least_bytes: It needs these, or as many as the last one took.
    """
    there: list[Path] = []
    with suppress(OSError):
        there = list(find_checkpoints(root))
    needed = max([least_bytes, *map(stored_bytes, there[:1])])
    kept = ", ".join(path.name for path in there) or "none"
    return (
        f"The checkpoint of step {step} could not be written to {root} ({fault}; it needs "
        f"{format_bytes(needed)}, and {disk_of(root)}). Checkpoints kept: {kept}. Free some "
        f"space, or lower checkpoint.keep."
    )
