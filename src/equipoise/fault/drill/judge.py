"""Judge a rehearsal by what the run said, what it journaled and what it saved.

What it decides
    A fault is named if a line of the command matches what was injected: kind, rank, process, step,
    weight. The run has gone on as its fault allows: ``undisturbed``, ``by itself`` after a
    restart, or with the ``same command``, which is then started again without the fault. Whatever
    the way, the state at the end must be that of the undisturbed run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equipoise.fault.drill.attempt import Attempt, SaidLine
from equipoise.fault.drill.facts import events, resumed_s
from equipoise.fault.drill.injection import Fired, Injection, ask, proven
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import Stage

UNDISTURBED, BY_ITSELF, SAME_COMMAND = "undisturbed", "by itself", "same command"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run is to make of a fault."""

    what: str
    """The fault, in a word or two."""
    by: str
    """Who detects it."""
    names: Callable[[Fired], str]
    """A pattern of the line that names it rightly."""
    ways: tuple[str, ...] = (BY_ITSELF,)
    """How the run may go on."""


def strike(
    stage: Stage, name: str, injection: Injection, expected: Expected, *more: str
) -> Rehearsal:
    """Rehearse one injection from the first step on.

    Args:
        stage: Of the rehearsal.
        name: Of the run's folder.
        injection: The fault.
        expected: What is to follow.
        more: Further words of the command.
    """
    folder = stage.folder(name)
    ask(folder / "drill", [injection])
    with stage.start(folder, *more, drill=folder / "drill") as attempt:
        attempt.end()
    fired = proven(folder / "drill")
    if not fired:
        return Rehearsal("", said=attempt.last_words)
    return judge(stage, folder, attempt, fired[0], expected, *more)


def judge(
    stage: Stage,
    folder: Path,
    attempt: Attempt,
    fired: Fired,
    expected: Expected,
    *more: str,
) -> Rehearsal:
    """What became of a fault, once its command has ended; starts the same command again if it must.

    Args:
        stage: Of the rehearsal.
        folder: The run's.
        attempt: Its command, which has ended.
        fired: The proof of the fault.
        expected: What is to follow.
        more: Further words of the command.
    """
    line = attempt.first(expected.names(fired))
    way, since = _way(folder, attempt.end()), None
    if not way and SAME_COMMAND in expected.ways:
        since = time.time()
        with stage.start(folder, *more) as again:
            way = SAME_COMMAND if again.end() == 0 else ""
    is_back = way in expected.ways
    place = f"rank {fired.rank} in {fired.phase} of step {fired.step}" if fired.step else ""
    return Rehearsal(
        injected=", ".join(filter(None, (expected.what, fired.detail, place))),
        detected_by=expected.by if line else "",
        is_named=line is not None,
        detected_s=_after(line, fired),
        resumed_s=None if way == UNDISTURBED else resumed_s(folder, since),
        lost_tokens=stage.lost_tokens(folder, fired.step),
        is_equal=stage.is_equal(folder) if is_back else None,
        goes_on=way if is_back else "",
        said=line.text if line else attempt.last_words,
    )


def _after(line: SaidLine | None, fired: Fired) -> float | None:
    return None if line is None else line.at_s - fired.at_s


def _way(folder: Path, code: int) -> str:
    """How a command that has ended came to its last step; "" if it did not."""
    if code:
        return ""
    return BY_ITSELF if events(folder, "recovery") else UNDISTURBED
