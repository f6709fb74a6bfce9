"""A save that is under way on one rank: its open folders, how far it is, and what it took.

Kept true (tests/multi/checkpoint/test_background.py, tests/unit/checkpoint/test_publish.py)
    A run's folder may be moved while its checkpoint is written: the handles go with it. Every name
    and byte of a checkpoint is flushed before it has its name.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.checkpoint.publish import AbandonedError


@dataclass(slots=True)
class SaveTimes:
    """What a save took on this rank [s]."""

    blocked_s: float = 0.0
    """Training stood still: while the save began, for what was not copied, until it had ended."""
    settled_s: float = 0.0
    """The last part of that: until it had ended."""
    staged_s: float = 0.0
    """From its begin until all was copied."""
    written_s: float = 0.0
    """From its begin until this rank's part was on the disk and verified."""
    core_s: float = 0.0
    """Processor time that the thread took meanwhile."""


@dataclass(slots=True, eq=False)
class UnderWay:
    """A save under way."""

    root: Path
    """Folder of the run's checkpoints."""
    name: str
    """The folder of the save in it, until it is published."""
    began: float
    root_handle: int = -1
    handle: int = -1
    size_bytes: int = 0
    """This rank's part."""
    times: SaveTimes = field(default_factory=SaveTimes)
    fault: str = ""
    """Why this rank's part failed; empty if it has not."""
    staged: threading.Event = field(default_factory=threading.Event)
    written: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        """Make the folder of the save, and hold it and the one around it."""
        self.root.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.root_handle = os.open(self.root, flags)
        with suppress(FileExistsError):
            os.mkdir(self.name, dir_fd=self.root_handle)
        self.handle = os.open(self.name, flags, dir_fd=self.root_handle)

    def fail(self, error: BaseException) -> None:
        """Note why this rank's part failed; the first reason counts."""
        if not self.fault:
            lines = str(error).strip().splitlines()
            self.fault = lines[-1] if lines else type(error).__name__

    def end(self) -> None:
        """Let go of all who wait for it."""
        for event in (self.staged, self.written, self.ended):
            event.set()

    def work(self, write: Callable[[], None], publish: Callable[[], None] | None) -> None:
        """Write this rank's part and publish the whole; a thread's body, which raises nothing.

        Args:
            write: Puts this rank's part on the disk and verifies it.
            publish: Waits for the parts of all ranks and gives the whole its name; rank 0's alone.
        """
        core = time.thread_time()
        try:
            write()
            self.times.written_s = time.perf_counter() - self.began
            self.times.core_s = time.thread_time() - core
            self.written.set()
            if publish is not None:
                publish()
        except AbandonedError:
            pass  # the rank that failed says why
        except Exception as error:  # whatever it is, training goes on
            self.fail(error)
        finally:
            self.end()

    def close(self) -> None:
        """Let go of the folders."""
        for handle in (self.handle, self.root_handle):
            if handle >= 0:
                os.close(handle)
        self.handle = self.root_handle = -1
