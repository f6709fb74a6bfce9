"""What another layout reads of a checkpoint, and a checkpoint written as that layout wants it.

What it decides
    Which part of each tensor a rank holds is known without ranks (``parallel.held``); moments lie
    where their weight does, and what has another shape than its weight, such as a count of steps,
    is whole on every rank that has the weight. Stages of a pipeline are those that the run has
    begun with, if it has as many; else layers are split by counted work, as a run does that has
    measured nothing.

Kept true (tests/multi/checkpoint/test_reshape.py)
    What is counted is what real ranks of the layout read.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from equipoise.balance.stage import price_layers, split_model
from equipoise.base.errors import CheckpointError, SpecError
from equipoise.checkpoint.blocks import BLOCK_BYTES
from equipoise.checkpoint.export import adapter_shapes, lora_of, model_of, require_weights
from equipoise.checkpoint.index import Index, read_index
from equipoise.checkpoint.manifest import (
    FIRST_FORMAT,
    MANIFEST,
    OWN_ENGINE,
    Manifest,
    newest_good,
    open_manifest,
    read_manifest,
    read_steadily,
)
from equipoise.checkpoint.reading import ReadCounts
from equipoise.checkpoint.reshape import count_loads, rewrite
from equipoise.checkpoint.same import require_text_alone
from equipoise.cost.curve import counted_curve
from equipoise.nn.decoder import Decoder
from equipoise.nn.lora import add_adapters
from equipoise.parallel.held import HeldWeights, held_weights
from equipoise.schedule.block import Box
from equipoise.sim.stages import ranks_of_stages, settle_edges
from equipoise.spec.device.here import this_cpu
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.names import CHECKPOINTS
from equipoise.spec.pack import MicroBatch
from equipoise.spec.plan import Stages
from equipoise.spec.run.layout import LayoutSpec
from equipoise.spec.run.spec import RunSpec
from equipoise.spec.words import LayoutWords, read_layout

_MODEL, _MOMENTS = "model.", "optimizer.state."
"""How names of a checkpoint's weights and of their moments begin."""

_MOST_RANKS = 1 << 14

_TRIED_S = 0.2
"""How long a disk that was not calibrated is tried."""


@dataclass(frozen=True, slots=True)
class ReshapeRequest:
    """A checkpoint and the layout that is to load it."""

    source: Path
    """A run's folder, whose newest whole checkpoint is taken; or a checkpoint."""
    layout: str
    """Words as ``dp=4,tp=2``; what is not given is 1, and ``zero`` is 1."""


@dataclass(frozen=True, slots=True)
class ReshapeAnswer:
    """What the ranks of a layout read of a checkpoint."""

    folder: Path
    """The checkpoint."""
    step: int
    world_before: int
    """Ranks that wrote it."""
    layout: Layout
    stages: Stages | None
    """Layers of each stage, if the layout has a pipeline."""
    stored_bytes: int
    """Its shards."""
    ranks: tuple[ReadCounts, ...]
    """What each rank reads."""
    disk_bytes_per_s: float | None
    """As ``equipoise calibrate`` has measured this machine's disk, or else as a part of the
    checkpoint was read just now; None if it has no bytes."""
    passed_over: tuple[str, ...]
    """A sentence for each newer checkpoint that is torn."""

    @property
    def read_bytes(self) -> int:
        """Bytes that all ranks read."""
        return sum(each.read_bytes for each in self.ranks)

    @property
    def shared_disk_s(self) -> float | None:
        """How long they read if all share one disk like this machine's [s]."""
        return self._seconds(self.read_bytes)

    @property
    def own_disk_s(self) -> float | None:
        """How long they read if each has such a disk of its own [s]."""
        return self._seconds(max(each.read_bytes for each in self.ranks))

    def _seconds(self, size_bytes: int) -> float | None:
        return None if self.disk_bytes_per_s is None else size_bytes / self.disk_bytes_per_s


def predict_reshape(request: ReshapeRequest) -> ReshapeAnswer:
    """Count what the ranks of a layout read of a checkpoint, without reading its shards.

    Where no disk was calibrated, a fifth of a second is spent reading one to see how fast it is.

    Raises:
        SpecError: the layout's words, or the source, are wrong.
        LayoutError: the model does not divide over the layout.
        CheckpointError: no checkpoint is whole as far as its manifest shows, or it is of a kind
            that this cannot count.
    """
    return read_steadily(request.source / CHECKPOINTS, lambda: _Reshape.open(request).answer())


def reshape(
    request: ReshapeRequest, target: Path, wrote: Callable[[], None]
) -> tuple[Path, ReshapeAnswer]:
    """Write a checkpoint anew, in a folder that a run may go on in, as a layout wants it.

    Args:
        request: The checkpoint and the layout.
        target: The new run's folder; its checkpoint goes into ``checkpoint/``.
        wrote: Called after each rank's shard.

    Returns:
        The new checkpoint, and what ranks of the layout read of it.

    Raises:
        EquipoiseError: as ``predict_reshape``; or the checkpoint is torn, or cannot be written.
    """

    def write() -> tuple[Path, ReshapeAnswer]:
        work = _Reshape.open(request, read=read_manifest)  # a newer, torn one is passed over
        root = target / CHECKPOINTS
        path = rewrite(work.folder, work.manifest, work.index, work.boxes(), root, wrote=wrote)
        written = dataclasses.replace(
            work, folder=path, manifest=open_manifest(path), index=read_index(path)
        )
        return path, written.answer()

    return read_steadily(request.source / CHECKPOINTS, write)


