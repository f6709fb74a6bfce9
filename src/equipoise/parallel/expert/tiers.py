"""Experts in a file: layers are read and gathered while layers before them compute.

What it decides
    Nothing: ``schedule.expert.prefetch`` says what is read, gathered and freed in each turn. A
    slice is one buffer with this rank's gates, up and down projections of a layer, and one message
    of a gather; parameters and the optimizer's moments are views of buffers, whose memory is there
    only while a schedule says so. Gradients of a layer leave in one buffer, too, and the sums of
    this rank's slice stay in memory until the optimizer has used them.

    A gathered layer is computed slice by slice, as it lies::

        rank 0's slice    gate 0 1 | up 0 1 | down 0 1        rows of experts 0 and 1
        rank 1's slice    gate 2   | up 2   | down 2          rows of expert 2

    Whatever else asks for a parameter finds its name, shape and place as under ZeRO 3, so that
    checkpoints are the same; while they are loaded all of it is in memory.

Kept true (tests/multi/parallel/test_expert_tiers.py)
    Loss, every gradient and weights after a step have the bits of experts that stay in memory;
    bytes read, written and sent are those of the schedules; memory is never above the capacity.

Sources
    SE-MoE: arXiv:2205.10034.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from equipoise.base.errors import LayoutError
from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import Peers
from equipoise.memory.slices import SliceFile
from equipoise.nn.moe.layer import Experts
from equipoise.nn.tensor import part_of
from equipoise.parallel.expert.layered import Layered
from equipoise.parallel.zero.exchange import ExchangeGather, ExchangeReduce
from equipoise.schedule.expert.prefetch import (
    Ahead,
    Buffer,
    LayerBytes,
    Move,
    PrefetchSchedule,
    Visit,
    What,
    schedule_prefetch,
    there_and_back,
    updates,
    upward,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What an optimizer keeps of each weight, beside the number of its steps."""

_STORED: tuple[What, ...] = ("slice", "moments")

_MATRICES = ("gate", "up", "down")


@dataclass(slots=True)
class TierCounts:
    """What slices took since this was last read."""

    read_bytes: int = 0
    written_bytes: int = 0
    gathered_bytes: int = 0
    """Weights that this rank sent to others."""
    reduced_bytes: int = 0
    """Gradients that this rank sent to others."""
    storage_s: float = 0.0
    """Waits for the file."""
    network_s: float = 0.0
    """Waits for gathered weights."""
    peak_bytes: int = 0
    """The most that was in memory at once."""
    planned_read_bytes: int = 0
    """As the schedules say, in whole blocks."""
    planned_gathered_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Layer:
    """One sparse layer's slice on this rank."""

    experts: Experts
    counts: list[int]
    """Experts of each rank's slice."""
    shapes: list[tuple[int, int]]
    """Of an expert's gate, up and down projection."""
    slice: Tensor
    moments: Tensor
    views: dict[str, list[Tensor]]
    """Of ``slice`` under "slice" and of ``moments`` under their names, by matrix."""
    gradient: Tensor | None = None
    """Sums of this rank's slice."""


