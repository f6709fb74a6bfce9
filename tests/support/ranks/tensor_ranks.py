"""Functions of ranks in tests of meshes and of tensor parallelism."""

import dataclasses
import functools

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.balance.context.plan import plan_context
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.attention import PackAttention
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.loss import IGNORED
from equipoise.optim.adamw import global_norm
from equipoise.parallel.apply import apply_axes
from equipoise.parallel.context.attention import attend_by_plan
from equipoise.parallel.overlap.parts import Parts
from equipoise.parallel.overlap.sites import take_parted
from equipoise.parallel.tensor.rows import enter, leave
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.layout import Layout, rows_of
from equipoise.spec.model.heads import share_heads
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute


def mesh_of(
    ranks: Ranks, layouts: list[Layout], axes: list[tuple[str, ...]]
) -> list[dict[tuple[str, ...], tuple[list[int], int, int]]]:
    """The peers along axes of each layout, this rank's number, and the sum of their ranks."""
    peers_of = []
    for layout in layouts:
        mesh = Mesh.join(ranks, layout)
        rows = {}
        for each in axes:
            peers = mesh.peers(*each)
            total = torch.tensor(ranks.rank)
            if peers.group is not None:
                dist.all_reduce(total, group=peers.group)
                assert dist.get_rank(peers.group) == peers.rank
            rows[each] = (list(peers.ranks), peers.rank, int(total))
        peers_of.append(rows)
    return peers_of


def weights_mesh_of(
    ranks: Ranks, layouts: list[Layout]
) -> list[tuple[tuple[str, ...], list[int], list[int], list[int]]]:
    """Each layout's mesh of weights: names, sizes, this rank's place and the sum of each dim."""
    meshes = []
    for layout in layouts:
        weights = Mesh.join(ranks, layout).weights
        sums = []
        for dim in range(weights.ndim):
            total = torch.tensor(ranks.rank)
            dist.all_reduce(total, group=weights.get_group(dim))
            sums.append(int(total))
        place = weights.get_coordinate()
        meshes.append((weights.mesh_dim_names, list(weights.shape), list(place), sums))
    return meshes


def join_mesh(ranks: Ranks, layout: Layout, axis: str) -> None:
    Mesh.join(ranks, layout).peers(axis)


# Rows between ranks. ---------------------------------------------------------------------------


def rows_both_ways(ranks: Ranks, most_tokens: int) -> list[tuple[float, float, float]]:
    """Errors at each number of tokens: gathering, summing, and the two as adjoints."""
    peers = Mesh.join(ranks, Layout(tp=ranks.world)).peers("tp")
    errors = []
    for tokens in range(most_tokens + 1):
        generator = torch.Generator().manual_seed(tokens)
        whole = torch.randn(tokens, 3, dtype=torch.float64, generator=generator)
        partials = torch.randn(ranks.world, tokens, 3, dtype=torch.float64, generator=generator)
        own = rows_of(tokens, ranks=ranks.world, rank=ranks.rank)
        x = whole[own.start : own.stop].clone().requires_grad_()
        y = partials[ranks.rank].clone().requires_grad_()
        gathered, summed = enter(x, tokens, peers), leave(y, peers)
        gathered.backward(partials[ranks.rank])
        summed.backward(whole[own.start : own.stop])
        sums = partials.sum(0)[own.start : own.stop]
        pairs = [(gathered, whole), (summed, sums), (x.grad, sums), (y.grad, whole)]
        errors.append([float((a - b).detach().abs().sum()) for a, b in pairs])
    return errors


# Whole steps. ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """A layout, and how it runs."""

    layout: Layout
    recompute: Recompute = "none"
    parts: Parts = 1


@dataclasses.dataclass
class Found:
    """Results of a step; the same on every rank."""

    loss: float
    norm: float
    gradients: dict[str, np.ndarray]
    logits: dict[int, np.ndarray]
    """Logits of each micro-batch."""
    parted: dict[int, int] = dataclasses.field(default_factory=dict)
    """Forward passes of feed-forwards by their number of parts."""


Batches = list[list[int]]
"""Lengths of the documents of each micro-batch."""


