"""Functions of ranks in ``test_pipeline``; their first argument is their ``Ranks``."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from equipoise.balance.context.plan import plan_context
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.attention import PackAttention
from equipoise.parallel.apply import apply_axes
from equipoise.parallel.context.attention import attend_by_plan
from equipoise.parallel.pipeline.executor import StageBatch
from equipoise.parallel.pipeline.part import DecoderPart, make_part
from equipoise.parallel.pipeline.pipeline import Pipeline
from equipoise.parallel.pipeline.timeline import gather_timeline
from equipoise.schedule.pipeline.messages import list_messages
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import needed_places
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.layout import Layout
from equipoise.spec.run.spec import Recompute
from support.decoders import (
    MODEL,
    TIED,
    batches_of,
    error_of,
    labels_in,
    layers_of_paths,
    one_rank,
    parts_of,
    schedule_of,
    uneven_edges,
    whole_model,
)


@dataclass(frozen=True)
class Case:
    """A step of a small decoder over dp x pp x cp x tp ranks, fp64."""

    strategy: str
    lengths: tuple[tuple[int, ...], ...]
    pp: int
    dp: int = 1
    cp: int = 1
    is_tied: bool = False
    recompute: Recompute = "none"
    tp: int = 1
    zero: int = 1
    runs: int = 1
    """Runs of the pipeline before gradients are summed."""


@dataclass(frozen=True)
class Told:
    """One rank's results."""

    loss_error: float
    gradient_error: float
    worst: str
    is_bitwise: bool
    sent: list[int]
    expected: list[int]
    is_ordered: bool
    """Whether each instruction on any rank began after all that it needs had ended."""


def run_cases(ranks: Ranks, cases: list[Case]) -> list[Told]:
    """Each case, every second one twice."""
    return [run_case(ranks, case, 2 - at % 2) for at, case in enumerate(cases)]


def layout_of(case: Case) -> Layout:
    return Layout(dp=case.dp, cp=case.cp, tp=case.tp, pp=case.pp, zero=case.zero)


def share(batch: StageBatch, mesh: Mesh) -> StageBatch:
    """One rank's share of a micro-batch."""
    peers = mesh.peers("cp")
    if peers.count == 1:
        return batch
    plan = plan_context(batch.pack, peers.count, heads=MODEL.heads, kv_heads=MODEL.kv_heads, tile=2)
    rows = torch.from_numpy(plan.shares.rows[peers.rank])
    attend = partial(attend_by_plan, plan=plan, group=peers.group)
    pack = PackAttention(torch.from_numpy(plan.shares.positions[peers.rank]), attend)
    return StageBatch(batch.tokens_t[rows], batch.labels_t[rows], pack)


def join(
    part: DecoderPart,
    ranks: Ranks,
    mesh: Mesh,
    precision: str = "fp32",
    recompute: Recompute = "none",
) -> Pipeline:
    """A part's pipeline, sharded if other ranks hold the same stages."""
    peers, zero = mesh.peers("pp"), mesh.layout.zero
    if mesh.layout.stage_ranks == 1:
        part.set_recompute(recompute)
        return Pipeline(part, peers)
    sharded = apply_axes(
        part, ranks, zero=zero, precision=precision, mesh=mesh, recompute=recompute
    )
    return Pipeline(sharded, peers, dtype=torch.bfloat16 if precision == "bf16" else None)


