"""Which checkpoint a path stands for, where transformers built the model; without torch."""

from dataclasses import dataclass
from pathlib import Path

from equipoise.checkpoint.manifest import (
    MANIFEST,
    OWN_ENGINE,
    Manifest,
    newest_good,
    read_manifest,
)

_CHECKPOINTS = "checkpoint"


@dataclass(frozen=True, slots=True)
class TheirCheckpoint:
    """A verified checkpoint of a model that transformers builds."""

    folder: Path
    manifest: Manifest
    remarks: tuple[str, ...] = ()


def find_theirs(source: Path) -> TheirCheckpoint | None:
    """The checkpoint that a run's folder or a checkpoint's stands for, if transformers built it.

    Raises:
        CheckpointError: no checkpoint of the run is whole.
    """
    if (source / MANIFEST).exists():
        held = source, read_manifest(source), list[str]()
    elif (source / _CHECKPOINTS).is_dir():
        newest = newest_good(source / _CHECKPOINTS)
        if newest is None:
            return None
        held = newest
    else:
        return None
    folder, manifest, torn = held
    return None if manifest.engine == OWN_ENGINE else TheirCheckpoint(folder, manifest, tuple(torn))
