"""The serving curves of a model's replica on described devices: one for each pipeline stage.

What it decides
    An iteration of n new tokens is priced like a training forward of n tokens: products at their
    own sizes, element-wise moves, launches, and two all-reduces a layer. Of a layer's experts,
    those that n tokens are expected to meet are read, on the rank where that is most.
    Attention is linear: in pairs at the rate of a document of 4,096 tokens, in rows of keys and
    values at that of 32 such sequences that decode. Ranks that share sequences have equal parts of
    every iteration's tokens and of what attention reads. In layers with a short window each new
    token reads a whole one. Time of the host, between iterations, is not in it.

    Keys and values get nine tenths of the device's memory, less weights and activations, on the
    stage with the least room.

Kept true (tests/unit/sim/serve/test_request.py, test_memory.py)
    More rows never take less time; a decode of few rows takes at least the time to read the
    weights; stages add up to the whole model.

Sources
    Launches: ``cost.step.layer``.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.errors import FitError
from equipoise.base.units import GIB
from equipoise.cost.kernel import decode_attention_s
from equipoise.cost.serving import ContextExchange, CurvePrice, Hop, StagedPrice, rising_points
from equipoise.cost.step.request import Precision
from equipoise.cost.step.work import LayerWork, head_work, layer_work
from equipoise.cost.work import causal_pairs
from equipoise.schedule.batching.settings import BatchSettings, page_tokens_of
from equipoise.sim.machine import Machine
from equipoise.sim.serve.experts import fullest, fullest_over_mean
from equipoise.sim.serve.layout import (
    Collective,
    collective_of,
    line_of,
    served_layout,
    split_layers,
)
from equipoise.sim.serve.memory import MEMORY_SHARE, stage_memory, windowed_layers
from equipoise.spec.device.serving import MeasuredServing, ServingCurve
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.program.stack import Stack

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
_MANY_ROWS = (1024, 1536, 2048, 3072, 4096, 6144, 8192)
_CONTEXT_TOKENS = 4096
_DECODES = 32
_LAUNCH_S = 2e-6
_ENGINE_SHARE = 0.25
_LSE_BYTES = 4
_STACK = Stack(sequence_parallel=False)
MOST_SEQUENCES = 256
"""Sequences of a replica at the same time, unless the limits say otherwise."""
_LIMITS = BatchSettings(pages=1)


@dataclass(frozen=True, slots=True)
class ServingDevice:
    """What one replica of an engine is, as its scheduler sees it."""

    curves: tuple[ServingCurve, ...]
    """One for each stage of its pipeline."""
    kv_token_bytes: float
    """Keys and values of one token on one device; all bytes are those of the fullest stage."""
    weights_bytes: float
    """Weights of one device."""
    kv_bytes: float
    """Memory of one device for keys and values."""
    devices: int
    """Devices of one replica."""
    activation_bytes: float = 0.0
    """Activations of one device's largest iteration."""
    exchange: ContextExchange | None = None
    """What ranks that share sequences send each other, in each stage."""
    hop: Hop | None = None
    """What goes from one stage to the next."""
    window_bytes: float = 0.0
    """The part of ``kv_bytes`` that layers with a window keep of the most sequences."""

    @property
    def curve(self) -> ServingCurve:
        """The first stage's curve; the only one without a pipeline."""
        return self.curves[0]

    @property
    def stages(self) -> int:
        """Stages of the pipeline, and batches in flight."""
        return len(self.curves)

    @property
    def price(self) -> CurvePrice | StagedPrice:
        """What iterations take."""
        stages = [CurvePrice(each, self.exchange) for each in self.curves]
        return stages[0] if self.hop is None else StagedPrice(stages, self.hop)

    def pages(self, page_tokens: int) -> int:
        """Pages of each batch in flight: its share of the replica's pool."""
        room = self.kv_bytes - self.window_bytes
        return int(room // (self.kv_token_bytes * page_tokens)) // self.stages


def describe_replica(
    model: ModelSpec,
    machine: Machine,
    layout: Layout,
    precision: Precision,
    *,
    first: int = 0,
    expert_skew: float = 1.0,
    limits: BatchSettings | None = None,
) -> ServingDevice:
    """Price one replica of a layout.

    Args:
        model: Sizes.
        machine: The cluster.
        layout: All replicas.
        precision: Of products; fp8 leaves attention and what is kept in bf16.
        first: Device on which rank 0 stands.
        expert_skew: Rows of the fullest expert rank over the mean [ratio].
        limits: The scheduler's, which bound activations; None for the defaults.

    Raises:
        FitError: weights and activations do not fit.
        LayoutError: heads, layers or experts do not divide.
        SpecError: the layout or the model is not priced in serving.
    """
    layout = served_layout(model, machine, layout)
    machine = machine.at(precision)
    width = 4 if precision == "fp32" else 2
    capacity = MEMORY_SHARE * machine.capacity_bytes
    stages = split_layers(model.layers, layout.pp)
    most = MOST_SEQUENCES if limits is None else limits.most_sequences * layout.pp
    held = [
        stage_memory(
            model,
            layout,
            layers,
            iteration_tokens=(limits or _LIMITS).iteration_tokens,
            sequences=most,
            width=width,
            weight_width=1 if precision == "fp8" else width,
        )
        for layers in stages
    ]
    rooms = [capacity - each.weights_bytes - each.activation_bytes for each in held]
    kv_bytes, tight = min(
        zip(rooms, held, strict=True),
        key=lambda each: (each[0] - each[1].window_bytes) / each[1].kv_token_bytes,
    )
    page_bytes = tight.kv_token_bytes * page_tokens_of(layout.cp)
    if (kv_bytes - tight.window_bytes) // page_bytes < layout.pp:  # a page for each batch in flight
        raise FitError(
            f"Weights of {tight.weights_bytes / GIB:.1f} GiB and activations of "
            f"{tight.activation_bytes / GIB:.1f} GiB a device leave no room for keys and values "
            f"in {capacity / GIB:.1f} GiB, nine tenths of {machine.device.name}. Give a higher tp "
            "or pp, or a larger device."
        )
    part = _Part(model, machine, layout, precision, width, first, expert_skew)
    host_bytes_per_s = machine.device.host_bytes_per_s
    curves = tuple(
        part.curve(layers, each.kv_token_bytes / host_bytes_per_s)
        for layers, each in zip(stages, held, strict=True)
    )
    return ServingDevice(
        curves,
        tight.kv_token_bytes,
        tight.weights_bytes,
        kv_bytes,
        layout.pp * layout.cp * layout.tp,
        tight.activation_bytes,
        part.exchange(len(stages[0])),
        part.hop(),
        tight.window_bytes,
    )


def measured_replica(
    model: ModelSpec, machine: Machine, measured: MeasuredServing
) -> ServingDevice:
    """One replica of the engine on this machine, which was measured.

    Keys and values get a quarter of its cores' memory, as in the engine.
    """
    width = 4 if measured.dtype == "fp32" else 2
    kv_token_bytes = 2.0 * model.layers * model.kv_heads * model.head_width * width
    cores = measured.threads * measured.ranks
    return ServingDevice(
        (measured.curve,),
        kv_token_bytes / cores,
        model.params * width / measured.threads,
        _ENGINE_SHARE * machine.capacity_bytes,
        cores,
    )


class _Part:
    """What one device of a replica computes and sends."""

    def __init__(
        self,
        model: ModelSpec,
        machine: Machine,
        layout: Layout,
        precision: Precision,
        width: int,
        first: int,
        expert_skew: float,
    ) -> None:
        self._model, self._machine, self._layout = model, machine, layout
        self._precision: Precision = precision
        self._width, self._first, self._skew = width, first, expert_skew
        self._reduce = self._group("tp", layout.tp)
        is_wide = layout.ep > layout.tp
        self._dispatch = self._group("ep", layout.ep if is_wide else 1)

    def _group(self, axis: str, ranks: int) -> Collective | None:
        if ranks == 1:
            return None
        return collective_of(self._machine, self._layout, axis, self._first)

    def curve(self, layers: range, swap_token_s: float) -> ServingCurve:
        """One stage's seconds."""
        model, cp = self._model, self._layout.cp
        sparse = sum(model.is_sparse(layer) for layer in layers)
        kinds = [
            (is_sparse, count)
            for is_sparse, count in ((False, len(layers) - sparse), (True, sparse))
            if count
        ]
        rows = (*_ROWS, *_MANY_ROWS)
        pair_s, kv_token_s = self._attention()
        windowed = windowed_layers(model, len(layers))
        read_all = len(layers) - windowed
        window_pairs = windowed * model.window.tokens if model.window is not None else 0.0
        tokens = [
            sum(count * self._layer_s(-(-each // cp), is_sparse) for is_sparse, count in kinds)
            + window_pairs * pair_s * each / cp
            for each in rows
        ]
        is_last = layers.stop == model.layers
        logits = [self._head_s(-(-each // cp)) if is_last else 0.0 for each in rows]
        return ServingCurve(
            tokens=rising_points(zip(rows, tokens, strict=True)),
            logits=rising_points(zip(rows, logits, strict=True)),
            pair_s=read_all * pair_s / cp,
            kv_token_s=read_all * kv_token_s / cp,
            sequence_s=window_pairs * kv_token_s / cp,
            swap_token_s=swap_token_s,
        )

    def _layer_s(self, rows: int, is_sparse: bool) -> float:
        """One layer without attention's core, for this many tokens of this rank [s]."""
        model, layout, width = self._model, self._layout, self._width
        routed = round(rows * model.mean_top_k * max(1, layout.ep // layout.tp))
        skew = fullest_over_mean(routed, layout.ep, self._skew) if is_sparse else 1.0
        work = layer_work(
            model,
            layout,
            float(rows),
            sparse=is_sparse,
            stack=_STACK,
            expert_skew=skew,
            width=width,
        )
        seconds = self._products_s(work, routed)
        seconds += work.moved_bytes / self._machine.bytes_per_s + work.kernels * _LAUNCH_S
        whole = float(rows * model.hidden * width)
        travels = is_sparse and self._dispatch is not None
        if self._reduce is not None:
            seconds += self._reduce("all_reduce", whole)
            seconds += self._reduce("all_gather" if travels else "all_reduce", whole)
        if travels and self._dispatch is not None:
            sent = work.routed_rows * model.hidden * width * skew
            seconds += 2 * self._dispatch("all_to_all", sent)
        return seconds

    def _products_s(self, work: LayerWork, routed: int) -> float:
        """Matrix products of a layer whose experts get this many rows, over all ranks [s]."""
        model, layout, machine = self._model, self._layout, self._machine
        total_s = 0.0
        for each in work.products:
            fp8 = self._precision == "fp8" and each.name != "router"
            if not each.grouped:
                once_s = machine.product_s(each.rows, each.columns, each.inner, fp8=fp8)
                total_s += each.count * once_s
                continue
            is_met = 1.0 - (1.0 - 1.0 / model.experts) ** routed
            met = fullest(each.count, is_met, layout.ep)
            read_bytes = met * each.columns * each.inner * (1 if fp8 else self._width)
            mine = each.rows * each.count
            together_s = machine.product_s(mine, each.columns, each.inner, fp8=fp8)
            total_s += max(together_s, read_bytes / machine.bytes_per_s)
        return total_s

    def _head_s(self, rows: int) -> float:
        model, machine = self._model, self._machine
        head = head_work(model, self._layout, float(rows))
        seconds = machine.product_s(head.rows, head.columns, head.inner, fp8=False)
        if self._reduce is not None:
            seconds += self._reduce("all_gather", float(rows * model.vocab * self._width))
        return seconds

    def _attention(self) -> tuple[float, float]:
        """Seconds of a pair, and of a row of keys and values, in one layer."""
        model, machine = self._model, self._machine
        heads, kv_heads = self._heads
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
        row_s = float(decode.s) * (self._width / 2) / (_CONTEXT_TOKENS * _DECODES)
        return pair_s, max(0.0, row_s - pair_s)

    @property
    def _heads(self) -> tuple[int, int]:
        """Query heads and key/value heads of this rank."""
        model, tp = self._model, self._layout.tp
        return model.heads // tp, max(1, model.kv_heads // tp)

    def exchange(self, layers: int) -> ContextExchange | None:
        """What this rank sends to those that share its sequences, in this many layers."""
        model, ranks = self._model, self._layout.cp
        if ranks == 1:
            return None
        group = collective_of(self._machine, self._layout, "cp", self._first)
        hop_s, byte_s = line_of(lambda size: group("send", size))
        home_s, home_byte_s = line_of(lambda size: group("all_to_all", size))
        heads, kv_heads = self._heads
        of_head = model.head_width * self._width
        ring = layers * (ranks - 1)
        return ContextExchange(
            ring_s=ring * hop_s,
            kv_token_s=ring * byte_s * 2 * kv_heads * of_head / ranks,
            query_token_s=ring * byte_s * heads * of_head / ranks,
            home_s=layers * home_s,
            home_token_s=layers * home_byte_s * heads * (of_head + _LSE_BYTES),
            gather_token_s=layers * home_byte_s * heads * of_head,
            ranks=ranks,
        )

    def hop(self) -> Hop | None:
        """What goes to the next stage."""
        if self._layout.pp == 1:
            return None
        groups = collective_of(self._machine, self._layout, "pp", self._first)
        latency_s, byte_s = line_of(lambda size: groups("send", size))
        return Hop(latency_s, byte_s * self._model.hidden * self._width / self._layout.cp)
