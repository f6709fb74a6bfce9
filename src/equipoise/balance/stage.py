"""Split layers into consecutive pipeline stages so that the slowest stage is as fast as possible.

Why
    A pipeline runs at the pace of its slowest stage. Equal layer counts are unequal work: the
    head over a large vocabulary costs as much as several layers, and layers and devices may
    differ.

What it decides
    How many layers each stage has, exactly: dynamic programming over all splits into runs. Ties
    on the slowest stage go to the smallest sum of squares, then to more layers on later stages.

    It also prices each stage and micro-batch by the curve that packed them.

Kept true (tests/unit/balance/test_stage.py, by Hypothesis)
    The answer equals brute force; it stays within every stage's memory; stage prices add up to
    the curve's price of the micro-batch.

Sources
    Stages by measured speed of unequal devices: Holmes, arXiv:2312.03549. One layer fewer on
    the first and last stage, by hand: arXiv:2401.10241, section 4.1.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balance.stage_runs import Runs, longest_run
from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import FitError, LayoutError
from equipoise.base.units import format_bytes
from equipoise.cost.curve import LoadCurve
from equipoise.schedule.attention.price import BACKWARD_OVER_FORWARD
from equipoise.schedule.pipeline.prices import PipelinePrices, make_prices
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch
from equipoise.spec.recompute import attention_repeats, linear_repeats
from equipoise.spec.run.spec import Recompute


@dataclass(frozen=True, slots=True, eq=False)
class StageSplit:
    """Which layers each stage has."""

    edges: Ints
    """Stage s has layers ``edges[s]`` to ``edges[s + 1]``, int64 [stages + 1]."""
    loads: Floats
    """Time of each stage, with embedding, head and device speed, float64 [stages]."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.loads)

    @property
    def layers(self) -> Ints:
        """Layers of each stage, int64 [stages]."""
        return np.diff(self.edges)

    def layers_of(self, rank_of: Ints) -> list[list[int]]:
        """Numbers of the layers that each pipeline rank holds, over all its stages.

        Args:
            rank_of: Pipeline rank of each stage, int64 [stages].

        >>> StageSplit(np.array([0, 2, 3, 5]), np.ones(3)).layers_of(np.array([0, 1, 0]))
        [[0, 1, 3, 4], [2]]
        """
        edges = self.edges.tolist()
        held: list[list[int]] = [[] for _ in range(int(rank_of.max()) + 1)]
        for stage, rank in enumerate(rank_of.tolist()):
            held[rank] += range(edges[stage], edges[stage + 1])
        return held

    @property
    def skew(self) -> float:
        """Slowest stage over the mean [ratio]."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0


def split_stages(
    layer_loads: npt.ArrayLike,
    stages: int,
    *,
    first_load: float = 0,
    last_load: float = 0,
    speeds: Sequence[float] | None = None,
    layer_bytes: npt.ArrayLike = 0,
    first_bytes: float = 0,
    last_bytes: float = 0,
    stage_bytes: npt.ArrayLike | None = None,
    empty_ends: bool = False,
) -> StageSplit:
    """Split layers into stages so that the slowest stage is as fast as possible.

    Args:
        layer_loads: Time of each layer, forward and backward, in any unit.
        stages: Pipeline stages, >= 1.
        first_load: Time of the embedding, on the first stage.
        last_load: Time of the final norm, the head and the loss, on the last stage.
        speeds: Relative speed of each stage's device; all alike unless given.
        layer_bytes: Memory of each layer, [layers] or [stages, layers]: parameters, and the
            activations that the stage keeps in flight [bytes].
        first_bytes: What the embedding needs [bytes].
        last_bytes: What the head needs [bytes].
        stage_bytes: Memory limit of each stage, or of all [bytes]; none unless given.
        empty_ends: Whether the first and last stage may hold only the embedding or the head.

    Raises:
        LayoutError: fewer layers than stages that need one, or loads or speeds out of range.
        FitError: no split fits; says what the nearest one needs.

    Cost: O(stages x layers x longest run), in NumPy: 0.7 ms for 126 layers of two kinds in 32
    stages, 11 ms where memory bounds them; O(layers x log stages) where all layers are alike and
    nothing bounds them.

    >>> split_stages([1] * 8, 4, last_load=1.5).layers.tolist()
    [2, 2, 3, 1]
    """
    loads = np.asarray(layer_loads, dtype=np.float64).reshape(-1)
    pace = np.ones(stages) if speeds is None else np.asarray(speeds, dtype=np.float64)
    _require(loads, stages, pace, (first_load, last_load), empty_ends=empty_ends)
    is_alike = bool((loads == loads[:1]).all() and (pace == 1.0).all())
    if is_alike and stage_bytes is None and not empty_ends:
        return _split_alike(loads, stages, first_load, last_load)
    ends = np.zeros((2, stages))
    ends[0, 0] += first_load
    ends[0, -1] += last_load
    ends[1, 0] += first_bytes
    ends[1, -1] += last_bytes
    is_free = stage_bytes is None and not empty_ends
    longest = longest_run(loads, pace, ends[0]) if is_free else len(loads)
    runs = Runs(stages, len(loads), longest)
    legal = runs.legal(empty_ends=empty_ends)
    times = runs.sums(np.broadcast_to(loads, (stages, len(loads))), ends[0])
    times = np.where(legal, times / pace[:, None, None], np.inf)
    if stage_bytes is not None:
        table = np.broadcast_to(np.asarray(layer_bytes, np.float64), (stages, len(loads)))
        allowed = np.broadcast_to(np.asarray(stage_bytes, np.float64), (stages,))
        needs = runs.sums(table, ends[1])
        fits = needs <= allowed[:, None, None]
        _require_fit(runs, np.where(legal, needs, np.inf), allowed, fits)
        times = np.where(fits, times, np.inf)
    slowest = runs.least_edges(times, np.maximum)[1]
    smooth = np.where(times <= slowest, times**2, np.inf)
    edges = runs.least_edges(smooth, np.add)[0]
    return StageSplit(edges, runs.chosen(times, edges))


def _split_alike(loads: Floats, stages: int, first_load: float, last_load: float) -> StageSplit:
    """Give equal layers one by one to the least loaded stage, the last of them on a tie.

    Squares are convex, so no other split has a smaller sum of them, or a faster slowest stage.
    """
    each, layers = float(loads[0]), np.ones(stages, dtype=np.int64)
    times = np.full(stages, each)
    times[0] += first_load
    times[-1] += last_load
    queue = [(float(times[stage]), -stage) for stage in range(stages)]
    heapq.heapify(queue)
    for _ in range(len(loads) - stages):
        _, stage = queue[0]
        layers[-stage] += 1
        ends = (first_load if stage == 0 else 0.0) + (last_load if -stage == stages - 1 else 0.0)
        heapq.heapreplace(queue, (int(layers[-stage]) * each + ends, stage))
    times = layers.astype(np.float64) * each
    times[0] += first_load
    times[-1] += last_load
    return StageSplit(np.concatenate(([0], np.cumsum(layers))), times)


def _require(
    loads: Floats, stages: int, pace: Floats, ends: tuple[float, float], *, empty_ends: bool
) -> None:
    least = max(stages - 2, 0) if empty_ends else stages
    if stages < 1 or len(loads) < least:
        raise LayoutError(
            f"{len(loads)} layers cannot fill {stages} stages. Take pp x chunks = {len(loads)} or "
            f"less, or a deeper model."
        )
    every = np.concatenate((loads, ends))
    if not (np.isfinite(every) & (every >= 0)).all():
        wrong = every[~(np.isfinite(every) & (every >= 0))][0]
        raise LayoutError(f"A layer's load is {wrong:g}. Loads are numbers of 0 or more.")
    if len(pace) != stages or not (np.isfinite(pace) & (pace > 0)).all():
        raise LayoutError(
            f"Speeds {', '.join(f'{each:g}' for each in pace)} do not suit {stages} stages. Give "
            f"each a speed above 0."
        )


def _require_fit(runs: Runs, needs: Floats, allowed: Floats, fits: npt.NDArray[np.bool_]) -> None:
    """Refuse if no split fits, with the numbers of the nearest one."""
    barred = np.where(fits, 0.0, np.inf)
    if np.isfinite(runs.least_edges(np.where(np.isfinite(needs), barred, np.inf), np.maximum)[1]):
        return
    excess = needs / np.maximum(allowed, 1.0)[:, None, None]
    edges = runs.least_edges(excess, np.maximum)[0]
    nearest = runs.chosen(needs, edges)
    worst = int((nearest / np.maximum(allowed, 1.0)).argmax())
    raise FitError(
        f"No split of {edges[-1]} layers into {len(allowed)} stages fits: the nearest has "
        f"{edges[worst + 1] - edges[worst]} layers on stage {worst}, which need "
        f"{format_bytes(nearest[worst])} of {format_bytes(allowed[worst])}. Take more stages, a "
        f"schedule that holds less, or recomputation."
    )


@dataclass(frozen=True, slots=True, eq=False)
class LayerPrices:
    """Forward time of each micro-batch in one layer, and in the head, float64 [micro-batches]."""

    linear_ns: Floats
    attention_ns: Floats
    head_ns: Floats
    tokens: Ints

    @property
    def layer_load(self) -> float:
        """One layer, forward and backward, over all micro-batches [ns]."""
        attention = (1 + BACKWARD_OVER_FORWARD) * self.attention_ns
        return float((3 * self.linear_ns + attention).sum())

    @property
    def head_load(self) -> float:
        """The head, forward and backward, over all micro-batches [ns]."""
        return float(3 * self.head_ns.sum())


def price_layers(
    curve: LoadCurve, model: ModelSpec, micro_batches: Sequence[MicroBatch]
) -> LayerPrices:
    """Time of each micro-batch in one layer and in the head, by the curve that packed it.

    The curve's price per token is divided by matrix-product weights between layers and head; a
    third of it is forward. Attention belongs to the layers; its backward takes
    ``BACKWARD_OVER_FORWARD`` forwards and has no weights. Tokens without a label save the head.
    """
    tokens = np.array([batch.tokens for batch in micro_batches], dtype=np.int64)
    attention = np.zeros(len(micro_batches))
    for at, batch in enumerate(micro_batches):
        before = batch.history_tokens
        attention[at] = float(curve.slice_attention_ns(before, before + batch.doc_tokens).sum())
    forward = tokens * curve.ns_per_token / 3
    saved = np.array([float(curve.saved_ns(batch.pieces).sum()) for batch in micro_batches]) / 3
    in_layer = model.layer_matmul_params / model.matmul_params
    in_head = model.hidden * model.vocab / model.matmul_params
    return LayerPrices(
        forward * in_layer,
        attention / (1 + BACKWARD_OVER_FORWARD) / model.layers,
        np.maximum(forward * in_head - saved, 0.0),
        tokens,
    )


def split_model(prices: LayerPrices, model: ModelSpec, stages: int) -> StageSplit:
    """Split a model's layers for these micro-batches, with the head priced in."""
    loads = np.full(model.layers, prices.layer_load)
    return split_stages(loads, stages, last_load=prices.head_load)


