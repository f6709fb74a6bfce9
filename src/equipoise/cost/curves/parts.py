"""A training step's parts as they were timed on this machine, read between the sizes.

Why
    On a core of this machine what lies between kernels is up to half of a step, and no count of
    bytes or launches foresees it. ``equipoise calibrate RUN.toml`` times a step's parts where
    they run; here they are read.

What it decides
    Between two timed numbers of tokens seconds are linear; below the least they end in what the
    first two point to, but not below a tenth of the least; beyond the last they grow as between
    the last two, and the reader is told. Attention of a document grows with its pairs between
    timed lengths as ``cost.curve`` has it.

Kept true (tests/unit/cost/curves/test_parts.py)
    Timed points are met; no pass is ever free or negative; what was never timed is None.
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
    Measured,
    ModelParts,
    OncePoint,
    Passes,
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
    """One way of sharing a step, as curves over tokens."""

    parts: ModelParts
    way: WayParts
    forward: LoadCurve
    """Of the attention core of a document in one layer, all heads of a rank."""
    backward: LoadCurve

    def passes_s(self, part: Part, tokens: float, *, halves: bool) -> Floats:
        """Forward, gradient of the input, gradient of the weights, float64 [3] [s].

        Args:
            part: Of the step.
            tokens: Of the micro-batch on this rank.
            halves: Whether the schedule runs a backward in two.
        """
        sizes = np.array([point.tokens for point in self.way.sizes], dtype=np.float64)
        known = np.array([_columns(getattr(point, part)) for point in self.way.sizes])
        forward, backward, first, second = _between(sizes, known, tokens)
        if halves:
            return np.array([forward, first, second])
        return np.array([forward, max(backward - second, 0.0), min(second, backward)])

    def is_beyond(self, tokens: float) -> bool:
        """Whether so many tokens are more than were timed."""
        return tokens > self.way.sizes[-1].tokens

    def once_s(self, kind: Once, layers: int, *, first: bool, last: bool) -> float:
        """What a rank with so many layers, and with what, pays once a step [s]."""
        held: list[tuple[float, OncePoint]] = [(float(layers), self.way.layer)]
        held += [(float(first), self.way.first), (float(last), self.way.last)]
        whole = 0.0
        for count, point in held:
            each: Measured = getattr(point, kind)
            whole += count * each.mid
        return whole

    def context(self, strategy: str) -> ContextPoint | None:
        """What attention over several ranks takes beyond tiles and messages; None: not timed."""
        found = [each for each in self.parts.context if each.strategy == strategy]
        return found[0] if found else None


def _columns(passes: Passes) -> list[float]:
    four = passes.forward_s, passes.backward_s, passes.input_s, passes.weight_s
    return [each.mid for each in four]


def _between(sizes: Floats, known: Floats, tokens: float) -> Floats:
    """Piecewise linear in tokens, of each column."""
    least = known[0] * 0.1
    if len(sizes) == 1:
        return np.asarray(np.maximum(known[0] * tokens / sizes[0], least))
    at = int(np.clip(np.searchsorted(sizes, tokens) - 1, 0, len(sizes) - 2))
    share = (tokens - sizes[at]) / (sizes[at + 1] - sizes[at])
    found: Floats = np.maximum(known[at] + share * (known[at + 1] - known[at]), least)
    return found


def part_curves(
    device: DeviceSpec, model: ModelSpec, dtype: Dtype, layout: Layout
) -> PartCurves | None:
    """The curves of a layout's way; None where it was not timed.

    Args:
        device: ``this-cpu``; no other has any.
        model: Its depth does not matter.
        dtype: Of activations.
        layout: Degrees.
    """
    way = way_of(layout)
    for parts in _timed(device, model, dtype, layout.world):
        for each in parts.ways:
            if each.way == way:
                return PartCurves(parts, each, *document_curves(each.documents))
    return None


def is_timed(device: DeviceSpec, model: ModelSpec, dtype: Dtype, ranks: int) -> bool:
    """Whether parts of a model's step were timed on so many ranks, in any way of sharing it."""
    return bool(_timed(device, model, dtype, ranks))


def _timed(device: DeviceSpec, model: ModelSpec, dtype: Dtype, ranks: int) -> list[ModelParts]:
    """What was timed of a model's step on so many ranks."""
    if device.curve_file is None or model.experts:
        return []
    asked = parts_name(model), dtype, ranks
    found = model_parts(device.curve_file)
    return [each for each in found if (each.model, each.dtype, each.ranks) == asked]


def document_curves(points: tuple[DocPoint, ...]) -> tuple[LoadCurve, LoadCurve]:
    """Forward and backward of the attention core over lengths."""
    tokens = tuple(float(point.tokens) for point in points)
    forward, backward = (
        tuple(1e9 * getattr(point, name).mid for point in points)
        for name in ("forward_s", "backward_s")
    )
    return (
        LoadCurve(0.0, 0.0, tokens, forward, 0.0, measured=True),
        LoadCurve(0.0, 0.0, tokens, backward, 0.0, measured=True),
    )
