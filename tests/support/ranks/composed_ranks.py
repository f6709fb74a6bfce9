"""Layouts of several axes at once, on a small decoder with experts, compared on ranks."""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from equipoise.base.errors import CheckError
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe.balance import balances, set_loss_scale
from equipoise.parallel.apply import apply_axes
from equipoise.parallel.expert.exchange import ExpertExchange
from equipoise.parallel.expert.loads import settle_experts
from equipoise.parallel.overlap.travel import RowsTravel
from equipoise.parallel.pipeline.executor import Executor, StageBatch
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.parallel.pipeline.pipeline import Pipeline
from equipoise.parallel.pipeline.program import Slot
from equipoise.parallel.pipeline.replicas import Replicas
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replicas import list_meetings
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute
from equipoise.train.check.sample import held_error

SPARSE = ModelSpec(
    layers=4,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=5,
    top_k=2,
    expert_ffn=8,
    dense_layers=1,
    balance_rate=0.5,
)
DENSE = dataclasses.replace(SPARSE, experts=0, top_k=1, dense_layers=0)
BIASED = dataclasses.replace(SPARSE, balance="bias", shared_ffn=12, tied=True)
# Uneven micro-batches of four data-parallel ranks; some have no token.
LENGTHS = (((9, 1, 14), (5,), (7,)), ((30,), (2, 2), ()), ((3, 4), (17,), (1,)), ((), (1,), (6, 5)))


@dataclass(frozen=True)
class Case:
    """A step of a model over the ranks of a layout."""

    layout: Layout
    model: ModelSpec = SPARSE
    strategy: str = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    precision: str = "fp32"


@dataclass(frozen=True)
class Found:
    """Errors against one rank, and whether ranks met as often as was counted."""

    loss_error: float
    gradient_error: float
    worst: str
    loads_agree: bool
    meetings: tuple[int, int]
    """Collectives over ep: counted before the step, and made by it."""


def make(model: ModelSpec) -> Decoder:
    decoder = Decoder(model)
    initialize(decoder, 0)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "router" in name or "experts" in name:
                weight *= 8.0  # so that experts differ, and so do scores
    for each in balances(decoder):
        each.state_X.copy_(torch.arange(model.experts))
    return decoder.double()


def batches_of(dp: int) -> list[list[StageBatch]]:
    batches = []
    for rank, turns in enumerate(LENGTHS[:dp]):
        rows = []
        for turn, lengths in enumerate(turns):
            source = torch.Generator().manual_seed(100 * rank + turn)
            tokens = torch.randint(SPARSE.vocab, (sum(lengths),), generator=source)
            rows.append(StageBatch(tokens, tokens.roll(-1), lengths))
        batches.append(rows)
    return batches


def schedule_of(case: Case, every: list[list[StageBatch]]) -> PipelineSchedule:
    """One schedule for all replicas, from the longest of each micro-batch."""
    work = np.max([[len(batch.tokens_t) for batch in turns] for turns in every], axis=0)
    prices = make_prices(work, work, work, stages=case.chunks * case.layout.pp)
    return write_pipeline(case.strategy, prices, ranks=case.layout.pp)


