"""Run the executor: one rank over a process group, or all ranks in this process.

Why
    With all ranks in one process a layout is checked in seconds, by the code of real ranks;
    messages are copied instead of sent.

Kept true (tests/unit/parallel/test_context.py, tests/multi/parallel/test_context.py)
    Both equal one rank, and each other bit for bit.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from equipoise.base.errors import FaultError
from equipoise.comm.mail import Mail
from equipoise.comm.steps import Post, Steps


def drive(steps: Steps, mail: Mail) -> None:
    """Run one rank's pass; messages travel while it computes."""
    for step in steps:
        if isinstance(step, Post):
            mail.post(step.sends, step.receives)
        else:
            mail.wait(step.due)


def drive_together(steps: Sequence[Steps], sent_bytes: npt.NDArray[np.int64]) -> None:
    """Run the passes of all ranks in this process, each as far as its messages allow.

    Args:
        steps: One pass of each rank.
        sent_bytes: Bytes from each rank to each rank, int64 [ranks, ranks]; added to in place.

    Raises:
        FaultError: all unfinished ranks wait for each other.
    """
    on_the_way: dict[tuple[int, int, int], Tensor] = {}
    wanted: list[dict[int, list[tuple[tuple[int, int, int], Tensor]]]] = [{} for _ in steps]
    ready, blocked = deque(range(len(steps))), dict[int, int]()
    while ready:
        rank = ready.popleft()
        for step in steps[rank]:
            if isinstance(step, Post):
                for parcel in step.sends:
                    on_the_way[rank, parcel.peer, parcel.tag] = parcel.data
                    sent_bytes[rank, parcel.peer] += parcel.data.nbytes
                for parcel in step.receives:
                    key = parcel.peer, rank, parcel.tag
                    wanted[rank].setdefault(parcel.due, []).append((key, parcel.data))
                continue
            blocked[rank] = step.due
            break
        for waiting, due in list(blocked.items()):
            wants = wanted[waiting].get(due, [])
            if all(key in on_the_way for key, _ in wants):
                for key, data in wants:
                    data.copy_(on_the_way.pop(key))
                wanted[waiting].pop(due, None)
                del blocked[waiting]
                ready.append(waiting)
    if blocked:
        raise FaultError(
            f"Ranks {sorted(blocked)} wait for messages that nobody sends. Check the schedule "
            f"with check_attention."
        )