def split_at(prices: LayerPrices, edges: Sequence[int]) -> StageSplit:
    """Stages that were decided elsewhere, priced for the micro-batches that are to come.

    Args:
        prices: What a layer and the head take of each micro-batch.
        edges: Stage s has layers ``edges[s]`` to ``edges[s + 1]``.
    """
    bounds = np.array(edges, dtype=np.int64)
    loads = np.diff(bounds) * prices.layer_load
    loads[-1] += prices.head_load
    return StageSplit(bounds, loads)


def price_stages(
    split: StageSplit,
    prices: LayerPrices,
    *,
    hop_ns: npt.ArrayLike = 0,
    recompute: Recompute = "none",
) -> PipelinePrices:
    """Prices of every stage and micro-batch, for ``schedule.pipeline.strategies``.

    All of the head is in the forward of the last stage: its loss makes both gradients with the
    logits (``nn.loss``), and a backward, whole or in halves, only scales them.

    Args:
        split: Layers of each stage; the head is on the last one.
        prices: Prices of one layer and of the head.
        hop_ns: Time of one message between ranks, per micro-batch or for all [ns].
        recompute: What the layers' backward runs again; every N-th layer is assumed to be
            spread evenly over stages.

    Returns:
        Prices whose activations are tokens times layers.
    """
    layers = split.layers[:, None].astype(np.float64)
    is_last = (np.arange(split.stages) == split.stages - 1)[:, None]
    head = is_last * 3 * prices.head_ns
    forward = layers * (prices.linear_ns + prices.attention_ns)
    backward = layers * (prices.linear_ns + BACKWARD_OVER_FORWARD * prices.attention_ns)
    count = max(1, int(split.layers.sum()))
    again = linear_repeats(recompute, count) / count * prices.linear_ns
    again = again + attention_repeats(recompute, count) / count * prices.attention_ns
    backward = backward + layers * again
    return make_prices(
        forward + head,
        backward,
        layers * prices.linear_ns,
        hop_ns=hop_ns,
        activation=layers * prices.tokens,
    )