def cut(case: Case, schedule: PipelineSchedule, rank: int) -> DecoderPart:
    held = np.flatnonzero(schedule.rank_of == rank).tolist()
    edges = [stage * case.model.layers // schedule.stages for stage in range(schedule.stages + 1)]
    return DecoderPart(make(case.model), edges, held)


def spread(case: Case, part: DecoderPart, mesh: Mesh) -> ShardedDecoder:
    return apply_axes(
        part,
        mesh.ranks,
        zero=case.layout.zero,
        precision=case.precision,
        mesh=mesh,
        recompute=case.recompute,
    )


def labels_in(every: list[list[StageBatch]]) -> int:
    return sum(len(batch.tokens_t) for turns in every for batch in turns)


@dataclass(frozen=True)
class Alone:
    """A step on one rank."""

    loss: float
    gradients: dict[str, Tensor]
    loads: list[Tensor]
    """Tokens that chose each expert, of each layer that has some."""
    penalty: float
    states: dict[str, Tensor]
    """State of every layer's balance after the step."""


@functools.cache
def one_rank(model: ModelSpec, dp: int) -> Alone:
    """The step that every layout of as many data-parallel ranks must reach."""
    every, whole, total = batches_of(dp), make(model), 0.0
    labels = labels_in(every)
    set_loss_scale(whole, 1 / labels)
    for batch in (batch for turns in every for batch in turns):
        loss = whole(batch.tokens_t, batch.pack, labels_T=batch.labels_t)
        (loss / labels).backward()
        total += float(loss.detach())
    layers = balances(whole)
    loads = [each.loads_X.clone() for each in layers]
    penalty = sum(float(each.penalty) for each in layers)
    for each, counts in zip(layers, loads, strict=True):
        each.settle(counts.clone())
    return Alone(
        total,
        {name: weight.grad for name, weight in whole.named_parameters()},
        loads,
        penalty,
        dict(whole.named_buffers()),
    )


def run_case(ranks: Ranks, case: Case) -> tuple[Found, list[Tensor]]:
    layout = case.layout
    mesh = Mesh.join(ranks, layout)
    every = batches_of(layout.dp)
    labels = labels_in(every)
    schedule = schedule_of(case, every)
    part = cut(case, schedule, mesh.coordinates["pp"])
    set_loss_scale(part, 1 / labels)
    sharded = spread(case, part, mesh)
    pipeline = Pipeline(sharded, mesh.peers("pp"))
    with CountExchanges() as met:
        run = pipeline.run(schedule, every[mesh.coordinates["dp"]], divisor=labels)
    pipeline.sum_gradients(schedule.rank_of)
    wanted = one_rank(case.model, layout.dp)
    errors = {
        name: held_error(p.grad, wanted.gradients[name]) for name, p in part.named_parameters()
    }
    worst = max(errors, key=lambda name: errors[name])
    loss = float(ranks.sum_(torch.tensor(run.loss, dtype=torch.float64))) / layout.tp
    counted = Replicas.of(sharded, part).count_meetings()
    rows = list_meetings(schedule, counted)
    mine = rows[rows[:, 0] == mesh.coordinates["pp"]]
    outcome = Found(
        loss_error=abs(loss - wanted.loss) / wanted.loss,
        gradient_error=errors[worst],
        worst=worst,
        loads_agree=_loads_agree(part, wanted, ranks),
        meetings=(int(mine[:, 4].sum()), met.count),
    )
    return outcome, [_local(p.grad) for p in part.parameters()]


def _local(grad: Tensor) -> Tensor:
    return grad.to_local().clone() if isinstance(grad, DTensor) else grad.clone()


def _loads_agree(part: DecoderPart, wanted: Alone, ranks: Ranks) -> bool:
    """Counts, auxiliary loss and the balance of the next step, of every layer that is here."""
    if not part.model.experts:
        return True
    loads, settled, _ = settle_experts(part, ranks, step=1)
    here = {name: each for name, each in part.named_buffers() if name.endswith("state_X")}
    same = all(torch.equal(each, wanted.states[name]) for name, each in here.items())
    agree = torch.equal(loads, torch.stack(wanted.loads))
    return same and agree and abs(float(settled) - wanted.penalty) <= 1e-9


class CountExchanges:
    """Collectives over the ranks that share this one's experts, while it is entered."""

    def __init__(self) -> None:
        self._plain = ExpertExchange.move, RowsTravel.launch
        self.count = 0

    def __enter__(self) -> "CountExchanges":
        move, launch = self._plain

        def moved(exchange: ExpertExchange, *args: object) -> Tensor:
            self.count += exchange.peers.count > 1
            return move(exchange, *args)

        def launched(travel: RowsTravel, *args: object) -> Tensor:
            self.count += travel.group is not None
            return launch(travel, *args)

        ExpertExchange.move, RowsTravel.launch = moved, launched
        return self

    def __exit__(self, *_: object) -> None:
        ExpertExchange.move, RowsTravel.launch = self._plain


def compare(ranks: Ranks, cases: list[Case]) -> list[tuple[Found, bool]]:
    """Run every case, and every second one twice to compare the two bit for bit."""
    told = []
    for at, case in enumerate(cases):
        outcome, one = run_case(ranks, case)
        two = one if at % 2 else run_case(ranks, case)[1]
        told.append((outcome, all(map(torch.equal, one, two))))
    return told


def miss(ranks: Ranks, case: Case, ends_early: bool) -> str:
    """The error of a step in which replica 1 has another order, or one micro-batch less."""
    mesh = Mesh.join(ranks, case.layout)
    turns = batches_of(case.layout.dp)[mesh.coordinates["dp"]]
    mine = case
    if mesh.coordinates["dp"] == 1 and ends_early:
        turns = turns[:-1]
    elif mesh.coordinates["dp"] == 1:
        mine = dataclasses.replace(case, strategy="gpipe")
    schedule = schedule_of(mine, [turns])
    part = cut(mine, schedule, mesh.coordinates["pp"])
    sharded = spread(case, part, mesh)
    try:
        Pipeline(sharded, mesh.peers("pp")).run(schedule, turns, divisor=1.0)
    except CheckError as error:
        return str(error)
    return ""


def hold(ranks: Ranks, cases: list[Case]) -> list[dict[str, list[int]]]:
    """Bytes of whole weights, of whole gradients and of split ones, after each instruction and at
    the end of the step; and of all weights of this rank's stages."""
    told = []
    for case in cases:
        mesh, every = Mesh.join(ranks, case.layout), batches_of(case.layout.dp)
        schedule = schedule_of(case, every)
        part = cut(case, schedule, mesh.coordinates["pp"])
        weights = sum(p.nbytes for p in part.parameters())
        sharded = spread(case, part, mesh)
        pipeline = Pipeline(sharded, mesh.peers("pp"))
        seen: list[tuple[int, int, int]] = []
        plain = Executor._run

        def run(self: Executor, slot: Slot, part=part, seen=seen, plain=plain) -> Tensor | None:
            made = plain(self, slot)
            seen.append(held_bytes(part))
            return made

        Executor._run = run
        try:
            pipeline.run(schedule, every[mesh.coordinates["dp"]], divisor=1.0)
        finally:
            Executor._run = plain
        pipeline.sum_gradients(schedule.rank_of)
        seen.append(held_bytes(part))
        names = ("whole weights", "whole gradients", "split gradients")
        columns = zip(names, map(list, zip(*seen, strict=True)), strict=True)
        told.append(dict(columns) | {"weights": [weights]})
    return told


def held_bytes(part: Decoder) -> tuple[int, int, int]:
    """Bytes of whole weights, of whole gradients and of split ones."""
    whole = grads = split = 0
    for module in part.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        for group in [] if state is None else state._fsdp_param_groups:
            for each in group.fsdp_params:
                gathered = getattr(each, "_unsharded_param", None)
                if gathered is not None:
                    whole += gathered.untyped_storage().nbytes()
                    grads += 0 if gathered.grad is None else gathered.grad.nbytes
                mine = each.sharded_param.grad
                split += 0 if mine is None else mine.to_local().nbytes
    return whole, grads, split
