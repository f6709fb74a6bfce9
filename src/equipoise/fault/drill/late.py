"""Ranks that do not come, come late, or are always late (F5, F6, F7)."""

import os
import signal
import time

from equipoise.fault.drill.injection import Fired, Injection, ask, proven
from equipoise.fault.drill.judge import (
    BY_ITSELF,
    SAME_COMMAND,
    UNDISTURBED,
    Expected,
    judge,
    strike,
)
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import STEPS, Stage

DEADLINE_S = 15
"""When a hang ends the ranks; by itself this follows the steps and is at least 30 s."""

_PAUSE_S = 5.0
"""How long a rank that comes back is away."""

_NARROW = 8e6
"""What a narrow link carries [bytes/s]."""

_SLOWER = 0.5
"""Share of the median step by which a slow rank computes longer."""


def hang(stage: Stage, repeat: int) -> Rehearsal:
    """A rank is stopped for good; it is named, ended, and all start again."""
    draw = stage.draw("hang", repeat)
    rank = (stage.ranks - 1 - repeat) % stage.ranks
    injection = Injection("stop", rank, "forward", draw.randint(3, STEPS - 1))
    phrase = f"layout.deadline_s of hang -> {DEADLINE_S}"
    if phrase not in stage.scaled:
        stage.scaled.append(phrase)
    return strike(
        stage,
        "hang",
        injection,
        Expected("SIGSTOP", "watchdog", _awaited),
        f"--layout.deadline_s={DEADLINE_S}",
    )


def pause(stage: Stage, repeat: int) -> Rehearsal:
    """A rank is stopped for five seconds; it is named, and the run goes on with it."""
    draw = stage.draw("pause", repeat)
    rank = (stage.ranks - 1 - repeat) % stage.ranks
    folder = stage.folder("pause")
    ask(folder / "drill", [Injection("stop", rank, "forward", draw.randint(3, STEPS - 1))])
    with stage.start(folder, drill=folder / "drill") as attempt:
        attempt.wait_until(lambda: proven(folder / "drill"))
        for fired in proven(folder / "drill"):
            time.sleep(_PAUSE_S)
            os.kill(fired.process, signal.SIGCONT)
        attempt.end()
    struck = proven(folder / "drill")
    if not struck:
        return Rehearsal("", said=attempt.last_words)
    what = f"SIGSTOP for {_PAUSE_S:g} s"
    expected = Expected(what, "watchdog", _awaited, ways=(UNDISTURBED,))
    return judge(stage, folder, attempt, struck[0], expected)


def slow(stage: Stage, repeat: int) -> Rehearsal:
    """A rank computes half a step longer in every step; it is named, and nothing ends."""
    rank = (stage.ranks - 1 - repeat) % stage.ranks
    injection = Injection("slow", rank, "forward", 3, amount=_SLOWER)
    what = f"busy loop of {_SLOWER:.0%} of a step"
    return strike(
        stage,
        "slow",
        injection,
        Expected(what, "watchdog", _slow, ways=(UNDISTURBED,)),
    )


def slow_link(stage: Stage, repeat: int) -> Rehearsal:
    """What a rank sends is paced to a few MB/s; its link is named, no rank is, and nothing ends."""
    rank = (stage.ranks - 1 - repeat) % stage.ranks
    injection = Injection("narrow", rank, "forward", 3, amount=_NARROW)
    expected = Expected(
        f"{_NARROW / 1e6:g} MB/s", "kernel's counters", _narrowed, ways=(UNDISTURBED,)
    )
    return strike(stage, "slow-link", injection, expected)


def mismatch(stage: Stage, repeat: int) -> Rehearsal:
    """A rank calls one collective more; both sides are named, and all start again."""
    draw = stage.draw("mismatch", repeat)
    rank = (stage.ranks - 1 - repeat) % stage.ranks
    injection = Injection("cut-in", rank, "forward", draw.randint(3, STEPS - 1))
    expected = Expected("all_reduce", "watchdog", _mismatched, (BY_ITSELF, SAME_COMMAND))
    return strike(stage, "mismatch", injection, expected)


def _narrowed(fired: Fired) -> str:
    return rf"(link|links) from rank {fired.rank}\b.* (is|are) slow: "


def _mismatched(fired: Fired) -> str:
    return rf"does not match: .*rank {fired.rank} called .*all_reduce of float32 \[3\]"


def _awaited(fired: Fired) -> str:
    return rf"Rank \d+ has waited .* rank {fired.rank} has not come"


def _slow(fired: Fired) -> str:
    return rf"(?i)\brank {fired.rank}\b.*\b(slow|slower|longer)\b"
