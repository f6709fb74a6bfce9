"""Functions of ranks in tests of the watchdog; their first argument is their ``Ranks``."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from equipoise.comm import watchdog as watchdog_module
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Mail, Parcel
from equipoise.comm.standstill import Standstill
from equipoise.comm.watchdog import Watchdog


def watch(ranks: Ranks, folder: Path, deadline_s: float) -> Watchdog:
    """A watchdog that writes its report into the folder."""

    def tell(standstill: Standstill) -> None:
        (folder / f"told-{ranks.rank}").write_text(standstill.text)

    store = dist.FileStore(str(folder / "beats"), ranks.world)
    return Watchdog(store, ranks.rank, ranks.world, deadline_s=deadline_s, tell=tell)


def hang_in(ranks: Ranks, folder: Path, how: str, deadline_s: float) -> int:
    """All ranks but the last join a collective; the last does ``how`` first. Returns the count."""
    is_last = ranks.rank == ranks.world - 1
    with watch(ranks, folder, deadline_s) as watchdog:
        with watchdog.phase("forward of step 7"):
            for _ in range(100):
                ranks.barrier()
        (folder / f"process-{ranks.rank}").write_text(str(os.getpid()))
        with watchdog.phase("reduce of step 7"):
            if is_last and how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if is_last and how == "asleep":
                time.sleep(600)
            if is_last and how == "slow":
                time.sleep(0.5 * deadline_s)
            ranks.sum_(torch.ones(3))
    return 101


def hang_in_messages(ranks: Ranks, folder: Path, deadline_s: float) -> None:
    """Rank 0 waits for a message of rank 1, which waits for one of rank 2, which sleeps."""
    mail = Mail()
    with watch(ranks, folder, deadline_s) as watchdog, watchdog.phase("backward of step 3"):
        if ranks.rank == 2:
            time.sleep(600)
        parcel = Parcel(ranks.rank + 1, 5, torch.zeros(8, dtype=torch.uint8), due=4)
        mail.post([], [parcel])
        mail.wait(4)


def hang_in_a_group_that_is_made(ranks: Ranks, folder: Path, deadline_s: float) -> None:
    """The last rank never makes it."""
    with watch(ranks, folder, deadline_s) as watchdog, watchdog.phase("start"):
        if ranks.rank == ranks.world - 1:
            time.sleep(600)
        dist.new_group([0, 1, 2], timeout=timedelta(minutes=5))


def hang_with_the_store(ranks: Ranks, folder: Path, port: int, deadline_s: float) -> None:
    """Rank 0, whose process has the store, stops."""
    watchdog_module._STORE_S = 0.3
    store = dist.TCPStore("127.0.0.1", port, is_master=ranks.rank == 0)

    def tell(standstill: Standstill) -> None:
        (folder / f"told-{ranks.rank}").write_text(standstill.text)

    with Watchdog(store, ranks.rank, ranks.world, deadline_s=deadline_s, tell=tell):
        ranks.barrier()
        if ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        ranks.sum_(torch.ones(3))
