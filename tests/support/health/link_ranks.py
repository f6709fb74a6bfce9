"""Ranks of which one has a slow link; their first argument is their ``Ranks``."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from equipoise.comm.group import Ranks
from equipoise.comm.watchdog import Watchdog
from equipoise.fault.drill.acts import pace
from equipoise.observe.links import open_sockets
from equipoise.train.health.links import LinkWatch

NARROW = 12e6
"""What the slow link carries [bytes/s]."""

_PART = 1 << 16
"""Numbers that each rank sends to each other one in a round."""


def narrow(ranks: Ranks, folder: Path, until_s: float) -> list[str]:
    """All send to all; from the start on the link from rank 1 to rank 0 is slow, and rank 2 late.

    Returns what rank 0 was shown.
    """
    shown: list[str] = []
    store = dist.FileStore(str(folder / "beats"), ranks.world)
    watch = LinkWatch([folder], shown.append)
    given = torch.ones(_PART * ranks.world)
    with Watchdog(
        store,
        ranks.rank,
        ranks.world,
        deadline_s=60.0,
        tell=lambda standstill: None,
        hear_links=watch.hear,
    ):
        dist.all_to_all_single(torch.empty_like(given), given)
        ends = ranks.gather_objects([_ends(each) for each in _connected()])
        if ranks.rank == 1:
            theirs = {(other, own) for own, other in ends[0]}
            for each in _connected():
                if _ends(each) in theirs:
                    pace([each], NARROW)
        began = time.monotonic()
        # By rank 0's clock, so that all leave in the same round.
        while (passed_s := ranks.gather_floats([time.monotonic() - began])[0, 0]) < until_s:
            if ranks.rank == 2:
                time.sleep(0.03)
            dist.all_to_all_single(torch.empty_like(given), given)
            if ranks.sum_(torch.tensor([float(len(shown))])) and passed_s > 4:
                break
    return shown


def _connected():
    for each in open_sockets():
        try:
            each.getpeername()
        except OSError:
            continue
        yield each


def _ends(connection) -> tuple[tuple, tuple]:
    return connection.getsockname(), connection.getpeername()
