"""Run all ranks as threads of one process that take turns.

Why
    Eight gloo ranks on two cores spend their time waking each other: a small model's step of
    milliseconds takes seconds. In one process a collective of eight ranks is a few copies, and
    all code above ``torch.distributed`` is that of real ranks.

What it decides
    A process that plays ranks does nothing else: each thread gets its own table of torch's
    groups, as in torch's own tests.

Kept true (tests/multi/comm/test_turns.py)
    Collectives and messages equal gloo's; a rank that fails or waits for ever ends all.

Sources
    torch 2.13, testing/_internal/distributed/multi_threaded_pg.py: the thread-local world.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OutputSharding
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from equipoise.comm.group import Ranks
from equipoise.comm.turns_group import BACKEND, TurnsGroup
from equipoise.comm.turns_room import Room

Result = TypeVar("Result")

_c10d: Any = torch._C._distributed_c10d

_IN_PLACE = (torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default)


def play_ranks(world: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Call ``function(ranks, *arguments)`` on ranks that take turns; results in order.

    Call it in a process of its own, and only once at a time.

    Args:
        world: Number of ranks.
        function: Its first argument is its ``Ranks``.
        arguments: The same objects for every rank; ranks may share results made from them.

    Raises:
        EquipoiseError: raised by a rank.
        FaultError: a rank failed otherwise, or all wait for each other.
    """
    room, store = Room(world), dist.HashStore()
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def make(prefix: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.ProcessGroup:
        del prefix, timeout
        # Every rank makes every group, so all counters agree here.
        return TurnsGroup(room, distributed_c10d._world.group_count, rank, ranks)

    def serve(rank: int) -> None:
        room.here.rank, fault = rank, ""
        with room.turn:
            try:
                torch.autograd.set_multithreading_enabled(False)
                dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
                results[rank] = function(Ranks(rank, world, torch.device("cpu")), *arguments)
            except BaseException as error:  # the other ranks must hear of every end
                errors.append(error)
                fault = f"Rank {rank} failed: {error}"
            room.end(fault)

    with _thread_local_world(make):
        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


def _plan(schema: Any, plain: Callable[[Any], Any]) -> Any:
    """The placement of a DTensor operation's result, without torch's enumeration in simple cases.

    To add two tensors of equal placement, torch 2.13 prices every placement of both on every axis
    of the mesh: seconds on four axes, once for every mesh and rank.
    """
    if schema.op in _IN_PLACE:
        one, other = schema.args_schema[:2]
        same = isinstance(one, DTensorSpec) and isinstance(other, DTensorSpec)
        if same and (one.mesh, one.placements, one.shape) == (
            other.mesh,
            other.placements,
            other.shape,
        ):
            return OutputSharding(one)
    return plain(schema)


@contextmanager
def _thread_local_world(make: Callable[..., dist.ProcessGroup]) -> Iterator[None]:
    """Give every thread its own table of groups."""
    before = distributed_c10d._world
    planner = DTensor._op_dispatcher.sharding_propagator
    plain = planner.propagate_op_sharding_non_cached
    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    _c10d._set_thread_isolation_mode(True)
    distributed_c10d._world = ThreadLocalWorld()  # type: ignore[assignment]
    planner.propagate_op_sharding_non_cached = partial(_plan, plain=plain)  # type: ignore[method-assign]
    try:
        yield
    finally:
        planner.propagate_op_sharding_non_cached = plain  # type: ignore[method-assign]
        distributed_c10d._world = before
        _c10d._set_thread_isolation_mode(False)
        dist.Backend._plugins.pop(BACKEND.upper(), None)
