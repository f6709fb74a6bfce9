"""The bytes and messages that a case's schedules say its ranks send.

What it decides
    Nothing: the schedules are those that the step runs, of ``ContextPlanner``, ``plan_turn`` and
    ``StagePlanner``. Counted are attention's messages, in the forward of every layer and in the
    backward of those that have one; in a pipeline hidden states and their gradients between stages,
    and a tied table's gradient; of encoders rows, gradients of rows behind which something is
    trained, weights that are gathered, and gradients that are split.

Kept true (tests/multi/check/test_check.py, tests/multi/check/test_pipeline.py)
    Ranks send exactly that; a byte more fails the case.
"""

from equipoise.balance.context.plan import ContextPlan
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.pipeline.messages import list_messages
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.sim.stages import StagePlanner
from equipoise.spec.catalog import POLICIES
from equipoise.spec.layout import rows_of
from equipoise.spec.modality.trained import run_shares
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.recompute import attention_repeats
from equipoise.train.check.case import Case
from equipoise.train.modality.runner import EncoderLoads
from equipoise.train.together import plan_turn
from equipoise.train.trained import trained_names

Traffic = tuple[int, int]
"""Bytes and messages, of all ranks."""


def scheduled_traffic(
    case: Case, packed: PackedStep, planner: ContextPlanner, stages: StagePlanner | None
) -> Traffic:
    """What all ranks send in one step.

    Args:
        case: A run.
        packed: Its step.
        planner: Of its attention.
        stages: Of its pipeline, if it has one.
    """
    width = 8 if case.precision == "fp64" else 4
    sent_bytes, messages = _attention(case, packed, planner, width)
    if stages is not None:
        between = _pipeline(case, packed, stages, width)
        sent_bytes, messages = sent_bytes + between[0], messages + between[1]
    return sent_bytes, messages


def with_encoders(
    scheduled: tuple[None, None] | Traffic, encoders: EncoderLoads | None
) -> tuple[None, None] | Traffic:
    """The same, and what crosses between encoders and decoder, and of encoders' weights, if any."""
    if encoders is None or scheduled[0] is None:
        return scheduled
    sent_bytes = encoders.bytes + encoders.weight_bytes
    return scheduled[0] + sent_bytes, scheduled[1] + encoders.messages + encoders.weight_messages


def _plans(case: Case, packed: PackedStep, planner: ContextPlanner) -> list[ContextPlan]:
    """Attention of every micro-batch, or of every turn of all ranks, on each tensor rank."""
    layout = case.layout
    if POLICIES[case.pack.policy].runs_together:
        return [
            plan_turn(packed, turn, case.model, tensor=layout.tp, tensor_rank=rank)
            for turn in range(packed.micro_batches)
            for rank in range(layout.tp)
        ]
    if layout.cp == 1:
        return []
    return [
        planner.plan(batch.doc_tokens.tolist(), tensor_rank=rank)
        for batch in packed
        for rank in range(layout.tp)
    ]


def _attention(case: Case, packed: PackedStep, planner: ContextPlanner, width: int) -> Traffic:
    model, spec = case.model, case.resolved.spec
    shares = run_shares(spec, model)
    # In a pipeline every stage has a backward, whatever is trained.
    first = 0 if shares is None or case.layout.pp > 1 else shares.first_back
    backwards = model.layers - first
    forwards = model.layers + attention_repeats(case.train.recompute, model.layers)
    forwards -= attention_repeats(case.train.recompute, first)
    sent_bytes = messages = 0
    for plan in _plans(case, packed, planner):
        counts = count_attention(plan.schedule, Wire(model.head_width, width, width))
        sent_bytes += forwards * int(counts.forward_bytes.sum())
        sent_bytes += backwards * int(counts.backward_bytes.sum())
        messages += (forwards + backwards) * int(counts.messages.sum())
    return sent_bytes, messages


def _pipeline(case: Case, packed: PackedStep, stages: StagePlanner, width: int) -> Traffic:
    model = case.model
    sent_bytes = messages = 0
    for planned, turns in zip(stages.plan(packed), packed.ranks, strict=True):
        rows = [_rows(case, stages.planner, batch) for batch in turns]
        for message in list_messages(planned.schedule):
            mine = rows[message.micro_batch]
            sent_bytes += sum(mine) * model.hidden * width
            messages += sum(each > 0 for each in mine)
    trains_table = "embed.weight" in trained_names(case.resolved.spec, model)
    if model.tied and trains_table and stages.rank_of[0] != stages.rank_of[-1]:
        layout = case.layout.of_ranks(case.ranks)
        copies = layout.zero_ranks if layout.zero == 0 else layout.replicas
        sent_bytes += 2 * model.vocab * model.hidden * width * copies
        messages += 2 * layout.stage_ranks
    return sent_bytes, messages


def _rows(case: Case, planner: ContextPlanner, batch: MicroBatch) -> list[int]:
    """Hidden states of each rank that computes a micro-batch."""
    tokens, ranks = [batch.tokens], case.layout.tp
    if case.layout.cp > 1:
        tokens = [len(rows) for rows in planner.plan(batch.doc_tokens.tolist()).shares.rows]
    return [len(rows_of(n, ranks=ranks, rank=rank)) for n in tokens for rank in range(ranks)]
