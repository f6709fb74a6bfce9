"""The ranks of a run: built once, passed as an argument, never a module global.

Why
    Process groups in module globals have given other trainers silently wrong gradients.

Kept true (tests/multi/comm/test_watchdog.py)
    The watchdog ends a run before gloo's own timeout does.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equipoise.base.axes import DATA_AXIS, REPLICATE_AXIS, SHARD_AXIS
from equipoise.base.errors import LayoutError
from equipoise.comm.meet import Facts, meet, open_store
from equipoise.comm.patience import WaitLimits
from equipoise.comm.standstill import Standstill
from equipoise.comm.watchdog import Watchdog
from equipoise.observe.links import Links

TIMEOUT = timedelta(days=1)
"""torch's own deadline, which names no rank: longer than any of ``comm.watchdog``."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device
    made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Groups and meshes by their ranks, so that joining several layouts makes each once."""
    has_tags: bool = True
    """Whether messages between two ranks are told apart by tags: gloo's are, NCCL's are not."""

    def gather_floats(self, values: list[float]) -> torch.Tensor:
        """Every rank's row of numbers, float64 [world, len(values)]; also a barrier."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = mine.new_empty(self.world * len(values))  # gloo wants ranks laid end to end
        dist.all_gather_single(rows, mine)
        return rows.view(self.world, -1).cpu()

    def gather_integers(self, values: list[int]) -> torch.Tensor:
        """Every rank's row of 64-bit numbers, int64 [world, len(values)]; also a barrier."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        rows = mine.new_empty(self.world * len(values))
        dist.all_gather_single(rows, mine)
        return rows.view(self.world, -1).cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's object; for small objects and rare calls."""
        rows: list[Any] = [None] * self.world
        dist.all_gather_object(rows, value)
        return rows

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def data_mesh(self, zero: int) -> DeviceMesh:
        """The mesh that ``fully_shard`` shards and replicates over at this ZeRO stage."""
        if zero == 0:
            ranks = torch.arange(self.world).view(-1, 1)
            names: tuple[str, ...] = (REPLICATE_AXIS, SHARD_AXIS)
        else:
            ranks = torch.arange(self.world)
            names = (DATA_AXIS,)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=names)


def choose_device(local_rank: int) -> torch.device:
    """This rank's accelerator, or the CPU where there is none."""
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise LayoutError(
                f"Rank {local_rank} of this machine has no device: {torch.cuda.device_count()} "
                f"are visible. Set layout.dp = {torch.cuda.device_count()}."
            )
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def name_device(device: torch.device) -> str:
    """The product that a device is, or its kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def join(store: dist.Store, rank: int, world: int, device: torch.device) -> Iterator[Ranks]:
    """Join ``world`` ranks for the duration of the block."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
    )
    try:
        yield Ranks(rank, world, device, has_tags=device.type != "cuda")
    finally:
        dist.destroy_process_group()


@contextmanager
def join_from_environment(
    facts: Facts,
    *,
    deadline_s: float | None,
    tell: Callable[[Standstill], None],
    tell_late: Callable[[Standstill], None] | None = None,
    hear_links: Callable[[Links], object] | None = None,
) -> Iterator[tuple[Ranks, Watchdog]]:
    """Join as the rank that ``torchrun`` assigned, under a watchdog, while the block lasts.

    Args:
        facts: What must be equal on all ranks, by name.
        deadline_s: The longest wait of one rank for another [s]; follows the steps unless given.
        tell: Called before a standstill ends the process.
        tell_late: As for ``Watchdog``.
        hear_links: Likewise.

    Raises:
        LayoutError: not started by ``torchrun``, or ranks would run different things.
        FaultError: some rank did not arrive.
    """
    missing = [
        key for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ
    ]
    if missing:
        raise LayoutError(
            f"A rank was started without {', '.join(missing)}. Start ranks with `equipoise train` "
            f"or `torchrun`."
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start_s = WaitLimits(deadline_s).end_s("start")
    store = open_store(rank, deadline_s=start_s)
    meet(store, rank, world, {"WORLD_SIZE": str(world), **facts}, deadline_s=start_s)
    device = choose_device(int(os.environ.get("LOCAL_RANK", rank)))
    with ExitStack() as stack:
        watchdog = stack.enter_context(
            Watchdog(
                store,
                rank,
                world,
                deadline_s=deadline_s,
                tell=tell,
                tell_late=tell_late,
                hear_links=hear_links,
            )
        )
        with watchdog.phase("start"):
            ranks = stack.enter_context(join(store, rank, world, device))
        yield ranks, watchdog
