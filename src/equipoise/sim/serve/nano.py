"""What overlapping nano-batches could gain on devices that are described, at most.

Why
    An iteration's products are bound by compute, attention of single tokens by memory, all-reduces
    by the link. One after another they leave two of three idle.

What it decides
    The mean iteration of a served trace is cut into two nano-batches, of equal sizes or not, and
    the operations of two layers are arranged by ``schedule.nano`` on three lanes, one for each
    resource; further layers follow the same order. Products of fewer rows take their own measured
    time. What operations lose beside each other is not known for these devices, so they lose
    nothing: the gain is the most that such a schedule could bring. Time of the host is not in it.

    The optimum is the paper's: a token for each ``2 * parameters`` FLOP of the devices' peak.

Kept true (tests/unit/sim/serve/test_nano.py)
    The gain is at least 1 and at most what the busiest lane leaves; schedules are legal; without a
    link there is no network operation.

Sources
    NanoFlow, arXiv:2408.12757: operations, the optimum, and the published gain.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.cost.kernel import decode_attention_s
from equipoise.cost.step.request import Precision
from equipoise.cost.step.work import layer_work
from equipoise.cost.work import causal_pairs
from equipoise.schedule.nano.graph import NanoGraph, Operation, Resource, Way
from equipoise.schedule.nano.schedule import NanoSchedule, repeat
from equipoise.schedule.nano.search import search_order
from equipoise.sim.machine import Machine
from equipoise.sim.serve.answer import ServingAnswer
from equipoise.sim.serve.request import ServingRequest
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.device.spec import THIS_CPU
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.program.stack import Stack
from equipoise.spec.serving import IterationWork, chunk_pairs
from equipoise.spec.words import read_layout, read_model

PUBLISHED_GAIN = 1.91
"""Throughput over the best engine that it was compared with: arXiv:2408.12757, abstract."""

_LEAST_GAIN = 1.01
LANES: tuple[Resource, ...] = ("compute", "memory", "network")
_WINDOW, _ROUNDS = 2, 4
_SHARES = (0.5, 0.4, 0.3)
_CONTEXT_TOKENS = 4096
_DECODES = 32
_LAUNCH_S = 2e-6
_MOST_STATES = 5_000
_STACK = Stack(sequence_parallel=False)


@dataclass(frozen=True, slots=True)
class NanoForecast:
    """The mean iteration of a trace, as a whole and overlapped."""

    work: IterationWork
    whole_s: float
    """One layer, operation by operation [s]."""
    overlapped_s: float
    """One layer of the best order [s]; of the whole iteration, if no order is shorter."""
    optimal_s: float
    """One layer at the devices' peak FLOP/s [s]."""
    graph: NanoGraph
    schedule: NanoSchedule
    """Two layers of the best order."""

    @property
    def gain(self) -> float:
        """How many times faster iterations could be, at most."""
        return self.whole_s / self.overlapped_s

    @property
    def gains(self) -> bool:
        """Whether an order is shorter than the whole iteration by more than a rounding."""
        return self.gain >= _LEAST_GAIN

    def as_row(self) -> dict[str, float]:
        """Plain data: ``nano`` of ``equipoise simulate --requests --json``."""
        return {
            "most_gain": self.gain,
            "published_gain": PUBLISHED_GAIN,
            "iteration_tokens": self.work.tokens,
            "layer_s": self.whole_s,
            "overlapped_layer_s": self.overlapped_s,
            "optimum_share": self.optimal_s / self.whole_s,
            "overlapped_optimum_share": self.optimal_s / self.overlapped_s,
        }

    @property
    def words(self) -> str:
        """For people."""
        iteration = f"the mean iteration ({self.work.tokens:,} tokens)"
        if not self.gains:
            return f"Nano-batches: no gain in {iteration}."
        whole, overlapped = (self.optimal_s / each for each in (self.whole_s, self.overlapped_s))
        return (
            f"Nano-batches: a layer of {iteration} could be {self.gain:.2f}x as fast if operations "
            "overlapped and lost nothing beside each "
            f"other: {overlapped:.0%} of the optimum instead of {whole:.0%}. NanoFlow published "
            f"{PUBLISHED_GAIN}x over the best other engine."
        )


def forecast_nano(request: ServingRequest, answer: ServingAnswer) -> NanoForecast | None:
    """Price the mean iteration of a trace that was served.

    Returns:
        None on this machine, whose engine measures it, for layouts other than tp and dp, and where
        prompts and tokens are computed apart.
    """
    if request.decode_layout is not None:
        return None
    layout = request.layout
    layout = read_layout(layout).layout if isinstance(layout, str) else layout
    cluster = request.cluster
    machine = Machine(read_cluster(cluster) if isinstance(cluster, str) else cluster)
    if machine.device.name == THIS_CPU or max(layout.pp, layout.cp, layout.ep) > 1:
        return None
    model = read_model(request.model) if isinstance(request.model, str) else request.model
    work = mean_iteration(answer)
    return None if work is None else price_nano(model, machine, layout, request.precision, work)


