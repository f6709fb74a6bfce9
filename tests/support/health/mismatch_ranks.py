"""Ranks that call collectives which do not match; their first argument is their ``Ranks``."""

from pathlib import Path

import torch
import torch.distributed as dist

from equipoise.comm.group import Ranks
from support.ranks.watchdog_ranks import watch

DEADLINE_S = 600.0
"""Longer than a test waits: nobody is named because it has passed."""


def call_otherwise(ranks: Ranks, folder: Path, case: str) -> None:
    """After 90 even calls the last rank does something else, or skips one."""
    is_last = ranks.rank == ranks.world - 1
    some, whole = torch.ones(1000), torch.empty(1000 * ranks.world)
    with watch(ranks, folder, DEADLINE_S) as watchdog:
        with watchdog.phase("forward of step 7"):
            for _ in range(90):
                ranks.sum_(some.clone())
        with watchdog.phase("reduce of step 7"):
            if case == "operation" and is_last:
                dist.all_gather_single(whole, some)
            if case == "size" and is_last:
                dist.all_reduce(torch.ones(500))
            if case == "dtype" and is_last:
                dist.all_reduce(some.int())  # as many bytes: gloo adds them up
            if (case == "skipped" and not is_last) or case in ("operation", "size", "dtype"):
                dist.all_reduce(some)
            dist.all_gather_single(whole, some)
            for _ in range(600):
                dist.barrier()
                watchdog._ended.wait(0.1)


def cross(ranks: Ranks, folder: Path) -> None:
    """Two groups of the same ranks, entered in another order by each."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    with watch(ranks, folder, DEADLINE_S) as watchdog, watchdog.phase("backward of step 3"):
        for group in groups:
            dist.barrier(group=group)
        if ranks.rank == 1:
            groups.reverse()
        for group in groups:
            dist.all_reduce(torch.ones(5 + ranks.rank), group=group)


def differ_rightly(ranks: Ranks, folder: Path) -> None:
    """Collectives in which ranks may differ; nobody ends."""
    world, rank = ranks.world, ranks.rank
    with watch(ranks, folder, DEADLINE_S) as watchdog:
        for _ in range(8):
            given = [rank + 1 + to for to in range(world)]
            taken = [each + 1 + rank for each in range(world)]
            out = torch.empty(sum(taken))
            dist.all_to_all_single(out, torch.ones(sum(given)), taken, given)
            parts = [torch.ones(3) for _ in range(world)]
            dist.scatter(torch.empty(3), parts if rank == 0 else None, 0)
            dist.gather(torch.ones(3), parts if rank == 0 else None, 0)
            ranks.gather_objects("x" * rank * 50)
            dist.broadcast(torch.ones(2, 3) if rank else torch.ones(6), 0)
            watchdog._ended.wait(0.15)
