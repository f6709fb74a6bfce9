"""Time the parts of one model's training step on every core of this machine at once.

What it decides
    Nothing: ``calibrate_parts`` and ``calibrate_attention`` say what is timed, ``parts_table`` puts
    it together.

Kept true (tests/multi/test_calibrate_parts.py)
    Every way that a model allows is timed, and another depth is foreseen from it.
"""

from equipoise.comm.local import run_ranks
from equipoise.observe.machine import usable_cores
from equipoise.schedule.attention_price import LinkPrice
from equipoise.spec.device_parts import ContextPoint, ModelParts, parts_name
from equipoise.train.calibrate import MOST_RANKS, Progress
from equipoise.train.calibrate_attention import time_context, time_documents
from equipoise.train.calibrate_parts import PartsPlan, time_way, ways_of
from equipoise.train.parts_table import context_points, document_points, way_table


def measure_parts(plan: PartsPlan, link: LinkPrice, progress: Progress) -> ModelParts:
    """Time the parts of a model's step on every core at once.

    Args:
        plan: Model, precision and sizes.
        link: Between two ranks, as it was measured.
        progress: Told of every way.

    Cost: some 4 s a way for a decoder of 2M weights and micro-batches of 2,560 tokens.
    """
    cores = min(len(usable_cores()), MOST_RANKS)
    ways = ways_of(plan.model, cores)
    heads, kv_heads = plan.model.heads, plan.model.kv_heads
    progress.start("time the parts of a step", len(ways) + 1)
    whole = document_points(run_ranks(cores, time_documents, plan, heads, kv_heads))
    shared = whole
    if "tensor" in ways:
        own = max(1, kv_heads // cores)
        shared = document_points(run_ranks(cores, time_documents, plan, heads // cores, own))
    context: tuple[ContextPoint, ...] = ()
    if cores > 1:
        packs = plan.packs
        timed = run_ranks(cores, time_context, plan, packs)
        context = context_points(plan, cores, packs, timed, whole, link)
    progress.advance()
    tables = []
    for way in ways:
        records = run_ranks(cores, time_way, plan, way)
        tables.append(way_table(way, plan, records, shared if way == "tensor" else whole))
        progress.advance()
    progress.finish()
    return ModelParts(
        model=parts_name(plan.model),
        title=f"hidden {plan.model.hidden:,}, vocabulary {plan.model.vocab:,}",
        dtype="bf16" if plan.precision == "bf16" else "fp32",
        ranks=cores,
        most_tokens=plan.sizes[-1],
        ways=tuple(tables),
        context=context,
    )
