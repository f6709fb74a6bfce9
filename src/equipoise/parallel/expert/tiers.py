"""Experts in a file: layers are read and gathered while layers before them compute.

What it decides
    Nothing: ``schedule.expert.prefetch`` says what is read, gathered and freed in each turn. One
    thread reads and writes the file; a layer is one message of a gather, and its gradients leave in
    one, too. The sums of this rank's slice stay in memory until the optimizer has used them.

    A gathered layer is computed slice by slice, as it lies::

        rank 0's slice    gate 0 1 | up 0 1 | down 0 1        rows of experts 0 and 1
        rank 1's slice    gate 2   | up 2   | down 2          rows of expert 2

    A layer is written back as soon as it is updated. The file is nothing without the run: one that
    is cut goes on from its checkpoint, whose tensors are those of ZeRO 3. While a checkpoint is
    loaded, all slices and moments are in memory.

Kept true (tests/multi/parallel/test_expert_tiers.py)
    Loss, every gradient and weights after a step are those of one rank; bytes read, written and
    sent are those of the schedules; memory is never above the capacity.

Sources
    SE-MoE: arXiv:2205.10034.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import Peers
from equipoise.nn.moe.layer import Experts
from equipoise.parallel.expert.buffers import STORED, SliceBuffers, TierCounts
from equipoise.parallel.expert.layered import Layered, Slice
from equipoise.parallel.expert.slices import ExpertSlice
from equipoise.parallel.zero.exchange import ExchangeGather, ExchangeReduce
from equipoise.schedule.expert.prefetch import (
    Ahead,
    Buffer,
    Move,
    PrefetchSchedule,
    SliceBytes,
    Visit,
    schedule_prefetch,
    there_and_back,
    updates,
    upward,
)


class ExpertTiers:
    """The slices of all sparse layers on one rank; see the module.

    Args:
        folder: For the file; a temporary one unless given.
        capacity: The most that memory holds of slices, moments and gathered layers [bytes].
        layers: How many sparse layers there are.
        peers: The ranks that have slices of the same experts.
        width: In which dtype layers are gathered; that of the weights unless given.
        ahead: How far to look; as ``schedule_prefetch`` unless given.
    """

    def __init__(
        self,
        folder: Path | None,
        capacity: int,
        *,
        layers: int,
        peers: Peers,
        width: torch.dtype | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self._folder = folder or Path(self._temporary.name)  # type: ignore[union-attr]
        self.capacity, self.peers = capacity, peers
        self.ledger = Ledger(peers.count)
        """Weights and gradients that this rank sent."""
        self._count, self._width, self._ahead = layers, width, ahead
        self._layers: list[ExpertSlice] = []
        self._buffers: SliceBuffers | None = None
        self._sizes = SliceBytes(0, 0, 0)
        self._whole: dict[int, Tensor] = {}
        self._gathers: dict[int, dist.Work | None] = {}
        self._plans: dict[tuple[str, frozenset[Buffer]], PrefetchSchedule] = {}
        self._plan: PrefetchSchedule | None = None
        self._at, self._has_asked = -1, False
        self._gather = ExchangeGather(self.ledger.meter)
        self._reduce = ExchangeReduce(self.ledger.meter)

    def add(
        self, experts: Experts, longest: int, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> None:
        """Take the next layer's experts; arguments are those of ``ExpertSlice.of``.

        Raises:
            LayoutError: they are not trained; or the capacity does not hold two layers.
        """
        number = len(self._layers)
        layer = ExpertSlice.of(experts, longest, self.peers, mesh, placements)
        if self._buffers is None:
            self._begin_file(layer.weights)
        self._layers.append(layer)
        self._there.add(layer)
        experts.elsewhere = Layered(self, number)

    def _begin_file(self, weights: Tensor) -> None:
        """Open the file for slices of this size."""
        ranks, width = self.peers.count, self._width or weights.dtype
        is_own = ranks == 1 and width == weights.dtype
        whole = 0 if is_own else ranks * len(weights) * width.itemsize
        self._width, self._sizes = width, SliceBytes(weights.nbytes, 2 * weights.nbytes, whole)
        self._sizes.require(self.capacity, layers=self._count)
        self._buffers = SliceBuffers(self._folder, self._sizes, self._count)

    @property
    def weights(self) -> list[Any]:
        """All parameters that lie in the file."""
        return [weight for layer in self._layers for weight in layer.parameters]

    # A pass. -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward begins; its backward follows if gradients are enabled."""
        self._settle()
        if torch.is_grad_enabled():
            self._open("train", there_and_back(self._count), updates(self._count))
        else:
            self._open("eval", upward(self._count), upward(self._count))

    def enter(self, number: int) -> list[Slice]:
        """All slices of a layer, in the order of experts; what comes next has begun."""
        if self._at < 0 or self._planned.turns[self._at].visit.layer != number:
            self._turn(number)
        layer, whole = self._layers[number], self._whole.get(number)
        flats = layer.weights[None] if whole is None else whole.view(self.peers.count, -1)
        return [layer.split(flat, count) for flat, count in zip(flats, layer.counts, strict=True)]

    def leave(self, number: int, gradients: Sequence[Slice]) -> None:
        """Sum gradients of a layer over ranks, and add this rank's slice of them to its own."""
        layer = self._layers[number]
        fused = layer.fuse(gradients)
        own = fused[0]
        if self.peers.group is not None:
            own = torch.empty_like(own)
            self._reduce(own, fused.view(-1), self.peers.group, dist.ReduceOp.SUM)
            self._there.counts.reduced_bytes += self._tell_peers(own.nbytes)
        layer.add_gradient(own)

    # An update. --------------------------------------------------------------------------------

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Run an optimizer on what stays in memory, and then on layer by layer.

        Args:
            optimizer: Whose moments lie in the file, if it keeps some.
            step: Its step, which leaves weights without a gradient alone.
        """
        self._settle()
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        kept = {weight: weight.grad for weight in weights}
        elsewhere = self.weights
        has_some = any(kept[weight] is not None for weight in elsewhere)
        if has_some:
            self._open("update", updates(self._count), there_and_back(self._count))
        for weight in elsewhere:
            weight.grad = None
        step()
        for weight in weights:
            weight.grad = None
        for turn in self._planned.turns if has_some else ():
            number = turn.visit.layer
            layer = self._layers[number]
            self._turn(number)
            layer.adopt(optimizer)
            for weight in layer.parameters:
                weight.grad = kept[weight]
            step()
            for weight in layer.parameters:
                weight.grad = None
            for what in STORED:
                self._there.save(Buffer(what, number))
        for weight, grad in kept.items():
            weight.grad = grad

    # Saving and loading. -----------------------------------------------------------------------

    @contextmanager
    def loading(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """All slices and moments are in memory, to be filled; they are written at the end."""
        self._settle()
        every = [Buffer(what, at) for at in range(self._count) for what in STORED]
        for buffer in every:
            if buffer not in self._there.held:
                self._there.fetch(buffer)
        self._settle()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.adopt(optimizer)
            for buffer in every:
                self._there.save(buffer)
            self._settle()
            for buffer in sorted(self._there.held):
                self._release(buffer)
            self._there.take()

    def stored(self, tensor: Tensor) -> Tensor:
        """A tensor, or what the file has of it where it is one of these; from any thread."""
        return self._there.stored(tensor)

    def take(self) -> TierCounts:
        """Counts since this was last called, the end of a step; waits for what is being written."""
        self._settle()
        return self._there.take()

    def close(self) -> None:
        """End the thread; a file in a folder stays, and means nothing."""
        self._there.file.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    # Turns and moves. --------------------------------------------------------------------------

    @property
    def _there(self) -> SliceBuffers:
        assert self._buffers is not None  # noqa: S101
        return self._buffers

    @property
    def _planned(self) -> PrefetchSchedule:
        assert self._plan is not None  # noqa: S101
        return self._plan

    def _open(self, kind: str, visits: list[Visit], later: list[Visit]) -> None:
        """The schedule from what memory holds now; begins what its first turn needs."""
        key = kind, frozenset(self._there.held)
        if key not in self._plans:
            self._plans[key] = schedule_prefetch(
                self._sizes, self.capacity, visits, before=key[1], later=later, ahead=self._ahead
            )
        plan = self._plan = self._plans[key]
        size_of = self._sizes.of
        self._there.counts.planned_read_bytes += sum(
            self._there.file.of(size_of(move.buffer))
            for move in plan.moves
            if move.action == "read"
        )
        sent = self._sizes.whole // self.peers.count * (self.peers.count - 1)
        self._there.counts.planned_gathered_bytes += plan.gathers * sent
        self._at, self._has_asked = -1, False
        self._ask()

    def _ask(self) -> None:
        """Begin what the next turn needs."""
        if not self._has_asked:
            for move in self._planned.turns[self._at + 1].demand:
                self._do(move)
            self._has_asked = True

    def _turn(self, number: int) -> None:
        """Come to the next turn: what it uses is there, and what comes next has begun."""
        self._ask()
        self._at, self._has_asked = self._at + 1, False
        turn = self._planned.turns[self._at]
        if turn.visit.layer != number:
            raise RuntimeError(f"Layer {number} is used in the turn of layer {turn.visit.layer}.")
        for what in (*STORED, "whole"):
            self._await(Buffer(what, number))
        for move in turn.ahead:
            self._do(move)

    def _do(self, move: Move) -> None:
        begin = {"read": self._there.fetch, "gather": self._gather_layer, "free": self._release}
        begin[move.action](move.buffer)

    def _gather_layer(self, buffer: Buffer) -> None:
        """Begin to gather a layer, once its slice has been read."""
        self._await(Buffer("slice", buffer.layer))
        self._there.held.add(buffer)
        self._there.count(self._sizes.whole)
        own = self._layers[buffer.layer].weights.to(self._width)
        out = self._whole[buffer.layer] = own.new_empty(self.peers.count * len(own))
        if self.peers.group is None:
            out.copy_(own)
            return
        self._gathers[buffer.layer] = self._gather(out, own, self.peers.group, async_op=True)
        self._there.counts.gathered_bytes += self._tell_peers(own.nbytes)

    def _release(self, buffer: Buffer) -> None:
        """Free a buffer, after what is on its way to it or from it."""
        self._await(buffer)
        if buffer.what != "whole":
            self._there.free(buffer)
            return
        self._there.held.discard(buffer)
        del self._whole[buffer.layer]
        self._there.count(-self._sizes.whole)

    def _await(self, buffer: Buffer) -> None:
        """Wait for a buffer that is on its way."""
        if buffer.what != "whole":
            self._there.wait_for(buffer)
        elif (work := self._gathers.pop(buffer.layer, None)) is not None:
            began = time.perf_counter()
            with self.ledger.meter.wait():
                work.wait()
            self._there.counts.network_wait_s += time.perf_counter() - began

    def _settle(self) -> None:
        """Wait for everything that is on its way."""
        for number in list(self._gathers):
            self._await(Buffer("whole", number))
        self._there.settle()

    def _tell_peers(self, size: int) -> int:
        """Count what goes to each other rank; all of it."""
        others = [peer for peer in range(self.peers.count) if peer != self.peers.rank]
        self.ledger.sent_bytes[others] += size
        self.ledger.sent_messages[others] += 1
        self.ledger.received_bytes[others] += size
        return size * len(others)
