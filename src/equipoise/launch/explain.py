"""How ranks ended, in a sentence: from their last words, their agent's report, and the kernel's.

Kept true (tests/unit/launch/test_local.py, tests/unit/launch/test_stem.py)
    The cause is named, and no rank that only lost another; errors that would come again are told
    apart from faults.
"""

import errno
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import (
    CorruptError,
    EquipoiseError,
    FaultError,
    HungError,
    LayoutError,
    MismatchError,
    NonFiniteError,
)
from equipoise.launch.ends import Killed
from equipoise.launch.gang import Launch
from equipoise.launch.last_words import Words

RESUME = "Run the same command again to resume from the last checkpoint."


@dataclass(frozen=True, slots=True)
class RanksEnd:
    """How ranks ended before their work was done."""

    kind: str
    """``killed``, ``failed``, ``hung``, ``corrupt`` or ``non-finite``; ``refused`` for any other
    error of ours, which would come again."""
    sentence: str
    """Who ended and of what."""
    rank: int | None = None
    """None where nobody knows."""
    step: int | None = None
    """The last step that they had finished since they were started; None before any."""
    advice: str = ""
    more: str = ""
    """A traceback, or the agent's last lines."""
    exit_code: int = FaultError.exit_code

    def error(self, reason: str = "") -> EquipoiseError:
        """What to raise where nothing follows, and why nothing does."""
        words = " ".join(filter(None, (self.sentence, reason, self.advice)))
        text = f"{words}\n{self.more}" if self.more else words
        is_fault = self.exit_code == FaultError.exit_code
        error = FaultError(text) if is_fault else EquipoiseError(text)
        error.exit_code = self.exit_code
        return error


def port_taken(port: int, error: OSError) -> str:
    """The message for a port that ranks cannot meet at."""
    return (
        f"Port {port} cannot be used ({error.strerror}). Choose another with --port, or omit "
        f"--port to take any free one."
    )


def is_gone(folder: Path) -> bool:
    """Whether a run's folder is not there any more; not where nobody may look."""
    try:
        return not folder.is_dir()
    except OSError:
        return False


def folder_gone(folder: Path) -> str:
    """The message for a run whose folder vanishes before its ranks have begun, at any moment."""
    return (
        f"The run's folder {folder} is gone, so its ranks cannot start. Put it back, then run the "
        f"same command again to resume."
    )


def refuse(launch: Launch, error: OSError) -> RanksEnd:
    """Ranks that could not be started, and why; it would come again."""
    if launch.port and error.errno in (errno.EADDRINUSE, errno.EACCES):
        text = port_taken(launch.port, error)
        return RanksEnd("refused", text, exit_code=LayoutError.exit_code)
    why = explain_refusal(error, launch.folder / "logs")
    return RanksEnd(
        "refused", f"The ranks of {launch.folder} cannot be started ({why}).", advice=RESUME
    )


_KINDS = {
    CorruptError.__name__: "corrupt",
    HungError.__name__: "hung",
    MismatchError.__name__: "failed",
    NonFiniteError.__name__: "non-finite",
}
"""Kinds of our own errors, by their classes' names; any other would come again."""

_LOST = re.compile(r"peer|Broken pipe|remote process exited|Connection reset|recvValue failed")
"""What a rank says of whom it has lost; the cause is elsewhere."""


def explain(
    launch: Launch,
    log: str,
    faults: Sequence[Words],
    seen: Killed | None = None,
    traces: Sequence[list[str]] = (),
) -> RanksEnd:
    """Who ended first, and of what.

    Args:
        launch: The ranks.
        log: What their agent has written.
        faults: Their last words, in order.
        seen: A rank that a signal ended, if that was seen.
        traces: The traceback that ends each rank's error stream.
    """
    own = [event for event in faults if event["name"] == "error"]
    killed = _killed_first(launch, log, seen)
    for event in own:
        message, kind = str(event["message"]), _KINDS.get(str(event["type"]), "refused")
        if killed is not None and kind == "refused" and _LOST.search(message):
            continue  # a save, for instance, that the killed rank did not finish
        sentence, mark, advice = message.partition(" Run the same command again")
        code = int(str(event["exit_code"]))
        return RanksEnd(kind, sentence, event["rank"], None, f"{mark}{advice}".strip(), "", code)
    if killed is not None:
        return killed
    # A rank whose peer died reports a broken connection; the first other error is the cause.
    for event in [*(e for e in faults if not _LOST.search(str(e["message"]))), *faults]:
        message = (str(event["message"]).strip().splitlines() or [str(event["type"])])[0]
        sentence = f"Rank {event['rank']} of {launch.ranks} failed: {event['type']}: {message}"
        trace = str(event["traceback"]).rstrip()
        return RanksEnd("failed", sentence, event["rank"], None, RESUME, trace)
    for rank, lines in enumerate(traces):
        if lines:
            sentence = f"Rank {rank} of {launch.ranks} failed before it began: {lines[-1]}"
            return RanksEnd("failed", sentence, rank, None, RESUME, "\n".join(lines))
    tail = "\n".join(log.strip().splitlines()[-15:])
    return RanksEnd("killed", "The ranks ended without a word.", None, None, RESUME, tail)


def _name_signal(number: int) -> str:
    """A signal's name; those between SIGRTMIN and SIGRTMAX have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _killed(launch: Launch, killed: Killed) -> RanksEnd:
    """A rank that a signal ended."""
    sentence = (
        f"Rank {killed.rank} of {launch.ranks} (pid {killed.process}) was ended by "
        f"{_name_signal(killed.signal)}; it left no traceback."
    )
    return RanksEnd("killed", sentence, killed.rank, None, RESUME)


def _killed_first(launch: Launch, log: str, seen: Killed | None) -> RanksEnd | None:
    """The first rank that a signal ended, other than the agent's own.

    Our agent reports it before it ends the others, in whose ends the launcher may look first.
    torchrun's names it last, after them.
    """
    pattern = r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)"
    ends = [(int(rank), -int(code), int(pid)) for rank, code, pid in re.findall(pattern, log)]
    killed = [Killed(rank, pid, number) for rank, number, pid in ends if _is_foreign(number)]
    is_first = bool(ends) and _is_foreign(ends[0][1]) and "Root Cause" not in log
    if seen is not None and not is_first:
        return _killed(launch, seen)
    return _killed(launch, killed[0]) if killed else None


def _is_foreign(number: int) -> bool:
    """Whether a negative exit code is a signal that no agent sends."""
    return number > 0 and number != signal.SIGTERM