def mean_iteration(answer: ServingAnswer) -> IterationWork | None:
    """The sizes of a served trace over its iterations; None if there were none."""
    replicas = answer.run.replicas
    count = sum(each.iterations for each in replicas)
    if not count:
        return None
    prompt = sum(each.prompt_tokens for each in replicas)
    output = sum(each.output_tokens for each in replicas)
    served = [each.traced for each in answer.run.requests]
    pairs = sum(chunk_pairs(0, each.prompt_tokens) for each in served)
    read = sum(chunk_pairs(each.prompt_tokens, each.output_tokens) for each in served)
    per = [-(-each // count) for each in (prompt + output, pairs, read, output)]
    return IterationWork(per[0], per[1], per[2], per[3], per[3])


def price_nano(
    model: ModelSpec, machine: Machine, layout: Layout, precision: Precision, work: IterationWork
) -> NanoForecast:
    """Search the best order for one iteration.

    Args:
        model: Sizes.
        machine: The cluster.
        layout: Only tp counts.
        precision: Of products.
        work: ``pairs`` are those of prompts, ``kv_tokens`` those that single tokens read.
    """
    part = _LayerCosts(model, machine.at(precision), layout, precision)
    whole = _graph([part.layer(work, 1.0)], 1)
    best, best_s = (whole, search_order(whole)), whole.sequential_s
    for share in _SHARES:
        layers = [part.layer(work, each) for each in (share, 1.0 - share)]
        graph = _graph(layers, _WINDOW)
        schedule = search_order(graph, most_states=_MOST_STATES)
        seconds = _steady_s(graph, schedule)
        if seconds < best_s:
            best, best_s = (graph, schedule), seconds
    # Attention's pairs are beyond the paper's optimum, which counts weights alone.
    flop = 2.0 * work.tokens * model.matmul_params / model.layers / layout.tp
    return NanoForecast(
        work,
        whole.sequential_s,
        best_s,
        flop / machine.at(precision).peak_flop_per_s(precision),
        *best,
    )


_Layer = list[tuple[str, Resource, float, tuple[int, ...]]]
"""Operations of one layer: name, resource, seconds, and the operations before it, relative to the
layer's first."""


class _LayerCosts:
    """What one device computes of a layer."""

    def __init__(
        self, model: ModelSpec, machine: Machine, layout: Layout, precision: Precision
    ) -> None:
        self._model, self._machine, self._layout = model, machine, layout
        self._precision, self._width = precision, 4 if precision == "fp32" else 2
        heads, kv_heads = model.heads // layout.tp, max(1, model.kv_heads // layout.tp)
        tokens = np.array([float(_CONTEXT_TOKENS)])
        alone = machine.attention_s(tokens, heads, kv_heads, model.head_width, backward=False)
        self._pair_s = float(alone[0]) / float(causal_pairs(np.array([_CONTEXT_TOKENS]))[0])
        decode = decode_attention_s(
            machine.device,
            _CONTEXT_TOKENS,
            sequences=_DECODES,
            heads=heads,
            kv_heads=kv_heads,
            head_width=model.head_width,
        )
        self._row_s = float(decode.s) * (self._width / 2) / (_CONTEXT_TOKENS * _DECODES)

    def layer(self, work: IterationWork, share: float) -> _Layer:
        """One layer of this share of an iteration."""
        model, layout, machine = self._model, self._layout, self._machine
        rows = max(1.0, work.tokens * share)
        counted = layer_work(
            model,
            layout,
            rows,
            sparse=bool(model.experts),
            stack=_STACK,
            width=self._width,
        )
        seconds = list[float]()
        for each in counted.products:
            fp8 = self._precision == "fp8" and each.name != "router"
            once_s = machine.product_s(each.rows, each.columns, each.inner, fp8=fp8)
            seconds.append(each.count * once_s)
        moves_s = counted.moved_bytes / machine.bytes_per_s + counted.kernels * _LAUNCH_S
        operations: _Layer = [("qkv", "compute", seconds[0] + moves_s / 2, ())]
        if work.pairs:
            operations.append(("prefill", "compute", work.pairs * share * self._pair_s, (0,)))
        if work.kv_tokens:
            operations.append(("decode", "memory", work.kv_tokens * share * self._row_s, (0,)))
        before = tuple(range(1, len(operations))) or (0,)

        def reduce() -> None:
            if layout.tp > 1:
                size = float(rows * model.hidden * self._width)
                traffic = machine.collective(tuple(range(layout.tp)))
                after = (len(operations) - 1,)
                operations.append(("all-reduce", "network", traffic("all_reduce", size), after))

        operations.append(("output", "compute", seconds[1], before))
        reduce()
        after = (len(operations) - 1,)
        operations.append(("feed-forward", "compute", sum(seconds[2:]) + moves_s / 2, after))
        reduce()
        return operations


def _graph(layers: list[_Layer], count: int) -> NanoGraph:
    """Some layers of every nano-batch."""
    operations = list[Operation]()
    for batch, layer in enumerate(layers):
        for number in range(count):
            base = len(operations)
            for name, resource, seconds, before in layer:
                after = tuple(base + each for each in before)
                if not after and number:
                    after = (base - 1,)
                ways = (Way((LANES.index(resource),), seconds),)
                operations.append(Operation(name, batch, resource, ways, after))
    return NanoGraph(tuple(operations), len(LANES))


def _steady_s(graph: NanoGraph, schedule: NanoSchedule) -> float:
    """One layer of a long row of layers [s]."""
    few, many = (repeat(graph, schedule, times)[1].seconds for times in (_ROUNDS, 2 * _ROUNDS))
    return (many - few) / (_ROUNDS * _WINDOW)
