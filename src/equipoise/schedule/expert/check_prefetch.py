"""A checker of prefetch schedules, which knows nothing of how they are planned.

What it decides
    Whether each visit finds what it uses: read from the file before it is gathered, gathered before
    it is used, never twice while it is there, and never freed while it is on its way; and whether
    memory holds more than it may at any time.

Kept true (tests/unit/schedule/expert/test_prefetch.py)
    A schedule with any one move left out or repeated is refused, with a sentence that says why.
"""

from equipoise.base.errors import LayoutError
from equipoise.base.units import format_bytes
from equipoise.schedule.expert.prefetch import Buffer, Move, PrefetchSchedule, PrefetchTurn, Visit


def check_prefetch(schedule: PrefetchSchedule) -> None:
    """Refuse a schedule by which a layer would be used without its weights.

    Raises:
        LayoutError: the first thing that is wrong.
    """
    held, busy = set(schedule.before), set[Buffer]()
    for number, turn in enumerate(schedule.turns):
        fault = _moves_fault(schedule, turn.demand, held, busy)
        fault = fault or _use_fault(schedule, turn, held, busy)
        fault = fault or _moves_fault(schedule, turn.ahead, held, busy)
        if fault:
            raise LayoutError(f"PrefetchTurn {number} of the prefetch schedule {fault}")
    if held != schedule.after:
        raise LayoutError("The prefetch schedule leaves other buffers in memory than it says.")


def _moves_fault(
    schedule: PrefetchSchedule, moves: tuple[Move, ...], held: set[Buffer], busy: set[Buffer]
) -> str:
    for move in moves:
        buffer = move.buffer
        name = f"the {buffer.what} of layer {buffer.layer}"
        if move.action == "free":
            if buffer not in held:
                return f"frees {name}, which is not in memory."
            if buffer in busy:
                return f"frees {name}, which is on its way."
            held.remove(buffer)
            continue
        if buffer in held:
            return f"fetches {name}, which is in memory."
        if move.action == "gather":
            source = Buffer("slice", buffer.layer)
            if source not in held:
                return f"gathers layer {buffer.layer}, whose slice is not in memory."
            busy.add(source)
        held.add(buffer)
        busy.add(buffer)
        if (used := sum(map(schedule.sizes.of, held))) > schedule.capacity:
            return f"holds {format_bytes(used)}, more than {format_bytes(schedule.capacity)}."
    return ""


def _use_fault(
    schedule: PrefetchSchedule, turn: PrefetchTurn, held: set[Buffer], busy: set[Buffer]
) -> str:
    """What a visit lacks; it waits for what it has."""
    for buffer in used_by(turn.visit, gathers=schedule.sizes.whole > 0):
        if buffer not in held:
            return f"uses the {buffer.what} of layer {buffer.layer}, which is not in memory."
        busy.discard(buffer)
        if buffer.what == "whole":
            busy.discard(Buffer("slice", buffer.layer))
    if turn.visit.is_update and any(buffer.what == "whole" for buffer in held):
        return f"updates layer {turn.visit.layer} while gathered weights are in memory."
    return ""


def used_by(visit: Visit, *, gathers: bool) -> list[Buffer]:
    """What a visit uses."""
    if visit.is_update:
        return [Buffer("slice", visit.layer), Buffer("moments", visit.layer)]
    return [Buffer("whole" if gathers else "slice", visit.layer)]
