"""Rank 0 watches a run's folder and its disk between steps, and decides what follows.

Why
    Disks are filled by others and folders are moved by people who do not know that a run is
    writing to them. A run that hears of it at its next checkpoint has lost all steps since the
    last one.

What it decides
    Training needs no disk until the next checkpoint, so it goes on while that one can be kept:
    while it fits in what is free, or in what is free once checkpoints older than the last good
    one have gone. Where room shrinks so fast that it may not last another two steps, the run
    saves at once. Where there is none left, a run whose steps are all saved stops, and one
    that has unsaved steps goes on and saves them as soon as there is room: stopping would lose
    them. The last good checkpoint is never dropped to make room; where somebody else deletes it,
    the run saves again at once.

    A folder that was moved is followed, so that the steps since its last checkpoint are saved
    with it; one that was deleted is made again for them. Then the run stops, because whoever
    did it did not mean it to go on. A folder of another run in its place is left alone, and so is
    one that newer ranks have taken over.

Kept true (tests/multi/train/test_disks.py)
    No step that could be saved is lost, on real disks that fill and folders that vanish.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

from equipoise.base.disk import disk_of
from equipoise.base.errors import FaultError
from equipoise.base.units import format_bytes
from equipoise.checkpoint.manifest import find_checkpoints
from equipoise.checkpoint.room import stored_bytes
from equipoise.observe.fence import Fence
from equipoise.spec.names import CHECKPOINTS, RESOLVED


class Word(IntFlag):
    """A rank's word to the others when they meet in a step."""

    NOTICE = 1
    """It has sentences for the reader."""
    SAVE = 2
    """The disk has room now and may not have it later."""
    GONE = 4
    """The run's folder is not at its path any more."""
    SAVE_ENDED = 8
    """The save under way is published, or this rank's part of it has failed."""
    TIGHT = 16
    """The disk may not hold the checkpoint after the next one."""


class FolderGoneError(FaultError):
    """The run's folder is not at its path any more, so nothing more is written there."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a run's folder, and where its last steps can be saved."""

    sentence: str
    rescue: Path | None
    """None where nothing may be written."""
    advice: str = "Train again with --out and a folder that nobody else uses."
    """Where nothing may be written."""


class FolderWatch:
    """Looks at a run's folder and its disk; on rank 0 alone.

    Args:
        folder: Of the run; it exists.
        needed_bytes: Of a checkpoint, until one was saved.
        fence: These ranks' epoch; None where nobody else can take the folder.
    """

    def __init__(self, folder: Path, needed_bytes: int, fence: Fence | None = None) -> None:
        self.folder, self._fence = folder, fence
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._needed_bytes = needed_bytes
        self._kept: Path | None = None
        self._last_room: int | None = None
        self._is_short = False
        self._notices: list[str] = []

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._handle)

    def keep(self, checkpoint: Path) -> None:
        """Count on a checkpoint that was just saved, or loaded: the last good one."""
        self._kept = checkpoint
        self._needed_bytes = stored_bytes(checkpoint) or self._needed_bytes
        self._last_room, self._is_short = None, False

    def look(self, *, has_unsaved: bool, is_saving: bool = False) -> Word:
        """Look once, before a step.

        Args:
            has_unsaved: Whether steps were done since the last good checkpoint.
            is_saving: Whether a checkpoint is being written, which takes room itself.
        """
        try:
            return self._look(has_unsaved=has_unsaved, is_saving=is_saving)
        except OSError:  # the disk's trouble; the journal reports it
            return Word(0)

    def _look(self, *, has_unsaved: bool, is_saving: bool) -> Word:
        if self._fate() is not None:
            return Word.GONE
        if self._kept is not None and not self._kept.is_dir():
            self._notices.append(
                f"The checkpoint {self._kept} has vanished: it was deleted or moved away. The run "
                f"saves anew after this step."
            )
            self._kept = None
            return Word.NOTICE | Word.SAVE
        room = self._room()
        if room is None:
            return Word(0)
        word = Word.TIGHT if room < (3 if is_saving else 2) * self._needed_bytes else Word(0)
        return word if is_saving or not has_unsaved else word | self._judge_room(room)

    def _judge_room(self, room: int) -> Word:
        """Whether to save now, with steps that are not saved and this much room."""
        fall = 0 if self._last_room is None else max(0, self._last_room - room)
        self._last_room = room
        if room < self._needed_bytes:
            if not self._is_short:
                self._is_short = True
                self._notices.append(
                    f"{self._shortage()} The run goes on, and saves as soon as there is room."
                )
                return Word.NOTICE
            return Word(0)
        if self._is_short or room - 2 * fall < self._needed_bytes:
            self._is_short = False
            return Word.SAVE
        return Word(0)

    def take_notices(self) -> list[str]:
        """Sentences for the reader since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def shortage(self) -> str:
        """Why the next checkpoint cannot be kept; empty if it can."""
        room = self._room()
        return "" if room is None or room >= self._needed_bytes else self._shortage()

    def make_room(self) -> None:
        """Drop checkpoints older than the last good one, if the next one fits only then."""
        free = disk_of(self._checkpoints).free_bytes
        older = self._older()
        if free is None or free >= self._needed_bytes or not older:
            return
        if free + sum(map(stored_bytes, older)) >= self._needed_bytes:
            for each in older:
                shutil.rmtree(each, ignore_errors=True)

    def fate(self) -> Fate | None:
        """What became of the folder; None while it is where it was, or nobody can say."""
        try:
            return self._fate()
        except OSError:
            return None

    def _fate(self) -> Fate | None:
        own = os.fstat(self._handle)
        try:
            there = self.folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is not None and os.path.samestat(own, there):
            if self._fence is not None and self._fence.is_passed:
                sentence = f"Newer ranks have taken over the run's folder {self.folder}"
                return Fate(sentence, None, "They go on from the newest whole checkpoint.")
            return None
        home = Path(f"/proc/self/fd/{self._handle}").readlink()
        with suppress(OSError):
            if os.path.samestat(own, home.stat()):
                return Fate(f"The run's folder {self.folder} was moved to {home}", home)
        sentence = f"The run's folder {self.folder} has vanished: it was deleted or unmounted"
        if there is not None and any(
            (self.folder / name).exists() for name in (RESOLVED, "journal", CHECKPOINTS)
        ):
            return Fate(f"{sentence}, and another run's stands in its place", None)
        return Fate(sentence, self.folder)

    @property
    def _checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def _older(self) -> list[Path]:
        """Checkpoints before the last good one."""
        every = list(find_checkpoints(self._checkpoints))
        return every[every.index(self._kept) + 1 :] if self._kept in every else []

    def _room(self) -> int | None:
        """Bytes that the next checkpoint may take; None where the disk does not say."""
        free = disk_of(self._checkpoints).free_bytes
        if free is None or free >= self._needed_bytes:
            return free
        return free + sum(map(stored_bytes, self._older()))

    def _shortage(self) -> str:
        needed, disk = self._needed_bytes, disk_of(self._checkpoints)
        short = format_bytes(needed - (disk.free_bytes or 0))
        kept = f"{self._kept} is kept" if self._kept is not None else "none is kept yet"
        return f"The next checkpoint needs {format_bytes(needed)} and {disk}; {kept}. Free {short}."