class ExpertTiers:
    """The slices of all sparse layers on one rank; see the module.

    Args:
        folder: For the file; a temporary one unless given.
        capacity: The most that memory holds of slices, moments and gathered layers [bytes].
        layers: How many sparse layers there are.
        peers: The ranks that have slices of the same experts.
        width: In which dtype layers are gathered.
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
        self.capacity, self.peers, self._count = capacity, peers, layers
        self.ledger = Ledger(peers.count)
        """Weights and gradients that this rank sent."""
        self._width, self._ahead, self._dtype = width, ahead, torch.float32
        self._layers: list[_Layer] = []
        self._file: SliceFile | None = None
        self._sizes = LayerBytes(0, 0, 0)
        self._whole: dict[int, Tensor] = {}
        self._held: set[Buffer] = set()
        self._reads: dict[Buffer, Future[None]] = {}
        self._gathers: dict[int, dist.Work | None] = {}
        self._writes: list[Future[None]] = []
        self._plans: dict[tuple[str, frozenset[Buffer]], PrefetchSchedule] = {}
        self._plan: PrefetchSchedule | None = None
        self._at, self._is_asked = -1, False
        self._resident = self._apart_bytes = 0
        self._lock = threading.Lock()
        self._counts = TierCounts()
        self._taken = (0, 0)
        self._by_storage: dict[int, Buffer] = {}
        self._gather = ExchangeGather(self.ledger.meter)
        self._reduce = ExchangeReduce(self.ledger.meter)

    # Layers take their places. -----------------------------------------------------------------

    def add(self, experts: Experts, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        """Take the experts of this rank and its peers, whole, and leave its slice.

        Args:
            experts: Weights [x, ...] are alike on all peers; X of all ranks is in their shape.
            mesh: Of the parameters that stay.
            placements: On it.

        Raises:
            LayoutError: the capacity does not hold two layers; the same on all ranks.
        """
        matrices = [getattr(experts, name) for name in _MATRICES]
        wholes = [each.weight.detach() for each in matrices]
        locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in wholes]
        if not all(each.weight.requires_grad for each in matrices):
            raise LayoutError(
                "experts.memory_mib holds experts that are trained, and train.freeze leaves them "
                "as they are. Remove one of them."
            )
        mine, ranks = len(locals_[0]), self.peers.count
        counts = [len(part_of(mine, ranks=ranks, rank=rank)) for rank in range(ranks)]
        most = -(-mine // ranks)
        shapes = [(each.shape[1], each.shape[2]) for each in locals_]
        elements = most * sum(rows * columns for rows, columns in shapes)
        if not self._layers:
            self._begin(elements, locals_[0].dtype)
        first = part_of(mine, ranks=ranks, rank=self.peers.rank).start
        own = counts[self.peers.rank]
        flat, moments = (torch.zeros(n * elements, dtype=self._dtype) for n in (1, 2))
        views = {"slice": _views(flat, most, own, shapes)}
        for name, part in zip(MOMENTS, moments.chunk(2), strict=True):
            views[name] = _views(part, most, own, shapes)
        for matrix, view, local, whole in zip(
            matrices, views["slice"], locals_, wholes, strict=True
        ):
            view.copy_(local[first : first + own])
            placed = DTensor.from_local(
                view, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            matrix.weight = nn.Parameter(placed)
            matrix.weight._spec = placed._spec
        layer = _Layer(experts, counts, shapes, flat, moments, views)
        number = len(self._layers)
        self._layers.append(layer)
        for what, tensor in zip(_STORED, (flat, moments), strict=True):
            self._by_storage[tensor.untyped_storage()._cdata] = Buffer(what, number)
            self._save(Buffer(what, number))
        self._settle()
        for tensor in (flat, moments):
            tensor.untyped_storage().resize_(0)
        experts.elsewhere = Layered(self, number)
        self._take_file()

    def _begin(self, elements: int, dtype: torch.dtype) -> None:
        """Open the file, once sizes are known."""
        ranks, item = self.peers.count, dtype.itemsize
        if self._width == dtype:
            self._width = None
        whole = ranks * elements * (self._width or dtype).itemsize
        is_own = ranks == 1 and self._width is None
        sizes = LayerBytes(item * elements, 2 * item * elements, 0 if is_own else whole)
        sizes.require(self.capacity, layers=self._count)
        self._sizes, self._dtype = sizes, dtype
        names = {}
        for number in range(self._count):
            names |= {f"slice {number}": sizes.slice, f"moments {number}": sizes.moments}
        self._file = SliceFile(self._folder, names)

    # A pass. -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward begins; its backward follows if gradients are enabled."""
        self._settle()
        trains = torch.is_grad_enabled()
        visits = there_and_back(self._count) if trains else upward(self._count)
        later = updates(self._count) if trains else visits
        self._open("train" if trains else "eval", visits, later)

    def enter(self, number: int) -> list[tuple[Tensor, ...]]:
        """Gates, up and down projections of each slice of a layer; begins what comes next."""
        if self._at < 0 or self._planned.turns[self._at].visit.layer != number:
            self._turn(number)
        layer, whole = self._layers[number], self._whole.get(number)
        flat = layer.slice[None] if whole is None else whole.view(self.peers.count, -1)
        most = max(layer.counts)
        return [
            tuple(_views(part, most, count, layer.shapes))
            for part, count in zip(flat, layer.counts, strict=True)
        ]

    def leave(self, number: int, gradients: Sequence[tuple[Tensor, ...]]) -> None:
        """Sum gradients of each slice of a layer over ranks, and add this rank's to its own."""
        layer, ranks = self._layers[number], self.peers.count
        most = max(layer.counts)
        fused = torch.zeros(ranks, len(layer.slice), dtype=self._dtype)
        for part, count, grads in zip(fused, layer.counts, gradients, strict=True):
            for view, grad in zip(_views(part, most, count, layer.shapes), grads, strict=True):
                view.copy_(grad)
        own = fused[0]
        if self.peers.group is not None:
            own = fused.new_empty(len(layer.slice))
            self._reduce(own, fused.view(-1), self.peers.group, dist.ReduceOp.SUM)
            self._counts.reduced_bytes += self._tell_peers(own.nbytes)
        self._keep_gradient(layer, own)

    def _keep_gradient(self, layer: _Layer, own: Tensor) -> None:
        views = _views(own, max(layer.counts), layer.counts[self.peers.rank], layer.shapes)
        weights = [getattr(layer.experts, name).weight for name in _MATRICES]
        if weights[0].grad is not None:
            for weight, view in zip(weights, views, strict=True):
                weight.grad.to_local().add_(view)
            return
        for weight, view in zip(weights, views, strict=True):
            weight.grad = DTensor.from_local(
                view,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )

    # An update. --------------------------------------------------------------------------------

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Run an optimizer on what stays in memory, and then on layer by layer.

        Args:
            optimizer: Whose moments lie in the file, if it keeps some.
            step: Its step, which leaves weights without a gradient alone.
        """
        self._settle()
        layers = [
            [getattr(each.experts, name).weight for name in _MATRICES] for each in self._layers
        ]
        kept = {weight: weight.grad for weight in _weights(optimizer)}
        elsewhere = {weight for weights in layers for weight in weights}
        has_some = any(kept[weight] is not None for weight in elsewhere)
        if has_some:
            self._open("update", updates(self._count), there_and_back(self._count))
        for weight in elsewhere:
            weight.grad = None
        step()
        for weight in kept:
            weight.grad = None
        for turn in self._planned.turns if has_some else ():
            number = turn.visit.layer
            self._turn(number)
            self._adopt(number, optimizer)
            for weight in layers[number]:
                weight.grad = kept[weight]
            step()
            for weight in layers[number]:
                weight.grad = None
            for what in _STORED:
                self._save(Buffer(what, number))
        for weight, grad in kept.items():
            weight.grad = grad

    def _adopt(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Let moments of a layer be views of its buffer; zeros where there are none yet."""
        if not isinstance(optimizer, torch.optim.Adam):
            return
        layer = self._layers[number]
        for at, name in enumerate(_MATRICES):
            weight = getattr(layer.experts, name).weight
            state = optimizer.state[weight]
            is_new = not state
            if is_new:
                state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in MOMENTS:
                view = layer.views[moment][at]
                if is_new:
                    view.zero_()
                elif state[moment].to_local().data_ptr() != view.data_ptr() or not view.numel():
                    view.copy_(state[moment].to_local())
                else:
                    continue
                state[moment] = DTensor.from_local(
                    view,
                    weight.device_mesh,
                    weight.placements,
                    run_check=False,
                    shape=weight.shape,
                    stride=weight.stride(),
                )

    # Everything at once. -----------------------------------------------------------------------

    @contextmanager
    def loading(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """All slices and moments in memory, whatever the capacity; written back at the end."""
        self._settle()
        self._plan = None
        for number in list(self._whole):
            self._release(Buffer("whole", number))
        every = [Buffer(what, at) for at in range(self._count) for what in _STORED]
        for buffer in every:
            if buffer not in self._held:
                self._fetch(buffer)
        self._settle()
        try:
            yield
        finally:
            for number in range(self._count):
                self._adopt(number, optimizer)
            for buffer in every:
                self._save(buffer)
            self._settle()
            for buffer in every:
                self._release(buffer)
            self._take_file()
            self._counts = TierCounts()

    def stored(self, tensor: Tensor) -> Tensor:
        """A tensor, or what the file has of it where it is one of these; from any thread."""
        buffer = self._by_storage.get(tensor.untyped_storage()._cdata)
        if buffer is None:
            return tensor
        flat = torch.empty(self._sizes.of(buffer) // self._dtype.itemsize, dtype=self._dtype)

        def read() -> None:
            before = self._files.read_bytes
            self._read_into(buffer, flat)
            self._apart_bytes += self._files.read_bytes - before

        self._files.run(read).result()
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def take(self) -> TierCounts:
        """Counts since this was last called, the end of a step; waits for what is being written."""
        self._settle()
        taken, self._counts = self._counts, TierCounts()
        self._counts.peak_bytes = self._resident
        taken.read_bytes, taken.written_bytes = self._take_file()
        return taken

    def close(self) -> None:
        """End the thread; the file stays, and means nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._temporary is not None:
            self._temporary.cleanup()

    # Moves. ------------------------------------------------------------------------------------

    @property
    def _files(self) -> SliceFile:
        assert self._file is not None  # noqa: S101
        return self._file

    @property
    def _planned(self) -> PrefetchSchedule:
        assert self._plan is not None  # noqa: S101
        return self._plan

    def _open(self, kind: str, visits: list[Visit], later: list[Visit]) -> None:
        """The schedule from what memory holds now; begins what its first turn needs."""
        key = kind, frozenset(self._held)
        if key not in self._plans:
            self._plans[key] = schedule_prefetch(
                self._sizes, self.capacity, visits, before=key[1], later=later, ahead=self._ahead
            )
        plan = self._plan = self._plans[key]
        file, sizes = self._files, self._sizes
        self._counts.planned_read_bytes += sum(
            file.of(sizes.of(move.buffer)) for move in plan.moves if move.action == "read"
        )
        sent = sizes.whole // self.peers.count * (self.peers.count - 1)
        self._counts.planned_gathered_bytes += plan.gathers * sent
        self._at, self._is_asked = -1, False
        self._ask()

    def _ask(self) -> None:
        """Begin what the next turn needs."""
        if not self._is_asked:
            for move in self._planned.turns[self._at + 1].demand:
                self._do(move)
            self._is_asked = True

    def _turn(self, number: int) -> None:
        """Come to the next turn: what it uses is there, and what comes next has begun."""
        self._ask()
        self._at, self._is_asked = self._at + 1, False
        turn = self._planned.turns[self._at]
        if turn.visit.layer != number:
            raise RuntimeError(f"Layer {number} is used in the turn of layer {turn.visit.layer}.")
        self._await(Buffer("slice", number))
        self._await(Buffer("moments", number))
        self._await(Buffer("whole", number))
        for move in turn.ahead:
            self._do(move)

    def _do(self, move: Move) -> None:
        {"read": self._fetch, "gather": self._gather_layer, "free": self._release}[move.action](
            move.buffer
        )

    def _fetch(self, buffer: Buffer) -> None:
        """Begin to read a buffer."""
        self._held.add(buffer)
        flat = self._flat(buffer)

        def read() -> None:
            self._add(self._sizes.of(buffer))
            flat.untyped_storage().resize_(self._sizes.of(buffer))
            self._read_into(buffer, flat)

        self._reads[buffer] = self._files.run(read)

    def _read_into(self, buffer: Buffer, flat: Tensor) -> None:
        self._files.read(f"{buffer.what} {buffer.layer}", flat)

    def _gather_layer(self, buffer: Buffer) -> None:
        """Begin to gather a layer, once its slice has been read."""
        source = Buffer("slice", buffer.layer)
        self._await(source)
        self._held.add(buffer)
        self._add(self._sizes.whole)
        own = self._flat(source)
        own = own.to(self._width or self._dtype)
        out = own.new_empty(self.peers.count * len(own))
        self._whole[buffer.layer] = out
        if self.peers.group is None:
            out.copy_(own)
            return
        work = self._gather(out, own, self.peers.group, async_op=True)
        self._gathers[buffer.layer] = work
        self._counts.gathered_bytes += self._tell_peers(own.nbytes)

    def _release(self, buffer: Buffer) -> None:
        """Free a buffer, after what is being read into it or written from it."""
        self._await(buffer)
        self._held.discard(buffer)
        if buffer.what == "whole":
            self._whole.pop(buffer.layer)
            self._add(-self._sizes.whole)
            return
        flat = self._flat(buffer)

        def free() -> None:
            flat.untyped_storage().resize_(0)
            self._add(-self._sizes.of(buffer))

        if all(each.done() for each in self._writes):
            free()
        else:
            self._writes.append(self._files.run(free))

    def _save(self, buffer: Buffer) -> None:
        """Begin to write a buffer."""
        name, flat = f"{buffer.what} {buffer.layer}", self._flat(buffer)
        self._writes.append(self._files.run(lambda: self._files.write(name, flat)))

    def _await(self, buffer: Buffer) -> None:
        """Wait for a buffer that is on its way."""
        if buffer.what == "whole":
            work = self._gathers.pop(buffer.layer, None)
            if work is not None:
                began = time.perf_counter()
                with self.ledger.meter.wait():
                    work.wait()
                self._counts.network_s += time.perf_counter() - began
            return
        future = self._reads.pop(buffer, None)
        if future is not None:
            began = time.perf_counter()
            future.result()
            self._counts.storage_s += time.perf_counter() - began

    def _settle(self) -> None:
        """Wait for everything that is on its way."""
        for buffer in list(self._reads):
            self._await(buffer)
        for number in list(self._gathers):
            self._await(Buffer("whole", number))
        began = time.perf_counter()
        for future in self._writes:
            future.result()
        self._counts.storage_s += time.perf_counter() - began
        self._writes.clear()

    def _flat(self, buffer: Buffer) -> Tensor:
        layer = self._layers[buffer.layer]
        return layer.slice if buffer.what == "slice" else layer.moments

    def _add(self, size: int) -> None:
        with self._lock:
            self._resident += size
            self._counts.peak_bytes = max(self._counts.peak_bytes, self._resident)

    def _tell_peers(self, size: int) -> int:
        """Count what goes to each other rank; all of it."""
        for peer in range(self.peers.count):
            if peer != self.peers.rank:
                self.ledger.sent_bytes[peer] += size
                self.ledger.sent_messages[peer] += 1
                self.ledger.received_bytes[peer] += size
        return size * (self.peers.count - 1)

    def _take_file(self) -> tuple[int, int]:
        """Bytes read and written since this was last called."""
        now = self._files.read_bytes - self._apart_bytes, self._files.written_bytes
        read, written = now[0] - self._taken[0], now[1] - self._taken[1]
        self._taken = now
        return read, written


def _weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _views(flat: Tensor, most: int, count: int, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Each matrix of the first ``count`` experts, in a buffer with room for ``most`` of them."""
    parts = flat.split([most * rows * columns for rows, columns in shapes])
    return [
        part.view(most, rows, columns)[:count]
        for part, (rows, columns) in zip(parts, shapes, strict=True)
    ]
