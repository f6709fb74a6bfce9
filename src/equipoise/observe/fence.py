"""A run's folder has one gang of ranks at a time: an older one that wakes up writes nothing more.

Why
    The ranks of a run may be suspended with their machine, given up, and started anew elsewhere.
    When the old ones wake up they go on in the middle of a step, and would write journals and
    checkpoints among those of the new ones.

What it decides
    Each gang has a number, its epoch, in the file that rank 0 holds locked: rank 0 of a new gang
    raises it as soon as it has the lock. Whoever is about to write reads it, and stops if it has
    been raised since. Where somebody deletes the file, locks of the next gang meet none, and its
    epochs begin anew: so each gang has a name there, too, at random.

Kept true (tests/unit/observe/test_fence.py, tests/multi/fault/test_recover.py)
    Epochs only rise; ranks of an older gang leave every file of the folder alone.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DIGITS = 20
"""A number of fixed width is overwritten in one piece."""


_NAMED = re.compile(rb"\d{20} ([0-9a-f]{16})")

_MOST = 10**15
"""More starts than any run has: a file that says more is damaged."""


def _read(file: int) -> int:
    try:
        epoch = int(os.pread(file, _DIGITS, 0) or b"0")
    except ValueError:
        return 0
    return epoch if 0 <= epoch < _MOST else 0


def _name(file: int) -> str:
    """The gang's name; empty where there is none, as in older versions."""
    named = _NAMED.fullmatch(os.pread(file, _DIGITS + 1 + 16, 0))
    return named[1].decode() if named else ""


@dataclass(frozen=True, slots=True)
class Fence:
    """One gang's number, and the file that says whether it is still the newest."""

    path: Path
    epoch: int
    name: str
    home: int
    """The run's folder, as its file system numbers it: another one may have taken its path."""

    @classmethod
    def take(cls, path: Path, file: int) -> "Fence":
        """Raise the epoch of a file that is held locked; from now on it is this gang's.

        Raises:
            OSError: it cannot be written.
        """
        epoch, name = _read(file) + 1, os.urandom(8).hex()
        os.pwrite(file, f"{epoch:0{_DIGITS}d} {name}".encode(), 0)
        os.fsync(file)
        return cls(path, epoch, name, path.parent.stat().st_ino)

    @property
    def is_passed(self) -> bool:
        """Whether another gang has taken the folder since; one that cannot be read says no."""
        with suppress(OSError):
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _read(file) > self.epoch:
                    return True
                is_other = _name(file) not in ("", self.name)
                return is_other and self.path.parent.stat().st_ino == self.home
            finally:
                os.close(file)
        return False
