"""A trainer that replaces each checkpoint while somebody reads it; a program of its own.

It holds a lease on a manifest (fcntl(2), F_SETLEASE), so that whoever opens it waits and the holder
gets SIGIO. Then it puts the next checkpoint in place, removes this one, and lets the reader go on:
the manifest that was opened is whole, and the files that it lists are gone.
"""

import fcntl
import os
import shutil
import signal
import sys
from pathlib import Path


def lease(manifest: Path) -> int:
    """Have every opener of a file wait until this process lets go of it."""
    descriptor = os.open(manifest, os.O_RDONLY)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return descriptor


def main(waiting: Path, root: Path, replaced: int) -> None:
    """Put checkpoints 1, 2, ... of ``waiting`` into ``root``; the first ``replaced`` are leased."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
    folders = sorted(waiting.iterdir())
    held = None
    for step, folder in enumerate(folders[: replaced + 1], 1):
        after = lease(folder / "manifest.json") if step <= replaced else None
        if held is not None:
            signal.sigwait({signal.SIGIO})
        folder.rename(root / folder.name)
        if held is not None:
            shutil.rmtree(root / folders[step - 2].name)
            os.close(held)
        if step == 1:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        held = after


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
