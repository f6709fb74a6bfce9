"""Functions of ranks in tests of tokens that lie where their experts probably are."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from equipoise.balance.expert.routes import RouteTable
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe.balance import set_loss_scale
from equipoise.nn.moe.layer import Router
from equipoise.parallel.expert.exchange import spread_experts
from equipoise.parallel.expert.speculative import place_by_routes
from equipoise.parallel.tensor.shard import split_weights
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.layout import Layout, rows_of
from equipoise.spec.model.presets import ModelSpec

DOCUMENTS = (9, 1, 16, 7)


@dataclasses.dataclass(frozen=True)
class SpeculativeOutcome:
    """Errors against one rank, and what was sent by whom."""

    loss_error: float
    gradient_error: float
    weight_error: float
    logit_error: float
    sent_bytes: list[int]
    """By layer, of this rank to all others."""
    rows: list[int]
    """Rows of this rank's tokens, by layer, forward and backward of one micro-batch."""
    away: list[int]
    """Those whose expert is on another rank."""


def text(model: ModelSpec) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab, (sum(DOCUMENTS),), generator=drawn)


def _decoder(model: ModelSpec, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(model)
    initialize(decoder, 0)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "router" in name or "experts" in name:
                weight *= 8.0  # so that experts differ
    return decoder.to(dtype)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _error(mine: Tensor, reference: Tensor) -> float:
    return float((mine - reference).abs().max()) / (float(reference.abs().max()) or 1.0)


def prove(
    ranks: Ranks, model: ModelSpec, tables: list[RouteTable | None], dtype: torch.dtype
) -> list[SpeculativeOutcome]:
    """The same step by each table, against one rank; without a table tokens stay in order."""
    return [_prove(ranks, model, table, dtype) for table in tables]


def _prove(
    ranks: Ranks, model: ModelSpec, table: RouteTable | None, dtype: torch.dtype
) -> SpeculativeOutcome:
    expected, decoder = _decoder(model, dtype), _decoder(model, dtype)
    mesh = Mesh.join(ranks, Layout(tp=ranks.world, ep=ranks.world, zero=0))
    ledgers = spread_experts(decoder, mesh, policy=MixedPrecisionPolicy())
    split_weights(decoder, mesh)
    if table is not None:
        place_by_routes(decoder, mesh, table)
    sharded = ShardedDecoder(decoder, ranks, zero=0, precision="fp32", mesh=mesh)
    tokens, chosen = text(model), list[Tensor]()
    for each in (expected, decoder):
        set_loss_scale(each, 1 / len(tokens))
    reference = expected(tokens, DOCUMENTS, labels_T=tokens) / len(tokens)
    reference.backward()
    watch = [
        module.register_forward_hook(lambda _m, _a, out: chosen.append(out[1].counts_X))
        for module in decoder.modules()
        if isinstance(module, Router)
    ]
    sharded.prepare_micro_batch(last=True)
    loss = decoder(tokens, DOCUMENTS, labels_T=tokens) / len(tokens)
    loss.backward()
    for each in watch:
        each.remove()
    sent = [int(ledger.sent_bytes.sum()) for ledger in ledgers]
    loss_error = abs(float(loss) - float(reference)) / float(reference)
    gradients, weights = [], []
    pairs = list(zip(decoder.parameters(), expected.parameters(), strict=True))
    for mine, whole in pairs:
        gradients.append(_error(_whole(mine.grad), whole.grad))
    with torch.no_grad():
        logits = _error(decoder(tokens, DOCUMENTS), expected(tokens, DOCUMENTS))
        for mine, whole in pairs:
            mine -= 0.5 * mine.grad
            whole -= 0.5 * whole.grad
            weights.append(_error(_whole(mine.detach()), whole.detach()))
    own = rows_of(model.experts, ranks=ranks.world, rank=ranks.rank)
    rows = [int(each.sum()) for each in chosen]
    away = [int(each.sum() - each[own.start : own.stop].sum()) for each in chosen]
    return SpeculativeOutcome(loss_error, max(gradients), max(weights), logits, sent, rows, away)


def refuse(ranks: Ranks, model: ModelSpec, layout: Layout, table: Any, differs: bool) -> str:
    """What is said of a table where rank 1 may have read another."""
    decoder = _decoder(model, torch.float32)
    if differs and ranks.rank == 1:
        table = dataclasses.replace(table, unseen=np.array([1, 2]))
    try:
        place_by_routes(decoder, Mesh.join(ranks, layout), table)
    except LayoutError as error:
        return str(error)
    return ""
