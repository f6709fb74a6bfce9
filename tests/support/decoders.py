"""Small decoders, their uneven micro-batches, and the results of one rank."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.loss import IGNORED
from equipoise.parallel.pipeline.executor import StageBatch
from equipoise.parallel.pipeline.part import DecoderPart, make_part
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.catalog import LOSSY, SCHEDULES
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute

MODEL = ModelSpec(layers=6, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=37, head_width=8)
TIED = dataclasses.replace(MODEL, tied=True, qkv_bias=True, qk_norm=True)
LENGTHS = ((9, 3), (1,), (), (17,), (2, 2, 2), (0, 5), (4,), (23, 1))
"""Documents of eight micro-batches: one is empty, one is two thirds of another's work."""

Grads = dict[str, Tensor]


def batches_of(lengths: Sequence[Sequence[int]], vocab: int = MODEL.vocab) -> list[StageBatch]:
    """Tokens and labels of every micro-batch; a document's last token has no label."""
    batches = []
    for number, documents in enumerate(lengths):
        source = torch.Generator().manual_seed(number)
        tokens = torch.randint(vocab, (sum(documents),), generator=source)
        labels = tokens.roll(-1)
        labels[np.cumsum([each for each in documents if each]) - 1] = IGNORED
        batches.append(StageBatch(tokens, labels, tuple(documents)))
    return batches


def labels_in(batches: Sequence[StageBatch]) -> int:
    return sum(int((batch.labels_t != IGNORED).sum()) for batch in batches)


def one_rank(
    model: ModelSpec,
    batches: Sequence[StageBatch],
    layers: Sequence[Sequence[int]] | None = None,
) -> tuple[float, Grads]:
    """Loss sum and gradients, fp64; micro-batches may take some of the layers."""
    decoder = Decoder(model).double()
    initialize(decoder, 0)
    total, divisor = 0.0, labels_in(batches)
    for number, batch in enumerate(batches):
        taken = range(model.layers) if layers is None else layers[number]
        x_TD = decoder.embed(batch.tokens_t)
        x_TD = decoder.run_layers(x_TD, batch.pack, [decoder.layers[at] for at in taken])
        loss = decoder.finish(x_TD, batch.labels_t)
        (loss / divisor).backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in decoder.named_parameters()}


@functools.cache
def whole_model(model: ModelSpec, lengths: tuple[tuple[int, ...], ...]) -> tuple[float, Grads]:
    """The same of all layers, computed once for all strategies."""
    return one_rank(model, batches_of(lengths))


def uneven_edges(layers: int, stages: int) -> tuple[int, ...]:
    """Stages of unequal numbers of layers; where there are enough layers, each has one.

    >>> uneven_edges(6, 3), uneven_edges(6, 8)
    ((0, 1, 2, 6), (0, 1, 2, 3, 4, 5, 6, 6, 6))
    """
    return (*(min(at, layers) for at in range(stages)), layers)


def chunks_of(strategy: str) -> int:
    if SCHEDULES[strategy].in_v:
        return 2
    return 1 if SCHEDULES[strategy].most_stages == 1 or strategy in LOSSY else 2


def schedule_of(
    strategy: str, ranks: int, batches: Sequence[StageBatch], chunks: int | None = None
) -> PipelineSchedule:
    """The strategy's schedule for these micro-batches, by their tokens."""
    stages = ranks * (chunks or chunks_of(strategy))
    work = [len(batch.tokens_t) for batch in batches]
    prices = make_prices(work, work, work, stages=stages, micro_batches=len(batches))
    skip = 0.6 if strategy in LOSSY and stages > 2 else 0.0
    return write_pipeline(strategy, prices, ranks=ranks, skip=skip)


def parts_of(
    model: ModelSpec,
    edges: Sequence[int],
    schedule: PipelineSchedule,
    *,
    recompute: Recompute = "none",
) -> list[DecoderPart]:
    """Every rank's part in fp64, with its own copy of the weights."""
    parts = []
    for rank in range(schedule.ranks):
        held = np.flatnonzero(schedule.rank_of == rank).tolist()
        part = make_part(model, edges, held, dtype=torch.float64)
        part.set_recompute(recompute)
        parts.append(part)
    return parts


def error_of(actual: Tensor | None, wanted: Tensor | None, least: float = 1e-6) -> float:
    """Largest difference over the largest wanted element, or over ``least`` if that is larger."""
    if actual is None or wanted is None:
        return 0.0 if actual is wanted else float("inf")
    scale = max(float(wanted.abs().max()), least)  # lest rounding of a 0 count as error
    return float((actual - wanted).abs().max()) / scale


def gradient_errors(part: DecoderPart, wanted: Grads) -> dict[str, float]:
    largest = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    return {
        name: error_of(p.grad, wanted[name], least=max(1e-4 * largest, 1e-12))
        for name, p in part.named_parameters()
    }


def layers_of_paths(schedule: PipelineSchedule, edges: Sequence[int]) -> list[list[int]]:
    return [
        [at for stage in path if stage >= 0 for at in range(edges[stage], edges[stage + 1])]
        for path in schedule.paths.tolist()
    ]


def legal(strategy: str, ranks: int, batches: Sequence[StageBatch]) -> PipelineSchedule | None:
    try:
        return schedule_of(strategy, ranks, batches)
    except LayoutError:
        return None
