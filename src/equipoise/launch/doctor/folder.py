"""Checks of the folder that a run is written to: writing, space, locks, and visibility."""

from equipoise.base.units import format_bytes, format_seconds
from equipoise.launch.doctor.facts import FolderFacts, Needs, Row

_SLOW_FSYNC_S = 1.0

OF_ONE_NODE = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
"""File systems that are local to a node."""


def folder_rows(facts: FolderFacts, needs: Needs) -> list[Row]:
    """The checks of one folder; only the first if nothing can be written."""
    if facts.fault:
        why = "journal and checkpoints are written there."
        fix = "Make it writable, or choose another with --folder and --out."
        return [Row("folder", f"{facts.path}: {facts.fault}", "breaks", why, fix)]
    return [_written(facts), room_row(facts, needs), _lock(facts), _seen(facts, needs)]


def _written(facts: FolderFacts) -> Row:
    fact = f"{facts.path}: written and synchronised in {format_seconds(facts.fsync_s)}"
    why = "a checkpoint counts once the disk has it, and ranks wait for that."
    if facts.fsync_s < _SLOW_FSYNC_S:
        return Row("folder", fact, "ok", why)
    fix = "Choose a faster disk with --out, or save less often: checkpoint.every_steps."
    return Row("folder", fact, "warn", why, fix)


def room_row(facts: FolderFacts, needs: Needs) -> Row:
    """Whether the disk has room for the checkpoints that a run keeps."""
    # While one is written, those that are kept are still there.
    need = (needs.kept_checkpoints + 1) * needs.checkpoint_bytes
    fact = f"{format_bytes(facts.free_bytes)} free, {format_bytes(need)} needed"
    why = (
        f"{needs.kept_checkpoints} checkpoints are kept and one is written, of "
        f"{format_bytes(needs.checkpoint_bytes)} each."
    )
    if facts.free_bytes >= need:
        return Row("room", fact, "ok", why)
    fix = f"Free {format_bytes(need - facts.free_bytes)}, or lower checkpoint.keep."
    return Row("room", fact, "breaks", why, fix)


def _lock(facts: FolderFacts) -> Row:
    why = "rank 0 holds a run's folder by a lock, so that two runs never write one journal."
    if not facts.lock_fault:
        return Row("file locks", "work", "ok", why)
    fix = "Mount it with locks (NFS: without nolock; Lustre: with flock), or choose another --out."
    return Row("file locks", facts.lock_fault, "breaks", why, fix)


def _seen(facts: FolderFacts, needs: Needs) -> Row:
    why = "ranks of every node read the run and its tokens, and write their journals there."
    if needs.nodes == 1:
        return Row("file system", facts.file_system, "ok", why)
    if facts.file_system in OF_ONE_NODE:
        fact = f"{facts.file_system}, which other nodes do not see"
        fix = "Choose a folder of a file system that all nodes mount, and data.cache beside it."
        return Row("file system", fact, "breaks", why, fix)
    return Row("file system", facts.file_system, "ok", why)
