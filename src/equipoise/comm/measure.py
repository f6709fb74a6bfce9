"""Samples of collectives among this run's ranks, and of messages between pairs of them.

What it decides
    A sample is the slowest rank's time for one operation after a barrier, until its device has
    done it. Small operations are timed several in a row, as a step issues them, and divided.
    Messages of pairs are timed in rounds in which every rank has one partner, so that all links
    are in use, as in training.

Kept true (tests/multi/plan/test_calibrate.py)
    Every operation runs on any number of ranks, and every rank returns the same samples. Every
    pair is timed once.
"""

import time
from collections.abc import Callable
from itertools import combinations

import torch
import torch.distributed as dist

from equipoise.comm.group import Ranks

_SMALL_BYTES, _IN_A_ROW = 64 << 10, 8

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

Clock = Callable[[], float]
"""Seconds on the wall, read when all that was asked of the rank's device is done."""


def collective_samples(
    ranks: Ranks,
    op: str,
    size_bytes: int,
    *,
    samples: int = 7,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Seconds of one collective over all ranks: the slowest rank of each sample.

    Args:
        ranks: The ranks that take part.
        op: One of ``OPS``. ``send`` goes from rank 0 to rank 1.
        size_bytes: Bytes of the whole tensor; rounded down to fp32 numbers that the ranks divide.
        samples: Number of samples, after one to warm up.
        clock: Read before and after; ranks on devices need one that waits for the device.
    """
    mine = _own_samples(ranks, _operation(ranks, op, size_bytes), size_bytes, samples, clock)
    slowest: list[float] = ranks.gather_floats(mine).max(0).values[1:].tolist()
    return slowest


def pair_samples(
    ranks: Ranks, size_bytes: int, *, samples: int = 7, clock: Clock = time.perf_counter
) -> dict[tuple[int, int], list[float]]:
    """Seconds of one message between each two ranks, the slower of the two in each sample.

    Args:
        ranks: All of them; each is in one pair at a time.
        size_bytes: Bytes of the message; rounded down to fp32 numbers.
        samples: As of ``collective_samples``.
        clock: As of ``collective_samples``.
    """
    message = torch.full((max(1, size_bytes // 4),), 0.0, device=ranks.device)
    taken = {}
    for pairs in _rounds(ranks.world):
        own = [pair for pair in pairs if ranks.rank in pair]
        call = _message(ranks.rank, *own[0], message) if own else _nothing
        mine = _own_samples(ranks, call, size_bytes, samples, clock)
        every = ranks.gather_floats(mine)
        for pair in pairs:
            taken[pair] = every[list(pair)].max(0).values[1:].tolist()
    return taken


def _rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which no rank is in two.

    >>> _rounds(4)
    [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    """
    rounds: list[list[tuple[int, int]]] = []
    for pair in combinations(range(ranks), 2):
        is_free = (each for each in rounds if not {*pair} & {rank for two in each for rank in two})
        into = next(is_free, None)
        if into is None:
            rounds.append(into := [])
        into.append(pair)
    return rounds


def _own_samples(
    ranks: Ranks, call: Callable[[], object], size_bytes: int, samples: int, clock: Clock
) -> list[float]:
    """This rank's seconds of one operation, a warm-up first."""
    repeats = _IN_A_ROW if size_bytes <= _SMALL_BYTES else 1
    mine = []
    for _ in range(samples + 1):
        ranks.barrier()
        begin = clock()
        for _ in range(repeats):
            call()
        mine.append((clock() - begin) / repeats)
    return mine


def _operation(ranks: Ranks, op: str, size_bytes: int) -> Callable[[], object]:
    # Filling touches every page.
    part = torch.full((max(1, size_bytes // 4 // ranks.world),), 0.0, device=ranks.device)
    whole = part.new_full((len(part) * ranks.world,), 0.0)
    if op == "send":
        return _message(ranks.rank, 0, 1, whole)
    other = torch.full_like(whole, 0.0)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[op]


def _message(rank: int, source: int, target: int, whole: torch.Tensor) -> Callable[[], object]:
    """One rank's part in a message between two."""
    if rank == source:
        return lambda: dist.send(whole, target)
    return (lambda: dist.recv(whole, source)) if rank == target else _nothing


def _nothing() -> None:
    """Leave the others to it."""
