"""What a pipeline adds to a case of ``equipoise check``: parts, schedules, and what travels.

What it decides
    Stages have layers as evenly as they come, so of a small model some have none. Schedules are
    priced by tokens. Micro-batches are as uneven as the sample.

Kept true (tests/multi/check/test_pipeline.py)
    Every strategy that is not lossy is exact, and sends the bytes that its schedule says.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import Mesh
from equipoise.data.batch import Batch
from equipoise.nn.decoder import Decoder, set_recompute
from equipoise.parallel.pipeline.executor import StageBatch
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.parallel.pipeline.pipeline import Pipeline
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.pipeline.messages import list_messages
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import LOSSY, STRATEGIES, write_pipeline
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.spec.layout import Layout, rows_of
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import TWO_STAGES
from equipoise.train.check.case import Case
from equipoise.train.context import ContextGroup, Share

_EXACT = tuple(name for name in STRATEGIES if name not in LOSSY)

LogitsError = Callable[[Tensor, Share, MicroBatch], float]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What one rank made of its part of a case."""

    part: DecoderPart
    loss: float
    """Its part of the mean over labels."""
    forward_error: float
    sent_bytes: int
    sent_messages: int


def layout_of(case: Case) -> Layout:
    """Where the ranks of a case stand."""
    data_ranks = case.ranks // (case.cp * case.tp * case.pp)
    return Layout(dp=data_ranks, cp=case.cp, tp=case.tp, pp=case.pp, zero=case.zero)


def schedule_of(case: Case, turns: tuple[MicroBatch, ...]) -> PipelineSchedule:
    """Of one data-parallel rank's micro-batches: two stages a rank where the strategy has them."""
    chunks = 2 if case.schedule in TWO_STAGES else 1
    work = [batch.tokens for batch in turns]
    prices = make_prices(work, work, work, stages=chunks * case.pp, micro_batches=len(turns))
    return write_pipeline(case.schedule, prices, ranks=case.pp)


def even_edges(layers: int, stages: int) -> list[int]:
    """Layers to stages, as evenly as they come.

    >>> even_edges(6, 4)
    [0, 1, 3, 4, 6]
    """
    return [stage * layers // stages for stage in range(stages + 1)]


def compute(
    ranks: Ranks,
    case: Case,
    decoder: Decoder,
    packed: PackedStep,
    labels: int,
    batch_of: Callable[[MicroBatch], Batch],
    logits_error: LogitsError,
) -> Computed:
    """Run this rank's part of a case.

    Args:
        ranks: All of them; each calls this.
        case: With a pipeline.
        decoder: Whole, the same on every rank.
        packed: Micro-batches of every data-parallel rank.
        labels: In all of them.
        batch_of: Tokens of a micro-batch.
        logits_error: Of some rows of a micro-batch.
    """
    mesh = Mesh.join(ranks, layout_of(case))
    place = mesh.coordinates
    planner = ContextPlanner(decoder.model, case.layout)
    sharing = ContextGroup(planner, place["dp"], place["cp"], mesh, Ledger(case.cp))
    turns = sharing.turns(packed)
    schedule = schedule_of(case, turns)
    held = np.flatnonzero(schedule.rank_of == place["pp"]).tolist()
    part = DecoderPart(decoder, even_edges(decoder.model.layers, schedule.stages), held)
    set_recompute(part, case.recompute)
    logits = _Logits(part)
    sharded = ShardedDecoder(part, ranks, zero=case.zero, precision="fp32", mesh=mesh)
    pipeline = Pipeline(sharded, mesh.peers("pp"))
    shares = [sharing.share(packed, at, batch_of(turn)) for at, turn in enumerate(turns)]
    batches = [StageBatch(each.tokens_t, each.labels_t, each.pack) for each in shares]
    run = pipeline.run(schedule, batches, divisor=labels)
    # The dict of losses is in the order in which the last stage ran.
    error = max(
        (
            logits_error(x, shares[m], turns[m])
            for x, m in zip(logits.found, run.losses, strict=True)
        ),
        default=0.0,
    )
    pipeline.sum_gradients(schedule.rank_of)
    ledgers = sharing.ledger, pipeline.ledger
    return Computed(
        part,
        run.loss / labels if sharing.counts_loss else 0.0,
        error,
        sum(int(each.sent_bytes.sum()) for each in ledgers),
        sum(int(each.sent_messages.sum()) for each in ledgers),
    )


class _Logits:
    """Logits of every forward pass of the last stage, in order; none where it is not."""

    def __init__(self, part: DecoderPart) -> None:
        self.part = part
        self.found: list[Tensor] = []
        if part.holds_last:
            self._handle = part.norm.register_forward_hook(self._take)

    def _take(self, module: nn.Module, args: object, x_tD: Tensor) -> None:
        del module, args
        with torch.no_grad():
            self.found.append(self.part.logits(x_tD))


def scheduled(case: Case, model: ModelSpec, packed: PackedStep) -> tuple[int, int]:
    """Bytes and messages between stages, of all ranks, tied tables included."""
    planner = ContextPlanner(model, case.layout)
    width = 8 if model.experts else 4  # see ``check_sample``
    sent_bytes = messages = 0
    ends = 0, 0
    for turns in packed.ranks:
        schedule = schedule_of(case, turns)
        ends = int(schedule.rank_of[0]), int(schedule.rank_of[-1])
        rows = [_rows(case, planner, batch) for batch in turns]
        for message in list_messages(schedule):
            mine = rows[message.micro_batch]
            sent_bytes += sum(mine) * model.hidden * width
            messages += sum(each > 0 for each in mine)
    if model.tied and ends[0] != ends[1]:
        copies = layout_of(case).zero_ranks
        sent_bytes += 2 * model.vocab * model.hidden * width * (copies if case.zero == 0 else 1)
        messages += 2 * copies * case.tp
    return sent_bytes, messages


def _rows(case: Case, planner: ContextPlanner, batch: MicroBatch) -> list[int]:
    """Hidden states of each rank that computes a micro-batch."""
    tokens = [batch.tokens]
    if case.cp > 1:
        tokens = [len(rows) for rows in planner.plan(batch.doc_tokens.tolist()).shares.rows]
    return [len(rows_of(n, ranks=case.tp, rank=rank)) for n in tokens for rank in range(case.tp)]


def pipeline_cases(ranks: int, heads: int) -> list[Case]:
    """Every strategy that trains the same model, and pipelines with every other axis.

    Args:
        ranks: In all.
        heads: Query heads of the model, which tensor-parallel ranks must divide.
    """
    cases = []
    for stages in [n for n in range(2, ranks + 1) if ranks % n == 0]:
        own = Case(ranks, 1, "in-order", 64, "none", pp=stages)
        # Of stages that few micro-batches go through, dualpipe-v needs more of them.
        names = [name for name in _EXACT if stages == 2 or name != "dualpipe-v"]
        cases += [dataclasses.replace(own, schedule=name) for name in names]
        cases += [
            dataclasses.replace(own, zero=0, schedule="zb-h1"),
            dataclasses.replace(own, context_tokens=256, policy="by-work", recompute="full"),
        ]
        others = [n for n in range(2, ranks // stages + 1) if ranks // stages % n == 0]
        cases += [dataclasses.replace(own, cp=n, schedule="zb-v") for n in others]
        cases += [dataclasses.replace(own, tp=n) for n in others if heads % n == 0]
    return cases
