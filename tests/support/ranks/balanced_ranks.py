"""Functions of ranks in tests of experts that are balanced by schedules."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from equipoise.balance.expert.auto import PolicyChoice
from equipoise.balance.expert.workload import workload
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe import layer as moe_layer
from equipoise.nn.moe.balance import set_loss_scale
from equipoise.nn.rope import rotary_frequencies, rotary_table
from equipoise.parallel.expert.balanced import balanced_exchanges
from equipoise.parallel.expert.exchange import spread_experts
from equipoise.parallel.expert.obey import balance_experts
from equipoise.parallel.expert.switched import SwitchedExchange
from equipoise.parallel.overlap.parts import Parts
from equipoise.parallel.overlap.sites import take_parted
from equipoise.parallel.overlap.travel import RowsTravel
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.expert.schedule import ExpertSchedule
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import ExpertsSpec, Recompute

TOKENS = 24
STEPS = 2


@dataclasses.dataclass(frozen=True)
class BalancedCase:
    """A policy, a workload of routers, and a layout."""

    model: ModelSpec
    layout: Layout
    wish: ExpertsSpec
    kind: str
    dtype: torch.dtype = torch.float64
    recompute: Recompute = "none"
    sharing: int | None = None
    """Forced where ranks share hidden units."""
    parts: Parts = 1
    """In how many rows travel, where experts stay."""
    trial: int = 0
    """The step since the start at which ``auto`` begins."""


@dataclasses.dataclass(frozen=True)
class BalancedOutcome:
    """Errors against one rank in the worst of the steps; what was planned and sent in the last."""

    loss_error: float
    gradient_error: float
    weight_error: float
    copies: int
    before: float
    after: float
    weights: list[Tensor]
    sent: list[list[int]]
    schedules: list[ExpertSchedule]
    chosen: dict[str, int]
    """Micro-batches of each policy under ``auto``."""
    sharings: list[int]
    """The sharing of each forward, where ranks share hidden units."""
    moved: bool
    """Whether a parameter left its place between steps."""
    parted: dict[int, int]
    """Forward passes by their number of parts."""


def _tokens(case: BalancedCase, rank: int, step: int) -> Tensor:
    """Uneven documents; under W4 and W5 some ranks have few or none."""
    counts = {"W4": TOKENS // (rank + 1), "W5": TOKENS * (rank % 4 != 3)}
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(case.model.vocab, (counts.get(case.kind, TOKENS),), generator=drawn)


@contextmanager
def chosen_by(case: BalancedCase, rank: int, step: int) -> Iterator[None]:
    """Let routers choose by a workload instead of by scores; weights are still scores."""
    model, plain = case.model, moe_layer.choose
    ranks = case.layout.world
    share = workload(case.kind, 3, step, ranks=ranks, experts=model.experts, rows_per_rank=4096)
    popularity = share.sum(axis=0) / share.sum()
    popularity = np.append(popularity, [1 / model.experts] * model.identity_experts)

    def choose(scores_TX: Tensor, top_k: int) -> Tensor:
        drawn = np.random.default_rng([step, rank])
        noise = drawn.gumbel(size=scores_TX.shape)
        with np.errstate(divide="ignore"):
            keys = torch.from_numpy(np.log(popularity)[np.newaxis] + noise)
        return plain(keys, top_k)

    moe_layer.choose = choose
    try:
        yield
    finally:
        moe_layer.choose = plain


def _decoder(case: BalancedCase) -> Decoder:
    decoder = Decoder(case.model)
    initialize(decoder, 0)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "router" in name or "experts" in name:
                weight *= 8.0  # so that experts differ
    decoder.set_recompute(case.recompute)
    return decoder.to(case.dtype)


def _backward(case: BalancedCase, decoder: Decoder, rank: int, step: int, labels: int) -> float:
    tokens = _tokens(case, rank, step)
    with chosen_by(case, rank, step):
        loss = decoder(tokens, (len(tokens),), labels_T=tokens) / labels
        loss.backward()
    return float(loss.detach())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _relative(mine: Tensor, reference: Tensor) -> float:
    scale = float(reference.abs().max()) or 1.0
    return float((mine - reference).abs().max()) / scale


def _count_labels(case: BalancedCase, step: int) -> int:
    return sum(len(_tokens(case, rank, step)) for rank in range(case.layout.world))


def _descend(decoder: Decoder) -> None:
    with torch.no_grad():
        for weight in decoder.parameters():
            weight -= 0.5 * weight.grad
            weight.grad = None


@functools.cache
def _one_rank(case: BalancedCase) -> list[tuple[float, list[Tensor], list[Tensor]]]:
    """Loss, gradients and weights of each step of SGD on one rank, once for all policies."""
    decoder, steps = _decoder(case), []
    for step in range(STEPS):
        labels = _count_labels(case, step)
        set_loss_scale(decoder, 1 / labels)
        ranks = range(case.layout.world)
        loss = sum(_backward(case, decoder, rank, step, labels) for rank in ranks)
        gradients = [weight.grad for weight in decoder.parameters()]
        _descend(decoder)
        steps.append((loss, gradients, [each.detach().clone() for each in decoder.parameters()]))
    return steps


def _prove(ranks: Ranks, case: BalancedCase) -> BalancedOutcome:
    plain = BalancedCase(
        case.model, Layout(dp=ranks.world), ExpertsSpec(), case.kind, dtype=case.dtype
    )
    expected, decoder = _one_rank(plain), _decoder(case)
    mesh = Mesh.join(ranks, case.layout)
    ledgers = spread_experts(decoder, mesh, policy=MixedPrecisionPolicy())
    balance_experts(decoder, case.wish, parts=case.parts)
    exchanges = balanced_exchanges(decoder)
    for each in exchanges:
        each.step = case.trial
        if isinstance(each, SwitchedExchange):
            each.forced = case.sharing
    sharded = ShardedDecoder(decoder, ranks, zero=case.layout.zero, precision="fp32")
    written: list[ExpertSchedule] = []
    errors: dict[str, list[float]] = {"loss": [], "gradient": [], "weight": []}
    places = [_local(each).data_ptr() for each in decoder.parameters()]
    for step, (reference, gradients, weights) in enumerate(expected):
        labels = _count_labels(case, step)
        set_loss_scale(decoder, 1 / labels)
        for ledger in ledgers:
            ledger.sent_bytes[:] = 0
        written.clear()
        with _watched(exchanges, written):
            sharded.prepare_micro_batch(last=not sharded.sums_at_end)
            loss = _backward(case, decoder, ranks.rank, step, labels)
            if sharded.sums_at_end:
                sharded.sum_gradients()
        errors["loss"].append(abs(sum(ranks.gather_objects(loss)) - reference) / reference)
        for mine, whole in zip(decoder.parameters(), gradients, strict=True):
            errors["gradient"].append(_relative(_whole(mine.grad), whole))
        _descend(decoder)
        for mine, whole in zip(decoder.parameters(), weights, strict=True):
            errors["weight"].append(_relative(_whole(mine.detach()), whole))
        for exchange in exchanges:
            exchange.seen = written[0].rows.sum(axis=0) if written else None
            exchange.step += 1
            if isinstance(exchange, SwitchedExchange) and case.sharing is not None:
                exchange.forced = 0 if step else 1  # from here on, another one
    planned = [each.planned for each in exchanges]
    rows = sum(each.rows for each in planned) or 1
    return BalancedOutcome(
        *(max(each) for each in errors.values()),
        copies=sum(each.copies for each in planned),
        before=sum(each.before for each in planned) / rows,
        after=sum(each.after for each in planned) / rows,
        weights=[_whole(each.detach()).clone() for each in decoder.parameters()],
        sent=[each.sent_bytes.tolist() for each in ledgers],
        schedules=list(written),
        chosen=dict(sum((Counter(each.chosen) for each in planned), Counter())),
        sharings=[
            r for each in exchanges if isinstance(each, SwitchedExchange) for r in each.switches
        ],
        moved=places != [_local(each).data_ptr() for each in decoder.parameters()],
        parted=take_parted(decoder),
    )


@contextmanager
def _watched(exchanges: list[Any], written: list[ExpertSchedule]) -> Iterator[None]:
    """Note the schedules that exchanges write."""
    kind = type(exchanges[0]) if exchanges else None
    if kind is None:
        yield
        return
    plain = kind.plan

    def plan(self: Any, rows: Any) -> PolicyChoice:
        choice = plain(self, rows)
        written.append(choice.schedule)
        return choice

    kind.plan = plan
    try:
        yield
    finally:
        kind.plan = plain


def prove(ranks: Ranks, cases: list[BalancedCase]) -> list[BalancedOutcome]:
    """Each case against the plain model on one rank."""
    return [_prove(ranks, case) for case in cases]


def disagree(ranks: Ranks, case: BalancedCase) -> tuple[str, int]:
    """The message where rank 1 plans with other limits, and rows sent by then."""
    decoder = _decoder(case)
    ledgers = spread_experts(decoder, Mesh.join(ranks, case.layout), policy=MixedPrecisionPolicy())
    balance_experts(decoder, dataclasses.replace(case.wish, least_rows=1 + 1000 * ranks.rank))
    moved: list[int] = []
    base = balanced_exchanges(decoder)[0].base
    plain = type(base).way
    type(base).way = lambda *args: moved.append(1) or plain(*args)
    try:
        _backward(case, decoder, ranks.rank, 0, 1)
    except LayoutError as error:
        return str(error), len(moved)
    finally:
        type(base).way = plain
    return "", int(ledgers[0].sent_bytes.sum())


def refuse(ranks: Ranks, case: BalancedCase) -> None:
    decoder = _decoder(case)
    spread_experts(decoder, Mesh.join(ranks, case.layout), policy=MixedPrecisionPolicy())
    balance_experts(decoder, case.wish)


def order_of_events(ranks: Ranks, model: ModelSpec) -> list[str]:
    """What one layer behind a shortcut does, forward and then backward."""
    decoder = Decoder(dataclasses.replace(model, shortcut=True, shared_ffn=8))
    initialize(decoder, 0)
    mesh = Mesh.join(ranks, Layout(dp=2, ep=2, zero=1))
    spread_experts(decoder, mesh, policy=MixedPrecisionPolicy())
    seen: list[str] = []

    def noted(name: str, out: Tensor) -> Tensor:
        seen.append(name)
        out.register_hook(lambda grad: seen.append(name))
        return out

    (layer,) = decoder.layers
    shared = layer.feed_forward.shared
    shared.register_forward_hook(lambda module, args, out: noted("shared", out))
    plain = {"leave": RowsTravel.launch, "arrive": RowsTravel.arrive}
    RowsTravel.launch = lambda *args: seen.append("leave") or plain["leave"](*args)
    RowsTravel.arrive = lambda *args: seen.append("arrive") or plain["arrive"](*args)
    try:
        x_tD = torch.randn(5, model.hidden, requires_grad=True)
        table = rotary_table(rotary_frequencies(model), torch.arange(5), x_tD.dtype)
        layer(x_tD, table, lambda q, k, v: noted("attend", q * 1.0)).sum().backward()
    finally:
        RowsTravel.launch, RowsTravel.arrive = plain.values()
    return seen
