"""What people and schedulers do to a run: stop it, start it twice or otherwise (F14, F17, F18)."""

import os
import signal
import time
from pathlib import Path

from equipoise.fault.drill.attempt import Attempt
from equipoise.fault.drill.facts import processes, state
from equipoise.fault.drill.injection import Fired, Injection, ask, proven
from equipoise.fault.drill.judge import SAME_COMMAND, UNDISTURBED, Expected, judge, strike
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import STEPS, Stage


def terminate(stage: Stage, repeat: int) -> Rehearsal:
    """The command gets SIGTERM; it saves, ends with 0, and the same command goes on."""
    step = stage.draw("terminate", repeat).randint(2, STEPS // 2)
    folder = stage.folder("terminate")
    ask(folder / "drill", [Injection("mark", 0, "forward", step)])
    with stage.start(folder, drill=folder / "drill") as attempt:
        attempt.wait_until(lambda: proven(folder / "drill"))
        attempt.process.terminate()
        code = attempt.end()
    fired = proven(folder / "drill")
    if not fired or state(folder, STEPS):
        return Rehearsal("", said=attempt.last_words)
    line = attempt.first("Stopping after this step and saving")
    with stage.start(folder) as again:
        way = SAME_COMMAND if (code, again.end()) == (0, 0) else ""
    resumed = again.first(r"Resuming after step ([1-9]\d*) from ")
    return Rehearsal(
        injected=f"SIGTERM in step {fired[0].step}",
        detected_by="launcher" if line else "",
        is_named=line is not None and resumed is not None,
        detected_s=None if line is None else line.at_s - fired[0].at_s,
        lost_tokens=0,
        is_equal=stage.is_equal(folder) if way else None,
        goes_on=way,
        said=resumed.text if resumed else attempt.last_words,
    )


def desync(stage: Stage, repeat: int) -> Rehearsal:
    """One rank plans a step from other documents; all stop before a gradient is summed."""
    step = stage.draw("desync", repeat).randint(2, STEPS - 2)
    rank = (stage.ranks - 1 - repeat) % stage.ranks
    expected = Expected("other documents", "digest of the plan", _otherwise, (SAME_COMMAND,))
    injection = Injection("shift-data", rank, "optimizer", step)
    return strike(stage, "desync", injection, expected)


def _otherwise(fired: Fired) -> str:
    return rf"Ranks? [\d, and more]+ packed step {fired.step + 1} otherwise than rank 0"


def second_gang(stage: Stage, repeat: int) -> Rehearsal:
    """The same command is started a second time beside a run; it is refused, the run goes on."""
    step = stage.draw("second", repeat).randint(2, STEPS // 2)
    folder = stage.folder("second-gang")
    with _held(stage, folder, step) as attempt:
        fired = _stopped(attempt, folder)
        if fired is None:
            return Rehearsal("", said=attempt.last_words)
        begun_s = time.monotonic()
        with stage.start(folder) as second:
            code = second.end()
        os.kill(fired.process, signal.SIGCONT)
        way = UNDISTURBED if attempt.end() == 0 else ""
    line = second.first("Another run is writing to ")
    return Rehearsal(
        injected=f"second command in step {fired.step}",
        detected_by="lock" if line else "",
        is_named=line is not None and code == 2,
        detected_s=None if line is None else line.at_s - begun_s,
        is_equal=stage.is_equal(folder) if way else None,
        goes_on=way,
        said=second.last_words,
    )


def older_gang(stage: Stage, repeat: int) -> Rehearsal:
    """Ranks wake up after newer ones have taken their folder; they write nothing more."""
    step = stage.draw("older", repeat).randint(2, STEPS // 2)
    folder = stage.folder("older-gang")
    with _held(stage, folder, step) as attempt:
        fired = _stopped(attempt, folder)
        if fired is None:
            return Rehearsal("", said=attempt.last_words)
        gang = [*processes(folder).values()]
        for process in gang:
            os.kill(process, signal.SIGSTOP)
        lock = folder / ".lock"
        lock.write_text(f"{int(lock.read_text().split()[0]) + 1:020d}")
        before, began_s = contents(folder / "checkpoint"), time.monotonic()
        for process in gang:
            os.kill(process, signal.SIGCONT)
        attempt.end()
        is_kept = contents(folder / "checkpoint") == before
    pattern = "Newer ranks have taken over" if is_kept else "nothing: checkpoints were touched"
    expected = Expected("taken folder", "epoch", lambda _: pattern, (SAME_COMMAND,))
    woken = Fired(0, fired.rank, fired.process, fired.phase, fired.step, began_s, time.time())
    return judge(stage, folder, attempt, woken, expected)


def _held(stage: Stage, folder: Path, step: int) -> Attempt:
    """A run whose rank 0 stops in a step, so that it does not end before it is met."""
    ask(folder / "drill", [Injection("stop", 0, "forward", step)])
    return stage.start(folder, drill=folder / "drill")


def _stopped(attempt: Attempt, folder: Path) -> Fired | None:
    attempt.wait_until(lambda: proven(folder / "drill"))
    fired = proven(folder / "drill")
    return fired[0] if fired else None


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}
