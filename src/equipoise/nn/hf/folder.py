"""A model's folder, written whole or not at all, for all who may read a new file."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from equipoise.base.durable import sync
from equipoise.base.errors import ModelError


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name ``folder`` once all of it is on the disk.

    Raises:
        ModelError: it could not be written; nothing is left behind.
    """
    partial = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        _share(partial)
        for path in (*partial.rglob("*"), partial):
            sync(path)
        partial.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        words = getattr(error, "strerror", None) or error
        raise ModelError(
            f"{folder} could not be written ({words}). Free some space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _share(folder: Path) -> None:
    """Let those read every file who may read a new one: safetensors writes for its user alone."""
    new = folder / ".new"
    new.touch()
    mode = new.stat().st_mode
    new.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