def make_decoder(model: ModelSpec, dtype: torch.dtype = torch.float64) -> Decoder:
    """A decoder whose norms and biases are not ones and zeros."""
    decoder = Decoder(model)
    initialize(decoder, 0)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(decoder.named_parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return decoder.to(dtype)


def draw_batch(model: ModelSpec, number: int, doc_tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a micro-batch; the last of each document has no label."""
    generator = torch.Generator().manual_seed(100 + number)
    tokens = torch.randint(model.vocab, (sum(doc_tokens),), generator=generator)
    labels = tokens.roll(-1)
    ends = np.cumsum(doc_tokens, dtype=np.int64) - 1
    labels[torch.from_numpy(ends[[n > 0 for n in doc_tokens]])] = IGNORED
    return tokens, labels


def count_labels(model: ModelSpec, batches: Batches) -> int:
    drawn = [draw_batch(model, *each)[1] for each in enumerate(batches)]
    return sum(int((labels != IGNORED).sum()) for labels in drawn)


def step_alone(model: ModelSpec, batches: Batches) -> Found:
    """The result that every layout must reach."""
    decoder, labels, total, logits = make_decoder(model), count_labels(model, batches), 0.0, {}
    for number, doc_tokens in enumerate(batches):
        tokens_T, labels_T = draw_batch(model, number, doc_tokens)
        loss = decoder(tokens_T, doc_tokens, labels_T=labels_T) / labels
        loss.backward()
        total += float(loss.detach())
        logits[number] = decoder(tokens_T, doc_tokens).detach().numpy()
    gradients = {name: p.grad.numpy() for name, p in decoder.named_parameters()}
    return Found(total, float(global_norm(decoder)), gradients, logits)


def step(ranks: Ranks, model: ModelSpec, batches: Batches, settings: list[Setting]) -> list[Found]:
    """One step in each setting, its gradients put together."""
    return [_step(ranks, model, batches, setting) for setting in settings]


def _step(ranks: Ranks, model: ModelSpec, batches: Batches, setting: Setting) -> Found:
    layout = setting.layout
    mesh = Mesh.join(ranks, layout)
    decoder = make_decoder(model)
    sharded = apply_axes(
        decoder,
        ranks,
        zero=layout.zero,
        precision="fp32",
        mesh=mesh,
        recompute=setting.recompute,
        parts=setting.parts,
    )
    labels, total, logits = count_labels(model, batches), 0.0, {}
    data_rank = mesh.coordinates["dp"]
    turns = range(data_rank, len(batches), layout.dp)
    for number in turns:
        sharded.prepare_micro_batch(last=number == turns[-1] and not sharded.sums_at_end)
        tokens_T, labels_T = draw_batch(model, number, batches[number])
        rows, pack = share_batch(mesh, model, batches[number])
        loss = decoder(tokens_T[rows], pack, labels_T=labels_T[rows]) / labels
        loss.backward()
        total += float(loss.detach())
    if sharded.sums_at_end:
        sharded.sum_gradients()
    norm, parted = float(global_norm(decoder)), take_parted(decoder)
    gradients = {name: p.grad.full_tensor().numpy() for name, p in decoder.named_parameters()}
    for number in turns:
        tokens_T, _ = draw_batch(model, number, batches[number])
        rows, pack = share_batch(mesh, model, batches[number])
        logits[number] = np.full((len(tokens_T), model.vocab), np.nan)
        with torch.no_grad():
            logits[number][rows] = decoder(tokens_T[rows], pack).numpy()
    losses = ranks.gather_floats([total if mesh.coordinates["tp"] == 0 else 0.0])
    return Found(float(losses.sum()), norm, gradients, logits, parted)


def share_batch(
    mesh: Mesh, model: ModelSpec, doc_tokens: list[int]
) -> tuple[np.ndarray | slice, list[int] | PackAttention]:
    """This context rank's rows of a micro-batch, and how they attend in this rank's heads."""
    layout, place = mesh.layout, mesh.coordinates
    if layout.cp == 1:
        return slice(None), doc_tokens
    heads = share_heads(model.heads, model.kv_heads, ranks=layout.tp, rank=place["tp"])
    plan = plan_context(
        doc_tokens,
        layout.cp,
        "needed-kv",
        heads=len(heads.heads),
        kv_heads=len(heads.kv_heads),
        sharding="head-tail-document",
    )
    attend = functools.partial(attend_by_plan, plan=plan, group=mesh.peers("cp").group)
    positions = torch.from_numpy(plan.shares.positions[place["cp"]])
    return plan.shares.rows[place["cp"]], PackAttention(positions, attend)


def shard_undivided(ranks: Ranks, model: ModelSpec, layout: Layout) -> None:
    """Apply ZeRO alone to a decoder whose layout has other axes."""
    ShardedDecoder(Decoder(model), ranks, zero=1, precision="fp32", mesh=Mesh.join(ranks, layout))
