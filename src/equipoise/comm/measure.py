"""Samples of collectives among this run's ranks.

What it decides
    A sample is the slowest rank's time for one operation after a barrier. Small operations are
    timed several in a row, as a step issues them, and divided.

Kept true (tests/multi/plan/test_calibrate.py)
    Every operation runs on any number of ranks, and every rank returns the same samples.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from equipoise.comm.group import Ranks

_SMALL_BYTES, _IN_A_ROW = 64 << 10, 8

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def collective_samples(ranks: Ranks, op: str, size_bytes: int, *, samples: int = 7) -> list[float]:
    """Seconds of one collective over all ranks: the slowest rank of each sample.

    Args:
        ranks: The ranks that take part.
        op: One of ``OPS``. ``send`` goes from rank 0 to rank 1.
        size_bytes: Bytes of the whole tensor; rounded down to fp32 numbers that the ranks divide.
        samples: Number of samples, after one to warm up.
    """
    call = _operation(ranks, op, size_bytes)
    repeats = _IN_A_ROW if size_bytes <= _SMALL_BYTES else 1
    mine = []
    for _ in range(samples + 1):
        ranks.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        mine.append((time.perf_counter() - begin) / repeats)
    slowest: list[float] = ranks.gather_floats(mine).max(0).values[1:].tolist()
    return slowest


def _operation(ranks: Ranks, op: str, size_bytes: int) -> Callable[[], object]:
    part = torch.full((max(1, size_bytes // 4 // ranks.world),), 0.0)  # touches every page
    whole = torch.full((len(part) * ranks.world,), 0.0)
    if op == "send":
        return lambda: _send(ranks.rank, whole)
    other = torch.full_like(whole, 0.0)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[op]


def _send(rank: int, whole: torch.Tensor) -> None:
    if rank == 0:
        dist.send(whole, 1)
    elif rank == 1:
        dist.recv(whole, 0)
