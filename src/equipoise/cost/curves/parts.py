"""Read a training step's parts as timed on this machine, between the timed sizes.

Why
    On a core of this machine up to half of a step lies between kernels, and no count of bytes or
    launches predicts it. ``equipoise calibrate RUN.toml`` times a step's parts in place; this
    module reads them.

What it decides
    Seconds are linear between timed numbers of tokens. Below the smallest they follow the first
    two, but not below a tenth of the smallest; beyond the last they follow the last two, and are
    flagged. Attention grows with a document's pairs as in ``cost.curve``.

Kept true (tests/unit/cost/curves/test_parts.py)
    Timed points are met; no pass is free or negative; what was never timed is None.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.cost.curve import LoadCurve
from equipoise.cost.curves.measured import model_parts
from equipoise.spec.device.parts import (
    ContextPoint,
    DocPoint,
    EncoderPoint,
    Measured,
    ModelParts,
    OncePoint,
    PartPasses,
    WayParts,
    parts_name,
    way_of,
)
from equipoise.spec.device.spec import DeviceSpec, Dtype
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

Part = Literal["layer", "first", "last"]
Once = Literal["gather_s", "reduce_s", "optimizer_s"]


@dataclass(frozen=True, slots=True, eq=False)
class PartCurves:
    """The parts of one layout's step, as curves over tokens."""

    parts: ModelParts
    way: WayParts
    forward: LoadCurve
    """Attention core of a document in one layer, over all heads of a rank."""
    backward: LoadCurve

    def passes_s(self, part: Part, tokens: float, *, halves: bool) -> Floats:
        """Forward, input gradient and weight gradient, float64 [3] [s].

        ``halves`` says whether the schedule splits the backward.
        """
        sizes = np.array([point.tokens for point in self.way.sizes], dtype=np.float64)
        known = np.array([_columns(getattr(point, part)) for point in self.way.sizes])
        forward, backward, first, second = _between(sizes, known, tokens)
        if halves:
            return np.array([forward, first, second])
        return np.array([forward, max(backward - second, 0.0), min(second, backward)])

    def is_beyond(self, tokens: float) -> bool:
        """Whether ``tokens`` exceeds what was timed."""
        return tokens > self.way.sizes[-1].tokens

    def once_s(self, kind: Once, layers: float, *, first: float, last: float) -> float:
        """What a rank with these layers and ends, or shares of them, pays once per step [s]."""
        held: list[tuple[float, OncePoint]] = [(layers, self.way.layer)]
        held += [(first, self.way.first), (last, self.way.last)]
        whole = 0.0
        for count, point in held:
            each: Measured = getattr(point, kind)
            whole += count * each.mid
        return whole

    def context(self, strategy: str) -> ContextPoint | None:
        """Overhead of attention over several ranks beyond tiles and messages; None if not timed."""
        points = [each for each in self.parts.context if each.strategy == strategy]
        return points[0] if points else None


def _columns(passes: PartPasses) -> list[float]:
    four = passes.forward_s, passes.backward_s, passes.input_s, passes.weight_s
    return [each.mid for each in four]


def _between(sizes: Floats, known: Floats, tokens: float) -> Floats:
    """Interpolate each column linearly in tokens."""
    least = known[0] * 0.1
    if len(sizes) == 1:
        return np.asarray(np.maximum(known[0] * tokens / sizes[0], least))
    at = int(np.clip(np.searchsorted(sizes, tokens) - 1, 0, len(sizes) - 2))
    share = (tokens - sizes[at]) / (sizes[at + 1] - sizes[at])
    bounded: Floats = np.maximum(known[at] + share * (known[at + 1] - known[at]), least)
    return bounded


def part_curves(
    device: DeviceSpec, model: ModelSpec, dtype: Dtype, layout: Layout
) -> PartCurves | None:
    """The curves of a layout's step; None if it was not timed.

    Only ``this-cpu`` has any, and the model's depth does not matter.
    """
    way = way_of(layout)
    for parts in _timed(device, model, dtype, layout.world):
        for each in parts.ways:
            if each.way == way:
                return PartCurves(parts, each, *document_curves(each.documents))
    return None


def encoder_points(device: DeviceSpec, ranks: int) -> dict[str, EncoderPoint]:
    """What was timed of encoders on ``ranks`` ranks, by ``encoder_name``."""
    if device.curve_file is None:
        return {}
    known = [each for each in model_parts(device.curve_file) if each.ranks == ranks]
    return {point.encoder: point for each in known for point in each.encoders}


def is_timed(device: DeviceSpec, model: ModelSpec, dtype: Dtype, ranks: int) -> bool:
    """Whether a model's step was timed on ``ranks`` ranks, under any layout."""
    return bool(_timed(device, model, dtype, ranks))


def _timed(device: DeviceSpec, model: ModelSpec, dtype: Dtype, ranks: int) -> list[ModelParts]:
    """The timed parts of a model's step on ``ranks`` ranks."""
    if device.curve_file is None or model.experts:
        return []
    asked = parts_name(model), dtype, ranks
    parts = model_parts(device.curve_file)
    return [each for each in parts if (each.model, each.dtype, each.ranks) == asked]


def document_curves(points: tuple[DocPoint, ...]) -> tuple[LoadCurve, LoadCurve]:
    """Forward and backward of the attention core, as curves over lengths."""
    tokens = tuple(float(point.tokens) for point in points)
    forward, backward = (
        tuple(1e9 * getattr(point, name).mid for point in points)
        for name in ("forward_s", "backward_s")
    )
    return (
        LoadCurve(0.0, 0.0, tokens, forward, 0.0, measured=True),
        LoadCurve(0.0, 0.0, tokens, backward, 0.0, measured=True),
    )