def run_case(ranks: Ranks, case: Case, times: int) -> Told:
    mesh = Mesh.join(ranks, layout_of(case))
    model = TIED if case.is_tied else MODEL
    every = batches_of(case.lengths)
    mine = [share(batch, mesh) for batch in every[mesh.coordinates["dp"] :: case.dp]]
    reruns, loss, told = [], 0.0, {}
    for _ in range(times):
        loss, runs = 0.0, []
        for first in range(case.runs):
            batches = mine[first :: case.runs]
            schedule = schedule_of(case.strategy, case.pp, batches)
            edges = uneven_edges(model.layers, schedule.stages)
            if not runs:
                rank = mesh.coordinates["pp"]
                held = np.flatnonzero(schedule.rank_of == rank)
                part = make_part(model, edges, held, dtype=torch.float64)
                pipeline = join(part, ranks, mesh, recompute=case.recompute)
            runs.append(
                pipeline.run(
                    schedule, batches, divisor=labels_in(every), allow_lossy=schedule.is_lossy
                )
            )
            loss += runs[-1].loss
        before = pipeline.ledger.sent_bytes.copy()
        pipeline.sum_gradients(schedule.rank_of)
        timeline = gather_timeline(runs[-1].timeline, mesh.peers("pp").group)
        reruns.append({name: whole(p.grad) for name, p in part.named_parameters()})
    wanted_loss, wanted = (
        one_rank(model, every, layers_of_paths(schedule, edges))
        if schedule.is_lossy
        else whole_model(model, case.lengths)
    )
    errors = {name: error_of(grad, wanted[name]) for name, grad in reruns[0].items()}
    worst = max(errors, key=errors.get)
    total = float(ranks.sum_(torch.tensor(loss / case.tp, dtype=torch.float64)))
    told["sent"] = before.tolist()
    told["expected"] = (
        expected_bytes(case, schedule, batches, rank, part.count_rows) if case.runs == 1 else None
    )
    needs, _ = needed_places(schedule)
    ordered = all(
        need < 0
        or not part.count_rows(
            len(batches[timeline.micro_batch[at]].tokens_t)
        )  # nothing of it travels
        or timeline.end_ns[need] <= timeline.begin_ns[at]
        for at, need in enumerate(needs.tolist())
    )
    return Told(
        loss_error=abs(total - wanted_loss) / wanted_loss,
        gradient_error=errors[worst],
        worst=worst,
        is_bitwise=all(is_equal(reruns[0][name], reruns[-1][name]) for name in errors),
        is_ordered=ordered,
        **told,
    )


def whole(grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None:  # nobody visited
        return None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()


def is_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def expected_bytes(case: Case, schedule, batches, rank: int, rows) -> list[int]:
    sent = [0] * case.pp
    for m in list_messages(schedule):
        if m.source == rank:
            sent[m.target] += 8 * MODEL.hidden * rows(len(batches[m.micro_batch].tokens_t))
    return sent


# Ranks that do not agree. -----------------------------------------------------------------------


def disagree(ranks: Ranks, what: str) -> None:
    batches = batches_of(((4,), (3, 2)))
    schedule = schedule_of("1f1b", 2, batches)
    (part,) = parts_of(MODEL, (0, 3, 6), schedule)[ranks.rank : ranks.rank + 1]
    if ranks.rank == 1:
        if what == "schedule":
            schedule = schedule_of("gpipe", 2, batches, chunks=1)
        elif what == "tokens":
            batches = batches_of(((4,), (3, 1)))
        else:
            part = parts_of(MODEL, (0, 2, 6), schedule)[1]
    peers = Mesh.join(ranks, Layout(pp=2)).peers("pp")
    Pipeline(part, peers).run(schedule, batches, divisor=1.0)


def compute_in_bf16(ranks: Ranks) -> tuple[float, dict[str, str]]:
    """A step in bf16 over two stages of two replicas each; the loss and dtypes."""
    case = Case("zb-h1", ((30, 5), (9,), (1, 1), (12,)), pp=2, dp=2)
    mesh = Mesh.join(ranks, layout_of(case))
    batches = batches_of(case.lengths)[mesh.coordinates["dp"] :: 2]
    prices = make_prices(1, 1, 1, stages=2, micro_batches=2)
    schedule = write_pipeline("zb-h1", prices, ranks=2)
    part = make_part(MODEL, (0, 3, 6), [mesh.coordinates["pp"]])
    pipeline = join(part, ranks, mesh, "bf16")
    loss = pipeline.run(schedule, batches, divisor=labels_in(batches_of(case.lengths))).loss
    pipeline.sum_gradients(schedule.rank_of)
    dtypes = {name: str(p.grad.dtype) for name, p in part.named_parameters()}
    sent = int(ranks.sum_(torch.tensor(pipeline.ledger.sent_bytes.sum())))
    tokens = sum(sum(each) for each in case.lengths)
    assert sent == 2 * tokens * MODEL.hidden * 2  # there and back, two bytes each
    return float(ranks.sum_(torch.tensor(loss, dtype=torch.float64))), dtypes


def bf16_reference() -> float:
    return one_rank(MODEL, batches_of(((30, 5), (9,), (1, 1), (12,))))[0]
