"""Ranks that are killed in a step (F1) or in a save (F2), or starved of memory (F12)."""

from equipoise.fault.drill.acts import SAVE_POINTS, SHARED_POINTS
from equipoise.fault.drill.injection import Fired, Injection
from equipoise.fault.drill.judge import Expected, strike
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import EVERY, STEPS, Stage

POINTS = ("forward", "backward", "wait", "reduce", "optimizer", "save", "random")
"""Where a rank is killed, one after the other; ``wait`` is a collective of all ranks."""

_LONGEST_S = 0.5
"""A random moment is within this of the begin of a step's forward pass, or of a save."""

_READY_WITHIN_S = 300
"""Deadline of waits while a rank waits until others are ready [s]."""

_BLOCK_BYTES = 64 << 10
"""What a starved rank cannot allocate any more."""


def _killed(fired: Fired) -> str:
    return rf"Rank {fired.rank} of \d+ \(pid {fired.process}\) was ended by SIGKILL"


def kill(stage: Stage, repeat: int) -> Rehearsal:
    """A rank is ended by SIGKILL; all start again by themselves."""
    draw = stage.draw("kill", repeat)
    point = POINTS[repeat % len(POINTS)]
    rank = (stage.ranks - 1 - repeat // len(POINTS)) % stage.ranks
    phase, step, after_s = point, draw.randint(2, STEPS - 1), 0.0
    if point == "save":
        step = EVERY
    if point == "random":
        phase, after_s = "forward", draw.uniform(0.001, _LONGEST_S)
    injection = Injection("kill", rank, phase, step, after_s)
    return strike(stage, "kill", injection, Expected("SIGKILL", "launcher", _killed))


def kill_ready(stage: Stage, repeat: int) -> Rehearsal:
    """A rank is ended once ranks of the next start are ready; those take the places."""
    draw = stage.draw("kill-ready", repeat)
    rank, step = (stage.ranks - 1 - repeat) % stage.ranks, draw.randint(2, STEPS - 1)
    injection = Injection("kill-when-ready", rank, "forward", step)
    expected = Expected("SIGKILL", "launcher", _killed)
    more = "--fault.spares=at-once", f"--layout.deadline_s={_READY_WITHIN_S}"
    return strike(stage, "kill-ready", injection, expected, *more)


def kill_saving(stage: Stage, repeat: int) -> Rehearsal:
    """A rank is ended while a checkpoint is written beside the steps.

    Right before each step of a save, one after the other, then at random moments.
    """
    draw = stage.draw("kill-saving", repeat)
    step, rank = draw.choice((EVERY, 2 * EVERY)), draw.randrange(stage.ranks)
    point = repeat % (len(SAVE_POINTS) + 1)
    if point < len(SAVE_POINTS):
        rank = rank if point < SHARED_POINTS else 0
        injection = Injection("kill-in-save", rank, "save", step, amount=point)
    else:
        injection = Injection("kill", rank, "save", step, draw.uniform(0.001, _LONGEST_S))
    return strike(stage, "kill-saving", injection, Expected("SIGKILL", "launcher", _killed))


def no_memory(stage: Stage, repeat: int) -> Rehearsal:
    """A rank may allocate no more memory than it has."""
    draw = stage.draw("memory", repeat)
    injection = Injection(
        "exhaust",
        draw.randrange(stage.ranks),
        "forward",
        draw.randint(3, STEPS - 1),
        amount=_BLOCK_BYTES,
    )
    return strike(stage, "memory", injection, Expected("RLIMIT_AS", "launcher", _starved))


def _starved(fired: Fired) -> str:
    return rf"Rank {fired.rank} of \d+ failed: .*(MemoryError|allocate memory|memory)"
