"""Prove that a schedule of nano-batches is legal, whatever its operations take.

What it decides
    Nothing. It reads what steps wait for, not their predicted times: by its waits alone every
    operation runs once, after what it needs, and no lane has two at a time.

Kept true (tests/unit/schedule/nano/test_check.py)
    Each kind of fault is found, and said in one sentence.
"""

from equipoise.base.errors import LayoutError
from equipoise.schedule.nano.graph import NanoGraph
from equipoise.schedule.nano.schedule import NanoSchedule


def check_nano(graph: NanoGraph, schedule: NanoSchedule) -> None:
    """Refuse a schedule that is not legal.

    Raises:
        LayoutError: an operation is missing or runs twice; a step waits for one that begins later,
            or not for what it needs, or not for the one before it on a lane.
    """
    operations = graph.operations
    begun, on_lane = set[int](), dict[int, int]()
    for step in schedule.steps:
        at = step.operation
        if not 0 <= at < len(operations):
            raise LayoutError(f"There is no operation {at}; the graph has {len(operations)}.")
        name = operations[at].name
        if at in begun:
            raise LayoutError(f"{name} runs twice.")
        if not 0 <= step.way < len(operations[at].ways):
            raise LayoutError(f"{name} has no way {step.way} to run.")
        waits = set(step.after)
        if late := waits - begun:
            raise LayoutError(f"{name} waits for {operations[min(late)].name}, which begins later.")
        if missing := set(operations[at].after) - waits:
            raise LayoutError(f"{name} does not wait for {operations[min(missing)].name}.")
        for lane in operations[at].ways[step.way].lanes:
            before = on_lane.get(lane)
            if before is not None and before not in waits:
                raise LayoutError(
                    f"{name} does not wait for {operations[before].name} on lane {lane}."
                )
            on_lane[lane] = at
        begun.add(at)
    if missing := set(range(len(operations))) - begun:
        raise LayoutError(f"{operations[min(missing)].name} never runs.")
