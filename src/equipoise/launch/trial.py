"""Train a few steps in a separate process, within a time limit, and report how it ended.

Why
    A search over real runs meets every way in which a run can fail, and must survive each: ranks
    that the kernel kills for memory, ranks that wait forever, settings that are refused.

What it decides
    The trial is ``equipoise train`` with its own folder; its exit code and its last words say what
    happened. After its time limit it is asked to end at once, as by a second Ctrl-C. The
    seconds of a step are the median of all steps but the first, which warms up.

Kept true (tests/unit/launch/test_trial.py, tests/multi/plan/test_plan_measure.py)
    Each cause is recognised; a killed rank and a trial over its limit leave no process behind.
"""

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.errors import EquipoiseError, FitError, SpecError
from equipoise.launch.agent import end_with_parent
from equipoise.observe.reader import read_run

_ASK_S = 1.0
"""Between asking a trial to end and asking again, which ends it at once."""

_RESUME = " Run the same command again"
"""Advice that is useless for a trial, which runs once."""

_CAUSES = (
    ("out of memory", re.compile(r"can't allocate memory|out of memory|bad_alloc|MemoryError")),
    ("killed", re.compile(r"was ended by SIGKILL")),
    ("hang", re.compile(r"^Rank \d+ has waited \d+ s in ", re.MULTILINE)),
)


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """How a trial ended."""

    step_s: float | None
    """None if it failed."""
    cause: str
    message: str
    wall_s: float


def run_trial(arguments: Sequence[str], folder: Path, *, limit_s: float) -> TrialEnd:
    """Train and measure.

    Args:
        arguments: Arguments of ``equipoise train``, without ``--out``.
        folder: The trial's folder; emptied first, and its checkpoints are removed at the end.
        limit_s: Time limit of the trial [s].

    Raises:
        KeyboardInterrupt: the user ended the search; the trial has been ended.
    """
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "equipoise.cli.main", "train", *arguments]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            [*command, "--out", str(folder), "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                _end(process)
        wall_s = time.monotonic() - begin
        words.seek(0)
        said = words.read().strip()
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    if code == 0:
        return _measure(folder, wall_s)
    if code is None:
        text = f"No end after {limit_s:g} s. Raise --trial-seconds if it was only slow."
        return TrialEnd(None, "time limit", text, wall_s)
    return TrialEnd(None, cause_of(code, said), last_words(code, said), wall_s)


def cause_of(code: int, said: str) -> str:
    """Why a run failed, by its exit code and its output.

    >>> cause_of(6, "Rank 1 of 2 (pid 7) was ended by SIGKILL; it left no traceback.")
    'killed'
    """
    if code == SpecError.exit_code:
        return "refused"
    if code == FitError.exit_code:
        return "does not fit"
    return next((cause for cause, sign in _CAUSES if sign.search(said)), "fault")


def last_words(code: int, said: str) -> str:
    """The last sentence of a run, without its advice on resuming.

    >>> last_words(6, "Rank 1 of 2 (pid 7) was ended by SIGKILL. Run the same command again.")
    'Rank 1 of 2 (pid 7) was ended by SIGKILL.'
    """
    lines = said.splitlines() or [f"It returned {code} without a word."]
    # An error is a sentence, then a rank's traceback; a bug is only a traceback.
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line.partition(_RESUME)[0].strip()


def _measure(folder: Path, wall_s: float) -> TrialEnd:
    try:
        steps = [float(each) for each in read_run(folder).step_s[1:]]
    except EquipoiseError as error:
        return TrialEnd(None, "fault", str(error), wall_s)
    if not steps:
        return TrialEnd(None, "fault", f"{folder} has no step after the first.", wall_s)
    return TrialEnd(statistics.median(steps), "", "", wall_s)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask twice, like Ctrl-C: the second time the ranks end at once."""
    while process.poll() is None:
        process.terminate()
        try:
            process.wait(_ASK_S)
        except subprocess.TimeoutExpired:
            continue