@dataclass(frozen=True, slots=True)
class _Reshape:
    """An opened checkpoint and a layout."""

    folder: Path
    manifest: Manifest
    index: Index
    words: LayoutWords
    stages: Stages | None
    decoder: Decoder
    passed_over: tuple[str, ...]

    @classmethod
    def open(
        cls, request: ReshapeRequest, *, read: Callable[[Path], Manifest] = open_manifest
    ) -> "_Reshape":
        words = read_layout(request.layout)
        if words.layout.world > _MOST_RANKS:
            raise SpecError(
                f"layout: {words.layout.world:,} ranks are too many: each is counted, which takes "
                f"10 ms. Give degrees whose product is {_MOST_RANKS:,} or less."
            )
        folder, manifest, torn = _find(request.source, read)
        require_text_alone(manifest, folder)
        if manifest.engine != OWN_ENGINE or manifest.format == FIRST_FORMAT:
            what = (
                f'was trained with model.engine = "{manifest.engine}", whose weights do not '
                f"declare how they are split"
                if manifest.engine != OWN_ENGINE
                else f"has checkpoint format {FIRST_FORMAT}, whose tensors are read whole"
            )
            raise CheckpointError(
                f"{folder} {what}. Resume it in the new layout as it is: equipoise train loads any "
                f"checkpoint into any layout."
            )
        require_weights(folder, manifest)
        model = model_of(manifest)
        words.layout.require_model(model)
        with torch.device("meta"):
            decoder = Decoder(model)
            if adapter_shapes(folder):
                add_adapters(decoder, lora_of(folder, manifest), 0)
        stages = _stages(words, model, manifest, request.source)
        return cls(folder, manifest, read_index(folder), words, stages, decoder, tuple(torn))

    def boxes(self) -> list[dict[str, Box]]:
        """What each rank holds of the checkpoint's tensors.

        Raises:
            CheckpointError: the checkpoint has a tensor that no rank holds.
        """
        layout = self.words.layout
        weights = dict(self.decoder.named_parameters())
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        owners = {name: _owner(name) for name in self.index}
        ranks = [
            self._boxes_of(held_weights(self.decoder, layout, self.stages, rank), owners, shapes)
            for rank in range(layout.world)
        ]
        held = {name for boxes in ranks for name in boxes}
        if extra := [name for name in self.index if name not in held]:
            raise CheckpointError(
                f"{self.folder} has {extra[0]}, which its model does not have. Restore a copy of "
                f"it."
            )
        return ranks

    def _boxes_of(
        self,
        held: HeldWeights,
        owners: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, Box]:
        boxes: dict[str, Box] = {}
        for name, stored in self.index.items():
            owner = owners[name]
            if owner in held.boxes and stored.shape == shapes[owner]:
                boxes[name] = held.boxes[owner]
            elif owner in held.boxes or owner in held.buffers:
                boxes[name] = [(0, length) for length in stored.shape]
        return boxes

    def answer(self) -> ReshapeAnswer:
        """What the layout's ranks read."""
        return ReshapeAnswer(
            self.folder,
            self.manifest.step,
            self.manifest.world,
            self.words.layout,
            self.stages,
            sum(self.manifest.files[name][0] for name in self.manifest.blocks),
            tuple(count_loads(self.folder, self.manifest, self.index, self.boxes())),
            _disk_rate(self.folder, self.manifest),
            self.passed_over,
        )


def _find(source: Path, read: Callable[[Path], Manifest]) -> tuple[Path, Manifest, list[str]]:
    """A checkpoint, or the newest whole one of a run."""
    if (source / MANIFEST).exists():
        return source, open_manifest(source), []
    newest = newest_good(source / CHECKPOINTS, read=read)
    if newest is None:
        raise CheckpointError(
            f"{source} has no checkpoint yet. Train it further; checkpoint.every_steps says how "
            f"often one is written."
        )
    return newest


def _owner(name: str) -> str:
    """The weight or buffer that a tensor of a checkpoint is, or belongs to.

    >>> _owner("model.embed.weight"), _owner("optimizer.state.embed.weight.exp_avg")
    ('embed.weight', 'embed.weight')
    """
    if name.startswith(_MODEL):
        return name.removeprefix(_MODEL)
    return name.removeprefix(_MOMENTS).rpartition(".")[0]


def _stages(
    words: LayoutWords, model: ModelSpec, manifest: Manifest, source: Path
) -> Stages | None:
    """Layers of each stage; None without a pipeline."""
    layout = words.layout
    if layout.pp == 1:
        return None
    spec = LayoutSpec(pp=layout.pp, virtual=words.virtual)
    run = source.parent.parent if (source / MANIFEST).exists() else source
    edges = settle_edges(RunSpec(layout=spec), model, run, None)
    if not edges:
        documents = np.array([[0, 0, manifest.context_tokens]], dtype=np.int64)
        prices = price_layers(counted_curve(model), model, [MicroBatch(documents)])
        edges = tuple(split_model(prices, model, spec.stages).edges.tolist())
    return Stages(edges, tuple(ranks_of_stages(spec).tolist()))


def _disk_rate(folder: Path, manifest: Manifest) -> float | None:
    """What the disk reads, as calibrated or else tried on the largest shard [bytes/s]."""
    with suppress(SpecError):
        if rate := this_cpu().disk_read_bytes_per_s:
            return rate
    largest = max(manifest.blocks, key=lambda name: manifest.files[name][0], default=None)
    if largest is None:
        return None
    read_bytes, began = 0, time.perf_counter()
    with suppress(OSError), (folder / largest).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from memory
        while time.perf_counter() - began < _TRIED_S and (data := file.read(BLOCK_BYTES)):
            read_bytes += len(data)
    return read_bytes / (time.perf_counter() - began) or None
