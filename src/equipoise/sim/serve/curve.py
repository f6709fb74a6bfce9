"""The serving curve of a model on a described device, shared by tensor-parallel ranks.

What it decides
    An iteration of n new tokens is priced like a training forward of n tokens: products at their
    own sizes, element-wise moves, launches, and two all-reduces a layer. Of a layer's experts,
    those that n tokens are expected to meet are read. Attention is linear: in pairs at the rate of
    a document of 4,096 tokens, in rows of keys and values at that of 32 such sequences that decode.
    Time of the host, between iterations, is not in it.

    Keys and values get nine tenths of the device's memory, less the weights.

Kept true (tests/unit/sim/serve/test_curve.py)
    More rows never take less time; a decode of few rows takes at least the time to read the
    weights; what is not known is refused in one sentence.

Sources
    Share of memory: vLLM's default ``gpu_memory_utilization``. Launches: ``cost.step.layer``.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from equipoise.base.errors import FitError, LayoutError, SpecError
from equipoise.base.units import GIB
from equipoise.cost.kernel import decode_attention_s
from equipoise.cost.step.request import Precision
from equipoise.cost.step.work import LayerWork, head_work, layer_work
from equipoise.cost.work import causal_pairs
from equipoise.sim.machine import Machine
from equipoise.spec.device.serving import MeasuredServing, Points, ServingCurve
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
_MANY_ROWS = (1024, 1536, 2048, 3072, 4096, 6144, 8192)
_CONTEXT_TOKENS = 4096
_DECODES = 32
_LAUNCH_S = 2e-6
_MEMORY_SHARE = 0.9
_ENGINE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class ServingDevice:
    """What one replica of an engine is, as its scheduler sees it."""

    curve: ServingCurve
    kv_token_bytes: float
    """Keys and values of one token on one device."""
    weights_bytes: float
    """Weights of one device."""
    kv_bytes: float
    """Memory of one device for keys and values."""
    devices: int
    """Devices of one replica."""

    def pages(self, page_tokens: int) -> int:
        """Pages of a replica's pool."""
        return int(self.kv_bytes // (self.kv_token_bytes * page_tokens))


def describe_replica(
    model: ModelSpec, machine: Machine, layout: Layout, precision: Precision
) -> ServingDevice:
    """Price one replica of a layout.

    Raises:
        FitError: the weights do not fit.
        LayoutError: heads do not divide.
        SpecError: the layout or the model is not priced in serving yet.
    """
    layout = _served(model, machine, layout)
    machine = machine.at(precision)
    width = 4 if precision == "fp32" else 2
    weight_width = 1 if precision == "fp8" else width
    kv_heads = max(1.0, model.kv_heads / layout.tp)
    kv_token_bytes = 2.0 * model.layers * kv_heads * model.head_width * width
    weights_bytes = model.params / layout.tp * weight_width
    capacity = _MEMORY_SHARE * machine.capacity_bytes
    kv_bytes = capacity - weights_bytes
    if kv_bytes < kv_token_bytes * 16:
        raise FitError(
            f"Weights of {weights_bytes / GIB:.1f} GiB a device leave no room for keys and values "
            f"in {capacity / GIB:.1f} GiB, nine tenths of {machine.device.name}. Give a higher tp, "
            "or a larger device."
        )
    pair_s, kv_token_s = _attention(model, machine, layout, width)
    rows = (*_ROWS, *_MANY_ROWS)
    tokens = [_layers_s(model, machine, layout, each, precision, width) for each in rows]
    logits = [_head_s(model, machine, layout, each, width) for each in rows]
    curve = ServingCurve(
        tokens=_rising(rows, tokens),
        logits=_rising(rows, logits),
        pair_s=pair_s,
        kv_token_s=kv_token_s,
        sequence_s=0.0,
        swap_token_s=kv_token_bytes / machine.device.host_bytes_per_s,
    )
    return ServingDevice(curve, kv_token_bytes, weights_bytes, kv_bytes, layout.tp)


def measured_replica(
    model: ModelSpec, machine: Machine, measured: MeasuredServing
) -> ServingDevice:
    """One replica of the engine on this machine, which was measured.

    Keys and values get a quarter of its cores' memory, as in the engine.
    """
    width = 4 if measured.dtype == "fp32" else 2
    kv_token_bytes = 2.0 * model.layers * model.kv_heads * model.head_width * width
    cores = measured.threads
    return ServingDevice(
        measured.curve,
        kv_token_bytes / cores,
        model.params * width / cores,
        _ENGINE_SHARE * machine.capacity_bytes,
        cores,
    )


def require_served(layout: Layout) -> None:
    """Refuse axes that are not priced in serving.

    Raises:
        SpecError: names the axis.
    """
    for axis, meaning in (("cp", "context"), ("pp", "pipeline"), ("ep", "expert")):
        if getattr(layout, axis) > 1:
            raise SpecError(
                f"layout: {axis} is {getattr(layout, axis)}, and {meaning} parallelism is not "
                "priced in serving yet. Give tp and dp."
            )


def _served(model: ModelSpec, machine: Machine, layout: Layout) -> Layout:
    """The layout of one replica, or a refusal."""
    require_served(layout)
    if layout.etp not in (1, layout.tp):
        raise SpecError(
            f"layout: etp is {layout.etp}, and experts are priced in serving only where they are "
            f"divided like the other weights. Give etp={layout.tp}, or leave it out."
        )
    if model.latent is not None:
        raise SpecError(
            "Latent attention is not priced in serving yet. Give a model with keys and values of "
            "their own."
        )
    if len(machine.cluster.classes) > 1:
        raise SpecError(
            f"{machine.cluster.name} has {len(machine.cluster.classes)} classes of nodes, and "
            "serving is priced on one. Give a cluster of equal nodes."
        )
    if model.heads % layout.tp or (model.heads // layout.tp) % max(1, model.kv_heads // layout.tp):
        raise LayoutError(
            f"{model.heads} query heads and {model.kv_heads} key/value heads do not divide over "
            f"tp = {layout.tp}. Give a divisor of both."
        )
    etp = layout.tp if model.experts else 1
    return dataclasses.replace(layout, dp=1, etp=etp, zero=0, replicas=1)


def _layers_s(
    model: ModelSpec, machine: Machine, layout: Layout, rows: int, precision: Precision, width: int
) -> float:
    """All layers without attention's core, for this many tokens [s]."""
    total_s = 0.0
    for sparse, layers in (
        (False, model.layers - model.sparse_layers),
        (True, model.sparse_layers),
    ):
        if not layers:
            continue
        work = layer_work(
            model, layout, float(rows), sparse=sparse, sequence_parallel=False, width=width
        )
        seconds = _products_s(model, machine, work, rows, precision, width)
        seconds += work.moved_bytes / machine.bytes_per_s + work.kernels * _LAUNCH_S
        if layout.tp > 1:
            reduce = machine.collective(tuple(range(layout.tp)))
            seconds += 2 * reduce("all_reduce", float(rows * model.hidden * width))
        total_s += layers * seconds
    return total_s


def _products_s(
    model: ModelSpec,
    machine: Machine,
    work: LayerWork,
    rows: int,
    precision: Precision,
    width: int,
) -> float:
    total_s = 0.0
    for each in work.products:
        fp8 = precision == "fp8" and each.name != "router"
        if not each.grouped:
            total_s += each.count * machine.product_s(each.rows, each.columns, each.inner, fp8=fp8)
            continue
        routed = rows * model.top_k
        met = each.count * (1.0 - (1.0 - 1.0 / each.count) ** routed)
        read_bytes = met * each.columns * each.inner * (1 if fp8 else width)
        together_s = machine.product_s(float(routed), each.columns, each.inner, fp8=fp8)
        total_s += max(together_s, read_bytes / machine.bytes_per_s)
    return total_s


def _head_s(model: ModelSpec, machine: Machine, layout: Layout, rows: int, width: int) -> float:
    head = head_work(model, layout, float(rows))
    seconds = machine.product_s(head.rows, head.columns, head.inner, fp8=False)
    if layout.tp > 1:
        gather = machine.collective(tuple(range(layout.tp)))
        seconds += gather("all_gather", float(rows * model.vocab * width))
    return seconds


def _attention(
    model: ModelSpec, machine: Machine, layout: Layout, width: int
) -> tuple[float, float]:
    """Seconds of a pair, and of a row of keys and values, in all layers."""
    heads, kv_heads = model.heads // layout.tp, max(1, model.kv_heads // layout.tp)
    tokens = np.array([float(_CONTEXT_TOKENS)])
    whole = machine.attention_s(tokens, heads, kv_heads, model.head_width, backward=False)
    pair_s = float(whole[0]) / float(causal_pairs(np.array([_CONTEXT_TOKENS]))[0])
    decode = decode_attention_s(
        machine.device,
        _CONTEXT_TOKENS,
        sequences=_DECODES,
        heads=heads,
        kv_heads=kv_heads,
        head_width=model.head_width,
    )
    row_s = float(decode.s) * (width / 2) / (_CONTEXT_TOKENS * _DECODES)
    return model.layers * pair_s, model.layers * max(0.0, row_s - pair_s)


def _rising(rows: tuple[int, ...], seconds: list[float]) -> Points:
    highest = np.maximum.accumulate(seconds).tolist()
    return tuple(zip(rows, highest, strict=True))
