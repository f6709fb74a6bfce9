"""What a drill asks of a rank, and the proof that it happened.

What it decides
    A drill's folder holds ``injections.json``, which ranks find by an environment variable. A rank
    that reaches the place of an injection writes a line to ``fired.jsonl``, flushes it to the
    disk, and then does what is asked. So each fires once, however often ranks start again, and a
    drill whose fault did not fire is known by the missing line.

Kept true (tests/unit/fault/drill/test_injection.py)
    What fired does not fire again; a torn line proves nothing.
"""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "EQUIPOISE_DRILL"
"""Names the folder; ranks outside a drill do not have it."""

_ASKED, _FIRED = "injections.json", "fired.jsonl"


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault, and where it strikes."""

    act: str
    """A row of ``fault.drill.acts.ACTS``."""
    rank: int
    phase: str
    """Where: a phase of the rank's journal, as ``forward``, ``wait``, ``save``."""
    step: int
    """In the first such phase of this step or of a later one."""
    after_s: float = 0.0
    """From the phase's begin on [s]; whatever the rank does by then."""
    amount: float = 0.0
    """How much, in the act's own unit."""


@dataclass(frozen=True, slots=True)
class Fired:
    """An injection that happened."""

    number: int
    """Which of the folder's."""
    rank: int
    process: int
    phase: str
    """What the rank was doing, which is later than asked for where ``after_s`` passed."""
    step: int
    at_s: float
    """By the clock of the machine that never goes back [s]."""
    t: float
    """By the clock on the wall, as a journal's ``t`` [s]."""
    detail: str = ""
    """What was hit, as the name of a weight."""


def ask(folder: Path, injections: Sequence[Injection]) -> None:
    """Write what ranks are to do; whatever has fired there is forgotten."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FIRED).unlink(missing_ok=True)
    rows = [dataclasses.asdict(each) for each in injections]
    (folder / _ASKED).write_text(json.dumps(rows))


def asked(folder: Path) -> list[Injection]:
    """What is asked for, in order."""
    return [Injection(**row) for row in json.loads((folder / _ASKED).read_text())]


def prove(folder: Path, number: int, rank: int, phase: str, step: int, detail: str = "") -> None:
    """Write that an injection fires now; returns once the line is on the disk."""
    fired = Fired(number, rank, os.getpid(), phase, step, time.monotonic(), time.time(), detail)
    line = json.dumps(dataclasses.asdict(fired)) + "\n"
    file = os.open(folder / _FIRED, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def proven(folder: Path) -> list[Fired]:
    """What has fired, in order."""
    path = folder / _FIRED
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
    return [Fired(**row) for row in rows]
