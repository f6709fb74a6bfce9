"""What ``equipoise calibrate RUN.toml`` measures of a model's training step, part by part.

Why
    Kernels timed one by one miss what a training step does between them: eager element-wise
    passes, hooks that gather and scatter weights, the interpreter. On a core that is a tenth to a
    half of a step. So a step's own parts are timed in place.

What it decides
    The form of these measurements in the device file. A *way* is how ranks share a step; each has
    the seconds of one layer and of what lies outside the layers, at a few numbers of tokens. They
    hold for one model's widths and any depth.

Kept true (tests/unit/spec/device/test_parts.py)
    What is written reads back equal; models that differ only in depth have one name.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from equipoise.base.digest import digest
from equipoise.spec.device.spec import Dtype
from equipoise.spec.layout import Layout
from equipoise.spec.modality.encoder import EncoderSpec
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.model.sizes import timed_sizes

Way = Literal["zero-0", "zero-1", "zero-2", "zero-3", "tensor", "pipeline"]
"""How all ranks share a step: tokens at a ZeRO stage, weights, or layers."""

WAYS: tuple[Way, ...] = ("zero-0", "zero-1", "zero-2", "zero-3", "tensor", "pipeline")


@dataclass(frozen=True, slots=True)
class Measured:
    """A median and its 95% interval."""

    mid: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PartPasses:
    """Seconds of one part for one micro-batch, without the attention core."""

    forward_s: Measured
    backward_s: Measured
    """A whole backward."""
    input_s: Measured
    """The first half of a split backward; the whole if none is split."""
    weight_s: Measured
    """The second half of a split backward; 0 if none is split."""


@dataclass(frozen=True, slots=True)
class SizePoint:
    """A micro-batch of ``tokens`` tokens on this rank, in documents too short for attention."""

    tokens: int
    layer: PartPasses
    first: PartPasses
    """What comes before the layers; counted in ``last`` if a rank has all layers."""
    last: PartPasses
    """What comes after the layers: the head and the loss."""


@dataclass(frozen=True, slots=True)
class OncePoint:
    """Seconds that one part adds once per step, whatever the number of micro-batches."""

    gather_s: Measured
    """Added to the first forward, which gathers parameters."""
    reduce_s: Measured
    """The sum of gradients, and their norm."""
    optimizer_s: Measured


@dataclass(frozen=True, slots=True)
class DocPoint:
    """Seconds of one document's attention core in one layer, over all heads of a rank."""

    tokens: int
    forward_s: Measured
    backward_s: Measured


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """Overhead of attention over several ranks beyond tiles and messages, in one layer."""

    strategy: str
    forward_call_s: float
    forward_tile_s: float
    """Overhead of each tile, on the rank with the most."""
    backward_call_s: float
    backward_tile_s: float


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass over the items of a rank: what a call, each part and the work cost.

    Parts are the sizes of items, each of which is one call of attention; of reading, the items.
    Work is the multiplications of a forward; of reading, the patches.
    """

    call_s: float
    part_s: float
    work_s: float

    def seconds(self, parts: int, work: float) -> float:
        """What so much takes; nothing takes no time."""
        return self.call_s + self.part_s * parts + self.work_s * work if parts else 0.0


@dataclass(frozen=True, slots=True)
class EncoderPoint:
    """What an encoder takes on a rank, while all ranks encode."""

    encoder: str
    """Name of its sizes and of the decoder's width, by ``encoder_name``."""
    title: str
    """Its kind and sizes, for people."""
    reading: PassCost
    """From files to patches."""
    forward: PassCost
    backward: PassCost


@dataclass(frozen=True, slots=True)
class WayParts:
    """The parts of a step shared in one way."""

    way: Way
    sizes: tuple[SizePoint, ...]
    """Ascending in tokens."""
    documents: tuple[DocPoint, ...]
    """Ascending in tokens."""
    layer: OncePoint
    first: OncePoint
    last: OncePoint
    step_s: Measured
    """The rest of a step: meeting the other ranks, and beginning."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of one model's step at one precision on ``ranks`` ranks."""

    model: str
    """Name of the model, by ``parts_name``."""
    title: str
    """Its widths, for people."""
    dtype: Dtype
    ranks: int
    most_tokens: int
    """Most tokens of a micro-batch that were measured."""
    ways: tuple[WayParts, ...]
    context: tuple[ContextPoint, ...] = ()
    encoders: tuple[EncoderPoint, ...] = ()
    """What encodes images and sound beside it."""


def encoder_name(spec: EncoderSpec, width: int) -> str:
    """A name for an encoder beside a decoder of some hidden width."""
    return digest([spec.sizes, width])


def parts_name(model: ModelSpec) -> str:
    """A name for a model's widths, whatever its depth.

    >>> from dataclasses import replace
    >>> from equipoise.spec.model.presets import preset
    >>> parts_name(preset("2m")) == parts_name(replace(preset("2m"), layers=7))
    True
    >>> parts_name(preset("2m")) == parts_name(preset("7m"))
    False
    """
    return digest(timed_sizes(dataclasses.replace(model, layers=1)))


def way_of(layout: Layout) -> Way | None:
    """The way in which a layout shares a step; None if it mixes several.

    >>> way_of(Layout(dp=2, zero=3)), way_of(Layout(tp=2)), way_of(Layout(dp=2, pp=2))
    ('zero-3', 'tensor', None)
    """
    if layout.replicas > 1 or layout.ep * layout.etp > 1:
        return None
    if layout.zero_ranks == layout.world:
        return WAYS[layout.zero]
    if layout.tp == layout.world:
        return "tensor"
    return "pipeline" if layout.pp == layout.world else None
