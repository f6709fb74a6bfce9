"""Time the parts of one model's training step on all cores, or devices, of this machine at once.

What it decides
    Nothing: ``calibrate_parts`` and ``calibrate_attention`` say what is timed, ``parts_table`` puts
    it together.

Kept true (tests/multi/plan/test_calibrate_parts.py)
    Every way that a model allows is timed, and another depth is predicted from it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from equipoise.observe.machine import usable_cores
from equipoise.schedule.attention.price import LinkPrice
from equipoise.spec.device.parts import ModelParts, Way, parts_name
from equipoise.train.calibrate.measure import MOST_RANKS, MeasureProgress
from equipoise.train.calibrate.parts import time_way, ways_of
from equipoise.train.calibrate.parts_plan import PartsPlan, WaySamples
from equipoise.train.calibrate.parts_table import context_points, document_points, way_table
from equipoise.train.calibrate.ranks import Target


def measure_parts(
    plan: PartsPlan,
    link: LinkPrice,
    progress: MeasureProgress,
    target: Target | None = None,
) -> ModelParts:
    """Time the parts of a model's step on all ranks at once.

    Args:
        plan: Model, precision and sizes.
        link: Between two ranks, as it was measured.
        progress: Shows every way.
        target: What the ranks compute on; every core unless given.

    Cost: some 4 s a way for a decoder of 2M weights and micro-batches of 2,560 tokens.
    """
    target = target or Target.cores(min(len(usable_cores()), MOST_RANKS))
    ways = ways_of(plan.model, target.ranks)
    progress.start("time the parts of a step", len(ways))
    by_way = {}
    for way in ways:
        by_way[way] = target.run(time_way, plan, way)
        progress.advance()
    progress.finish()
    return put_together(plan, by_way, link)


def put_together(
    plan: PartsPlan, by_way: Mapping[Way, Sequence[WaySamples]], link: LinkPrice
) -> ModelParts:
    """The parts of a model's step from what every rank timed of every way.

    Args:
        plan: What was timed.
        by_way: Samples of each rank, by way.
        link: Between two ranks.
    """
    alone = [rank for way, samples in by_way.items() if way != "tensor" for rank in samples]
    documents = {
        way: document_points(samples if way == "tensor" else alone)
        for way, samples in by_way.items()
    }
    tables = [way_table(way, plan, samples, documents[way]) for way, samples in by_way.items()]
    whole = next((points for way, points in documents.items() if way != "tensor"), ())
    ranks = len(next(iter(by_way.values())))
    context = context_points(plan, ranks, list(by_way.values()), whole, link) if whole else ()
    return ModelParts(
        model=parts_name(plan.model),
        title=f"hidden {plan.model.hidden:,}, vocabulary {plan.model.vocab:,}",
        dtype="bf16" if plan.precision == "bf16" else "fp32",
        ranks=ranks,
        most_tokens=plan.sizes[-1],
        ways=tuple(tables),
        context=context,
    )


def join_parts(kept: Sequence[ModelParts], parts: ModelParts) -> tuple[ModelParts, ...]:
    """Parts of models of before, with those of a model in place of what it had.

    Ways that were timed before, of the same sizes on as many ranks, and not now, stay.

    Args:
        kept: Of a device file.
        parts: Timed now.
    """
    others, ways, encoders = [], list(parts.ways), list(parts.encoders)
    for each in kept:
        if (each.model, each.dtype) != (parts.model, parts.dtype):
            others.append(each)
        elif (each.ranks, each.most_tokens) == (parts.ranks, parts.most_tokens):
            timed = {way.way for way in ways}
            ways += [way for way in each.ways if way.way not in timed]
        if (each.model, each.ranks) == (parts.model, parts.ranks):
            known = {point.encoder for point in encoders}
            encoders += [point for point in each.encoders if point.encoder not in known]
    return (*others, dataclasses.replace(parts, ways=tuple(ways), encoders=tuple(encoders)))
