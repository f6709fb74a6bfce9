"""Slices of experts in memory and in their file: read, written and freed in order.

Why
    What a layer needs is read beside the computation of others, and memory that is freed after a
    write must be free before the next read takes it. One thread does all of it.

What it decides
    Nothing: ``tiers`` says what comes and goes.

Kept true (tests/multi/parallel/test_expert_tiers.py)
    Bytes read and written, and the most that was in memory, are those of the schedules.
"""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from equipoise.memory.slices import SliceFile
from equipoise.parallel.expert.slices import ExpertSlice
from equipoise.schedule.expert.prefetch import Buffer, SliceBytes, What

STORED: tuple[What, ...] = ("slice", "moments")
"""What the file has of a layer."""


@dataclass(slots=True)
class TierCounts:
    """What experts in a file took since this was last read, on one rank."""

    read_bytes: int = 0
    written_bytes: int = 0
    gathered_bytes: int = 0
    """Weights that this rank sent to others."""
    reduced_bytes: int = 0
    """Gradients that it sent to others."""
    planned_read_bytes: int = 0
    """By the schedules, in whole blocks."""
    planned_gathered_bytes: int = 0
    storage_wait_s: float = 0.0
    network_wait_s: float = 0.0
    """For gathered weights."""
    peak_bytes: int = 0
    """The most that was in memory at once."""


class SliceBuffers:
    """Buffers of all layers' slices and moments on one rank, and the file behind them.

    Args:
        folder: For the file.
        sizes: Of a layer.
        layers: How many there are.
    """

    def __init__(self, folder: Path, sizes: SliceBytes, layers: int) -> None:
        names = {}
        for number in range(layers):
            for what in STORED:
                names[f"{what} {number}"] = sizes.of(Buffer(what, number))
        self.file = SliceFile(folder, names)
        self.held: set[Buffer] = set()
        """What memory holds, or is about to: gathered layers, too."""
        self.counts = TierCounts()
        self._sizes = sizes
        self._layers: list[ExpertSlice] = []
        self._by_storage: dict[int, Buffer] = {}
        self._reads: dict[Buffer, Future[None]] = {}
        self._writes: list[Future[None]] = []
        self._resident = self._apart_bytes = 0
        self._lock, self._taken = threading.Lock(), (0, 0)

    def add(self, layer: ExpertSlice) -> None:
        """Write the next layer's slice and moments, and free their memory."""
        number = len(self._layers)
        self._layers.append(layer)
        for buffer in (Buffer(what, number) for what in STORED):
            self._by_storage[self._flat(buffer).untyped_storage()._cdata] = buffer
            self.save(buffer)
        self.settle()
        for what in STORED:
            self._flat(Buffer(what, number)).untyped_storage().resize_(0)
        self._take_file()

    def fetch(self, buffer: Buffer) -> None:
        """Begin to read a buffer."""
        self.held.add(buffer)
        size, flat = self._sizes.of(buffer), self._flat(buffer)

        def read() -> None:
            self.count(size)
            flat.untyped_storage().resize_(size)
            self.file.read(f"{buffer.what} {buffer.layer}", flat)

        self._reads[buffer] = self.file.run(read)

    def free(self, buffer: Buffer) -> None:
        """Free a buffer, after what is being read into it or written from it."""
        self.wait_for(buffer)
        self.held.discard(buffer)
        flat = self._flat(buffer)

        def free() -> None:
            flat.untyped_storage().resize_(0)
            self.count(-self._sizes.of(buffer))

        if self._writes:
            self._writes.append(self.file.run(free))
        else:
            free()

    def save(self, buffer: Buffer) -> None:
        """Begin to write a buffer."""
        name, flat = f"{buffer.what} {buffer.layer}", self._flat(buffer)
        self._writes.append(self.file.run(lambda: self.file.write(name, flat)))

    def wait_for(self, buffer: Buffer) -> None:
        """Wait for a buffer that is being read."""
        if (future := self._reads.pop(buffer, None)) is not None:
            began = time.perf_counter()
            future.result()
            self.counts.storage_wait_s += time.perf_counter() - began

    def settle(self) -> None:
        """Wait for all that is being read or written."""
        for buffer in list(self._reads):
            self.wait_for(buffer)
        began = time.perf_counter()
        for future in self._writes:
            future.result()
        self._writes.clear()
        self.counts.storage_wait_s += time.perf_counter() - began

    def count(self, size: int) -> None:
        """Count memory that is taken, or given back."""
        with self._lock:
            self._resident += size
            self.counts.peak_bytes = max(self.counts.peak_bytes, self._resident)

    def stored(self, tensor: Tensor) -> Tensor:
        """A tensor, or what the file has of it where it is one of these; from any thread."""
        buffer = self._by_storage.get(tensor.untyped_storage()._cdata)
        if buffer is None:
            return tensor
        like = self._flat(buffer)
        flat = like.new_empty(len(like))

        def read() -> None:
            before = self.file.read_bytes
            self.file.read(f"{buffer.what} {buffer.layer}", flat)
            self._apart_bytes += self.file.read_bytes - before

        self.file.run(read).result()
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def take(self) -> TierCounts:
        """Counts since this was last called; waits for what is being written."""
        self.settle()
        taken, self.counts = self.counts, TierCounts(peak_bytes=self._resident)
        taken.read_bytes, taken.written_bytes = self._take_file()
        return taken

    def _flat(self, buffer: Buffer) -> Tensor:
        layer = self._layers[buffer.layer]
        return layer.weights if buffer.what == "slice" else layer.moments

    def _take_file(self) -> tuple[int, int]:
        """Bytes read and written since this was last called, without those of saves."""
        now = self.file.read_bytes - self._apart_bytes, self.file.written_bytes
        read, written = now[0] - self._taken[0], now[1] - self._taken[1]
        self._taken = now
        return read, written
