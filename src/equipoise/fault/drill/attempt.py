"""One training command of a drill, in a process of its own: its words as they come, and its end.

What it decides
    Nothing. Words are stamped when they arrive, by the clock that injections are stamped by, so
    that a detection is timed from the injection until the user could read of it.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from equipoise.base.errors import FaultError
from equipoise.fault.drill.injection import VARIABLE
from equipoise.launch.agent import end_with_parent

TRAIN = ("-m", "equipoise.cli.main", "train")

_DEADLINE_S = 600.0
"""For one command of a drill, which takes half a minute; then it counts as hanging."""

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class SaidLine:
    """What the command wrote, and when by the clock that never goes back [s]."""

    text: str
    at_s: float


def _environment(drill: Path | None, bytecode: Path) -> dict[str, str]:
    """This process's; where it compiles every module anew, commands of a drill do so but once."""
    made = dict(os.environ)
    if drill is not None:
        made[VARIABLE] = str(drill)
    if made.pop("PYTHONDONTWRITEBYTECODE", ""):
        made.setdefault("PYTHONPYCACHEPREFIX", str(bytecode))
    return made


class Attempt:
    """A running ``equipoise train``; leaving the block ends it, and its ranks with it.

    Args:
        words: After ``equipoise train``.
        drill: Folder of what is injected; nothing is unless given.
        bytecode: Folder of modules that the commands of a drill have compiled.
    """

    def __init__(self, words: Sequence[str], drill: Path | None, bytecode: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *TRAIN, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(drill, bytecode),
            start_new_session=True,  # Ctrl-C is the drill's, which ends this
            preexec_fn=end_with_parent,
        )
        self.lines: list[SaidLine] = []
        self.errors: list[SaidLine] = []
        """What went to standard error."""
        pipes = (self.process.stdout, self.lines), (self.process.stderr, self.errors)
        self._readers = [
            threading.Thread(target=_collect, args=pipe, daemon=True) for pipe in pipes
        ]
        for reader in self._readers:
            reader.start()

    def wait_until(self, is_so: Callable[[], object]) -> bool:
        """Wait for something while the command runs; whether it came."""
        deadline = time.monotonic() + _DEADLINE_S
        while not is_so():
            if self.process.poll() is not None:
                return bool(is_so())
            if time.monotonic() > deadline:
                raise FaultError(f"A rehearsal has done nothing for {_DEADLINE_S:g} s.")
            time.sleep(_LOOK_S)
        return True

    def end(self) -> int:
        """Wait for the command's end; its exit code.

        Raises:
            FaultError: it does not end.
        """
        try:
            code = self.process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise FaultError(f"A rehearsal has not ended after {_DEADLINE_S:g} s.") from error
        for reader in self._readers:
            reader.join()
        return code

    def first(self, pattern: str) -> SaidLine | None:
        """The first line of either stream in which a pattern is found."""
        lines = sorted([*self.errors, *self.lines], key=lambda each: each.at_s)
        return next((each for each in lines if re.search(pattern, each.text)), None)

    @property
    def last_words(self) -> str:
        """The last line on standard error."""
        texts = [each.text for each in self.errors if each.text.strip()]
        return texts[-1] if texts else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its agent and ranks end with it
            self.process.wait()
        for reader in self._readers:
            reader.join(1.0)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _collect(pipe: IO[str], lines: list[SaidLine]) -> None:
    with suppress(ValueError):  # closed under it
        lines.extend(SaidLine(text.rstrip("\n"), time.monotonic()) for text in pipe)
