"""Rehearse faults on a run: an undisturbed rehearsal first, then each fault beside it.

Why
    Whether a run survives its faults is known after the first one, which is too late. The
    machinery that a fault needs depends on model, layout and disk, so that a rehearsal of another
    run says little.

What it decides
    Nothing about faults: those are rows of ``fault.drill.catalog``. This makes the scratch folder,
    runs one rehearsal after the other, and leaves nothing behind.

Kept true (tests/multi/fault/test_drill.py)
    A fault that did not fire, was not named or not recovered from fails the drill; whatever ends
    it, its processes and its scratch folder are gone.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.disk import writing
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.data.progress import Progress, SilentProgress
from equipoise.fault.drill.catalog import FAULTS
from equipoise.fault.drill.outcome import Drill, DrillRow
from equipoise.fault.drill.stage import DrillRun, Stage

_GONE_S, _LOOK_S = 10.0, 0.05
"""For which the scratch folder is removed again and again, and how often [s]."""

_MOST_REPEATS = 10_000


@dataclass(frozen=True, slots=True)
class DrillRequest:
    """Which faults to rehearse on a run, and how often."""

    run: DrillRun
    only: tuple[str, ...] = ()
    """Names of ``FAULTS``; all unless given."""
    repeat: int = 1
    """Rehearsals of each fault, at other places and moments every time."""
    seed: int = 0
    """Places and moments follow from it."""
    minutes: float = 2.0
    """How long ``poisson`` lasts."""
    out: Path | None = None
    """A new folder for all runs of the drill, which stays; a temporary one unless given."""

    def require(self) -> None:
        """Refuse what cannot be rehearsed.

        Raises:
            SpecError: an unknown fault, no repetition, or a folder that is not new.
        """
        for name in self.only:
            if name not in FAULTS:
                raise SpecError(
                    f'--only: no such fault: "{name}". Nearest: {nearest(name, FAULTS)}. '
                    f"All: {', '.join(FAULTS)}."
                )
        if self.repeat < 1:
            raise SpecError(f"--repeat {self.repeat} rehearses nothing. Give 1 or more.")
        if self.repeat > _MOST_REPEATS:
            raise SpecError(
                f"--repeat {self.repeat:,} is more than {_MOST_REPEATS:,}, which take days. Give "
                f"{_MOST_REPEATS:,} or less."
            )
        if not 0 < self.minutes <= 10_000:
            raise SpecError(f"--minutes {self.minutes:g}: give more than 0, and at most 10,000.")
        if self.out is not None and self.out.exists():
            raise SpecError(
                f"{self.out} exists, and a drill begins with a new folder. Choose another with "
                f"--out, or leave --out out."
            )


def drill(request: DrillRequest, progress: Progress | None = None) -> Drill:
    """Rehearse faults.

    Raises:
        SpecError: as ``DrillRequest.require``; or the run itself is refused.
        FaultError: the run does not reach its end without a fault, or a rehearsal hangs.
    """
    request.require()
    progress = progress or SilentProgress()
    names = [name for name in FAULTS if not request.only or name in request.only]
    began = time.monotonic()
    with _scratch(request.out) as root:
        stage = Stage(request.run, root, request.seed, request.minutes)
        progress.start("Rehearsing", 1 + len(names) * request.repeat)
        try:
            stage.prepare()
            progress.advance()
            rows = tuple(_rehearse(stage, name, request, progress) for name in names)
        finally:
            progress.finish()
            shutil.rmtree(stage.bytecode, ignore_errors=True)
    return Drill(rows, stage.ranks, stage.scaled, time.monotonic() - began)


def _rehearse(stage: Stage, name: str, request: DrillRequest, progress: Progress) -> DrillRow:
    fault = FAULTS[name]
    if why := fault.why_not(stage):
        progress.advance(request.repeat)
        return DrillRow(name, fault.number, left_out=why)
    outcomes = []
    for repeat in range(request.repeat):
        outcomes.append(fault.rehearse(stage, repeat))
        stage.rehearsed.setdefault(name, outcomes[-1])
        progress.advance()
    return DrillRow(name, fault.number, tuple(outcomes))


@contextmanager
def _scratch(out: Path | None) -> Iterator[Path]:
    """A folder that stays if it was asked for, and is removed otherwise."""
    if out is not None:
        with writing("out", out):
            out.mkdir(parents=True)
        yield out.resolve()
        return
    root = Path(tempfile.mkdtemp(prefix="equipoise-drill-"))
    try:
        yield root.resolve()
    finally:
        until = time.monotonic() + _GONE_S
        while root.exists() and time.monotonic() < until:  # its last ranks may still be dying
            shutil.rmtree(root, ignore_errors=True)
            time.sleep(_LOOK_S)


def names_of(text: str) -> Sequence[str]:
    """Names between commas.

    >>> names_of("kill, hang")
    ['kill', 'hang']
    """
    return [name.strip() for name in text.split(",") if name.strip()]
