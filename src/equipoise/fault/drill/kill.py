"""Ranks that are killed in a step (F1) or in a save (F2), or starved of memory (F12)."""

import math
from pathlib import Path

from equipoise.fault.drill.acts import SAVE_POINTS, SHARED_POINTS
from equipoise.fault.drill.facts import events, resumed_s
from equipoise.fault.drill.injection import Fired, Injection, ask, proven
from equipoise.fault.drill.judge import BY_ITSELF, Expected, strike
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import EVERY, STEPS, Stage

POINTS = ("forward", "backward", "wait", "reduce", "optimizer", "save", "random")
"""Where a rank is killed, one after the other; ``wait`` is a collective of all ranks."""

_LONGEST_S = 0.5
"""A random moment is within this of the begin of a step's forward pass, or of a save."""

_IN_A_ROW = 3
"""After as many kills at one step a rank is given up (``fault.policy``)."""

_SOON, _ROUNDING = 4, 1e-5
"""Until 4 steps after a start with fewer ranks, losses differ by rounding alone: by 1e-5 of
themselves. Each update makes that larger."""

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


def shrink(stage: Stage, repeat: int) -> Rehearsal:
    """A rank is ended at one step of three starts in a row; the others go on without it.

    What is timed is the start with fewer ranks. Those must end with the state of as many ranks that
    were started from the same checkpoint without a fault.
    """
    draw, rank = stage.draw("shrink", repeat), (stage.ranks - 1 - repeat) % stage.ranks
    step = draw.randint(2, STEPS - 1)
    folder = stage.folder("shrink")
    ask(folder / "drill", [Injection("kill", rank, "forward", step)] * _IN_A_ROW)
    fewer = f"--fault.least_dp={stage.data_ranks - 1}"
    with stage.start(folder, fewer, drill=folder / "drill") as attempt:
        code = attempt.end()
    struck = proven(folder / "drill")
    if not struck:
        return Rehearsal("", said=attempt.last_words)
    line = attempt.first(_killed(struck[-1]))
    since = [each["t"] for each in events(folder, "recovery") if each["action"] == "shrink"]
    goes_on = BY_ITSELF if code == 0 and since else ""
    off = stage.loss_distances(folder)
    begun = [each["resumed_step"] for each in events(folder, "start")][-1] if off else 0
    soon = max(off[: begun + _SOON], default=math.inf)
    is_equal = soon <= _ROUNDING and stage.is_equal(folder, _started_with_fewer(stage, begun))
    return Rehearsal(
        injected=f"SIGKILL, {len(struck)} times, rank {rank} in forward of step {step}",
        detected_by="launcher" if line else "",
        is_named=line is not None,
        detected_s=None if line is None else line.at_s - struck[-1].at_s,
        resumed_s=resumed_s(folder, since[0]) if since else None,
        lost_tokens=stage.lost_tokens(folder, *(each.step for each in struck)),
        is_equal=is_equal,
        goes_on=goes_on,
        said=line.text if line else attempt.last_words,
        note=f"{stage.data_ranks - 1} of {stage.data_ranks} data-parallel ranks went on with the "
        f"same batches, to the bit as if started on as few; losses differ from all ranks' by at "
        f"most {soon:.1g} of themselves until {_SOON} steps later."
        if is_equal
        else "",
    )


def _started_with_fewer(stage: Stage, step: int) -> Path:
    """The folder of a run of fewer ranks from a checkpoint of the undisturbed one, or from none."""
    name = "shrink-planned"
    folder = stage.copied(name, until=step) if step else stage.folder(name)
    with stage.start(folder, f"--layout.dp={stage.data_ranks - 1}") as attempt:
        attempt.end()
    return folder


def has_one(stage: Stage) -> str:
    """Why no rank can be given up; "" if one can."""
    return "" if stage.data_ranks > 1 else "needs layout.dp of 2 or more"


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
