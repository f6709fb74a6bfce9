"""What ``equipoise calibrate RUN.toml`` measures of a model's training step, part by part.

Why
    Kernels that are timed one by one leave out what a training step does between them: eager
    element-wise passes, hooks that gather and scatter weights, the interpreter. On a core these
    are a tenth to a half of a step. So a step's own parts are timed where they run.

What it decides
    The form of these measurements in the device file. A *way* is how ranks share a step; each
    has the seconds of one layer and of what lies outside of layers, at a few numbers of tokens.
    They are of one model's widths, whatever its number of layers.

Kept true (tests/unit/spec/device/test_parts.py)
    What is written reads back equal; models that differ in depth alone have one name.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from equipoise.base.digest import digest
from equipoise.spec.device.spec import Dtype
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

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
class Passes:
    """Seconds of one part for one micro-batch, the attention core left out."""

    forward_s: Measured
    backward_s: Measured
    """Whole."""
    input_s: Measured
    """Of a backward in two halves the first; where none is halved the whole."""
    weight_s: Measured
    """The second; where none is halved 0."""


@dataclass(frozen=True, slots=True)
class SizePoint:
    """A micro-batch of so many tokens on this rank, in documents too short for attention."""

    tokens: int
    layer: Passes
    first: Passes
    """What comes before the layers; where a rank has all of them it is counted in ``last``."""
    last: Passes
    """What comes after the layers: the head and the loss."""


@dataclass(frozen=True, slots=True)
class OncePoint:
    """Seconds that one part adds to a step once, however many micro-batches."""

    gather_s: Measured
    """To the first forward, in which parameters are put together."""
    reduce_s: Measured
    """Of the sum of gradients, and of their norm."""
    optimizer_s: Measured


@dataclass(frozen=True, slots=True)
class DocPoint:
    """Seconds of the attention core of one document in one layer, all heads of a rank."""

    tokens: int
    forward_s: Measured
    backward_s: Measured


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """What attention over several ranks takes beyond its tiles and messages, in one layer."""

    strategy: str
    forward_call_s: float
    forward_tile_s: float
    """Of each tile of the rank that has most."""
    backward_call_s: float
    backward_tile_s: float


@dataclass(frozen=True, slots=True)
class WayParts:
    """A step's parts, shared in one way."""

    way: Way
    sizes: tuple[SizePoint, ...]
    """Ascending in tokens."""
    documents: tuple[DocPoint, ...]
    """Ascending in tokens."""
    layer: OncePoint
    first: OncePoint
    last: OncePoint
    step_s: Measured
    """What a step takes beyond all this: to meet, and to begin."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of one model's step at one precision on so many ranks."""

    model: str
    """As ``parts_name`` names it."""
    title: str
    """Its widths, for people."""
    dtype: Dtype
    ranks: int
    most_tokens: int
    """Of a micro-batch, as far as was measured."""
    ways: tuple[WayParts, ...]
    context: tuple[ContextPoint, ...] = ()


def parts_name(model: ModelSpec) -> str:
    """A name of a model's widths, whatever its depth.

    >>> from dataclasses import replace
    >>> from equipoise.spec.model.presets import preset
    >>> parts_name(preset("2m")) == parts_name(replace(preset("2m"), layers=7))
    True
    >>> parts_name(preset("2m")) == parts_name(preset("7m"))
    False
    """
    return digest(dataclasses.replace(model, layers=1))


def way_of(layout: Layout) -> Way | None:
    """The way in which a layout shares a step; None where it mixes several.

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
