"""Functions of ranks in tests of expert parallelism."""

import dataclasses
import functools

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe.balance import balances, collect_loads, set_loss_scale
from equipoise.optim.adamw import global_norm
from equipoise.parallel.expert.exchange import ExpertExchange, sparse_layers, spread_experts
from equipoise.parallel.expert.split import ExpertSplit
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.layout import Layout
from equipoise.spec.model.experts import split_experts
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, and the documents of every micro-batch of each rank."""

    model: ModelSpec
    layout: Layout
    packs: tuple[tuple[tuple[int, ...], ...], ...]
    states: tuple[int, ...] = ()
    """State of every layer's balance before the step."""
    recompute: Recompute = "none"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Errors against one rank, and what this rank sent and counted."""

    loss_error: float
    norm_error: float
    errors: dict[str, float]
    gradients: dict[str, Tensor]
    loads: list[list[int]]
    penalty: float
    sent: list[list[int]]


def _decoder(case: Case) -> Decoder:
    decoder = Decoder(case.model)
    initialize(decoder, 0)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "router" in name or "experts" in name or "shared" in name:
                weight *= 8.0  # so that experts differ, and so do scores
    decoder.set_recompute(case.recompute)
    for each in balances(decoder):
        if case.states:
            each.state_X.copy_(torch.tensor(case.states))
    return decoder.double()


def _batch(case: Case, rank: int, turn: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    lengths = case.packs[rank][turn]
    generator = torch.Generator().manual_seed(100 * rank + turn)
    tokens = torch.randint(case.model.vocab, (sum(lengths),), generator=generator)
    labels = torch.randint(case.model.vocab, (sum(lengths),), generator=generator)
    return tokens, labels, lengths


def _labels(case: Case) -> int:
    return sum(sum(pack) for packs in case.packs for pack in packs)


@functools.cache
def _reference(case: Case) -> tuple[float, Decoder]:
    """Loss and gradients of one rank, once for all layouts and whatever they recompute."""
    decoder = _decoder(case)
    set_loss_scale(decoder, 1 / _labels(case))
    total = 0.0
    for rank, packs in enumerate(case.packs):
        for turn in range(len(packs)):
            tokens, labels, lengths = _batch(case, rank, turn)
            loss = decoder(tokens, lengths, labels_T=labels) / _labels(case)
            loss.backward()
            total += float(loss.detach())
    return total, decoder


def step(ranks: Ranks, case: Case) -> tuple[float, Decoder, list[Ledger]]:
    """One step up to the gradients, on this rank."""
    mesh = Mesh.join(ranks, case.layout)
    decoder = _decoder(case)
    set_loss_scale(decoder, 1 / _labels(case))
    ledgers = spread_experts(decoder, mesh, policy=MixedPrecisionPolicy())
    sharded = ShardedDecoder(decoder, ranks, zero=case.layout.zero, precision="fp32")
    total = 0.0
    turns = len(case.packs[ranks.rank])
    for turn in range(turns):
        tokens, labels, lengths = _batch(case, ranks.rank, turn)
        sharded.prepare_micro_batch(last=turn == turns - 1 and not sharded.sums_at_end)
        loss = decoder(tokens, lengths, labels_T=labels) / _labels(case)
        loss.backward()
        total += float(loss.detach())
    if sharded.sums_at_end:
        sharded.sum_gradients()
    return total, decoder, ledgers


def compare(ranks: Ranks, cases: list[Case]) -> list[Outcome]:
    """Each case against the plain model on one rank."""
    outcomes = []
    for case in cases:
        alone = dataclasses.replace(case, layout=Layout(), recompute="none")
        expected_loss, expected = _reference(alone)
        loss, decoder, ledgers = step(ranks, case)
        loss = sum(ranks.gather_objects(loss))
        errors, gradients = {}, {}
        for (name, weight), whole in zip(
            decoder.named_parameters(), expected.parameters(), strict=True
        ):
            grad = weight.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            gradients[name] = grad
            scale = float(whole.grad.abs().max()) or 1.0
            errors[name] = float((grad - whole.grad).abs().max()) / scale
        norm = float(global_norm(decoder))
        expected_norm = float(global_norm(expected))
        loads, penalty = collect_loads(decoder)
        all_loads, all_penalty = collect_loads(expected)
        ranks.sum_(penalty)
        assert abs(float(penalty - all_penalty)) <= 1e-10 * max(1.0, float(all_penalty))
        assert torch.equal(ranks.sum_(loads.clone()), all_loads)
        outcomes.append(
            Outcome(
                loss_error=abs(loss - expected_loss) / expected_loss,
                norm_error=abs(norm - expected_norm) / expected_norm,
                errors=errors,
                gradients=gradients,
                loads=loads.tolist(),
                penalty=float(penalty),
                sent=[each.sent_bytes.tolist() for each in ledgers],
            )
        )
    return outcomes


def travel(ranks: Ranks, tables: list[list[list[int]]]) -> list[tuple[bool, bool, list[int]]]:
    """Whether rows come back unchanged from experts that change nothing."""
    peers = Mesh.join(ranks, Layout(dp=ranks.world, ep=ranks.world)).peers("ep")
    outcomes = []
    for table in tables:
        counts = torch.tensor(table[ranks.rank])
        shares = split_experts(len(counts), ranks=ranks.world)
        first = sum(shares[: ranks.rank])
        exchange = ExpertExchange(peers, tuple(shares), Ledger(ranks.world), None)
        experts = torch.arange(len(counts)).repeat_interleave(counts)
        x = torch.randn(len(experts), 3, dtype=torch.float64)
        x[:, 0] = experts  # so that the rank that computes a row can see its expert
        x.requires_grad_()
        arrived = []

        def identity(rows: Tensor, here: Tensor, first: int = first, seen: list = arrived):
            wanted = torch.arange(first, first + len(here)).repeat_interleave(here)
            seen.append(torch.equal(rows[:, 0].detach(), wanted.double()))
            return rows * 1.0

        y = exchange(x, counts, identity)
        pull = torch.randn_like(y)
        (grad,) = torch.autograd.grad((y * pull).sum(), x)
        outcomes.append((torch.equal(x, y), torch.equal(grad, pull) and all(arrived), shares))
    return outcomes


def gather_and_sum(ranks: Ranks, tables: list[list[int]]) -> list[float]:
    """The largest error on each table of rows: gathering, summing, and both backwards."""
    split = ExpertSplit(Mesh.join(ranks, Layout(dp=ranks.world, etp=ranks.world)).peers("etp"))
    errors = []
    for sizes in tables:
        generator = torch.Generator().manual_seed(sum(sizes))
        whole = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=generator)
        parts = torch.randn(ranks.world, *whole.shape, dtype=torch.float64, generator=generator)
        first = sum(sizes[: ranks.rank])
        own = slice(first, first + sizes[ranks.rank])
        x, y = whole[own].clone().requires_grad_(), parts[ranks.rank].clone().requires_grad_()
        gathered, summed = split.gather(x, sizes), split.sum_back(y, sizes)
        (grad_x,) = torch.autograd.grad(gathered, x, parts[ranks.rank])
        (grad_y,) = torch.autograd.grad(summed, y, whole[own])
        sums = parts.sum(0)[own]
        pairs = [(gathered, whole), (summed, sums), (grad_x, sums), (grad_y, whole)]
        errors.append(max(float((a - b).detach().abs().sum()) for a, b in pairs))
    return errors


def refuse(ranks: Ranks, model: ModelSpec, layout: Layout) -> None:
    spread_experts(Decoder(model), Mesh.join(ranks, layout), policy=MixedPrecisionPolicy())


def owned(ranks: Ranks, model: ModelSpec, layout: Layout) -> list[int]:
    """Experts of this rank in each layer."""
    decoder = Decoder(model)
    spread_experts(decoder, Mesh.join(ranks, layout), policy=MixedPrecisionPolicy())
    return [len(each.experts.gate.local) for each in sparse_layers(decoder)]
