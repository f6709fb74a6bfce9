"""A process group of ranks that take turns in one process: every collective is a copy.

Kept true (tests/multi/comm/test_turns.py)
    Collectives and messages equal gloo's.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future

from equipoise.base.errors import LayoutError
from equipoise.comm.turns_room import Move, Room

BACKEND = "turns"

_c10d: Any = torch._C._distributed_c10d


class _Arrival(dist.Work):
    """A message that may not have arrived yet."""

    def __init__(self, room: Room, key: tuple[Any, ...], data: Tensor) -> None:
        super().__init__()
        self._room, self._key, self._data = room, key, data

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        del timeout
        self._room.receive(self._key, self._data)
        return True


def _done(value: Any) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(value)
    work: dist.Work = _c10d._create_work_from_future(future)
    return work


class TurnsGroup(dist.ProcessGroup):
    """One rank's process group, with the methods that torch.distributed calls."""

    def __init__(self, room: Room, key: int, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        self._room, self._key, self._at, self._of = room, key, rank, ranks
        self._count = 0

    def getBackendName(self) -> str:
        """The name that torch asks for."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Its name in this rank's table of groups."""
        name: str = distributed_c10d._world.pg_names[self]
        return name

    @property
    def pg_name(self) -> str:
        """The same name."""
        return self.group_name

    def _meet(self, name: str, data: Any, move: Move) -> None:
        self._count += 1
        self._room.meet((self._key, self._count, name), self._at, self._of, data, move)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Sum or maximum over ranks, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def move(every: list[list[Tensor]]) -> None:
            for same in zip(*every, strict=True):
                total = _reduce(same, op)
                for each in same:
                    each.copy_(total)

        self._meet("all_reduce", tensors, move)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """``allreduce`` of several tensors."""
        return self.allreduce(tensors, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        del opts
        self._meet("barrier", None, lambda _: None)
        return _done(None)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Send one rank's tensors to all."""
        source = opts.rootRank

        def move(every: list[list[Tensor]]) -> None:
            for each in every:
                for mine, theirs in zip(each, every[source], strict=True):
                    mine.copy_(theirs)

        self._meet("broadcast", tensors, move)
        return _done(tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Every rank's tensor, as a list."""
        del opts

        def move(every: list[tuple[list[Tensor], Tensor]]) -> None:
            for out, _ in every:
                for place, (_, sent) in zip(out, every, strict=True):
                    place.copy_(sent.view_as(place))

        self._meet("all_gather", (outputs[0], inputs[0]), move)
        return _done(outputs)

    def all_gather_single(self, out: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        """Every rank's tensor, end to end."""
        return self.allgather([list(out.view(self._of, -1).unbind())], [sent.reshape(-1)], opts)

    def reduce_scatter_single(self, out: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        """A rank's part of the sum over ranks."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def move(every: list[tuple[Tensor, Tensor]]) -> None:
            total = _reduce([given for _, given in every], op).view(len(every), -1)
            for (place, _), row in zip(every, total, strict=True):
                place.copy_(row.view_as(place))

        self._meet("reduce_scatter", (out, sent), move)
        return _done(out)

    def all_to_all_single(
        self, out: Tensor, sent: Tensor, taken: list[int], given: list[int], opts: Any = None
    ) -> dist.Work:
        """Exchange rows between all ranks."""
        del opts

        def parts(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
            even = len(tensor) // self._of
            return list(tensor.split(sizes or [even] * self._of))

        def move(every: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for to, (places, _) in enumerate(every):
                for place, (_, rows) in zip(places, every, strict=True):
                    place.copy_(rows[to])

        self._meet("all_to_all", (parts(out, taken), parts(sent, given)), move)
        return _done(out)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        """Leave a message for its reader."""
        self._room.send((self._key, self._at, to, tag), tensors[0])
        return _done(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Take a message when it is awaited."""
        return _Arrival(self._room, (self._key, source, self._at, tag), tensors[0])


def _reduce(same: Sequence[Tensor], op: Any) -> Tensor:
    """Reduce in the order of ranks."""
    stacked = torch.stack(list(same))
    if op == dist.ReduceOp.SUM:
        total: Tensor = stacked.sum(0)
        return total
    if op == dist.ReduceOp.MAX:
        return stacked.amax(0)
    raise LayoutError(f"Ranks that take turns support sum and maximum, not {op}.")
