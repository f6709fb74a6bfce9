"""Functions of ranks in tests of ZeRO's exchanges."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from equipoise.comm.group import Ranks
from equipoise.comm.meter import WaitMeter
from equipoise.nn.decoder import Decoder, initialize
from equipoise.parallel.zero.exchange import ExchangeGather, ExchangeReduce
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.presets import ModelSpec
from support.ranks.composed_ranks import held_bytes


def exchange(ranks: Ranks, length: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Gather and reduce twice our way and once gloo's, by operation and dtype."""
    group = dist.group.WORLD
    assert group is not None
    results = {}
    generator = torch.Generator().manual_seed(ranks.rank)
    for dtype in (torch.float32, torch.bfloat16):
        mine = torch.randn(length, generator=generator).to(dtype)
        whole = torch.randn(length * ranks.world, generator=generator).to(dtype)
        gathered = [_gather(mine, ranks, in_place=each) for each in (True, False)]
        expected = torch.empty_like(whole)
        dist.all_gather_single(expected, mine)
        results[f"gathered {dtype}"] = (*gathered, expected)
        if dtype == torch.float32:
            reduced = [torch.empty_like(mine) for _ in range(3)]
            for out in reduced[:2]:
                ExchangeReduce(WaitMeter())(out, whole.clone(), group, dist.ReduceOp.SUM)
            dist.reduce_scatter_single(reduced[2], whole.clone())
            results[f"reduced {dtype}"] = (reduced[0], reduced[1], reduced[2])
    return results


def _gather(mine: Tensor, ranks: Ranks, *, in_place: bool) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    comm = ExchangeGather(WaitMeter())
    out = comm.allocate((len(mine) * ranks.world,), dtype=mine.dtype, device=mine.device)
    sent = mine
    if in_place:  # as fully_shard does
        sent = out.narrow(0, ranks.rank * len(mine), len(mine)).copy_(mine)
    comm(out, sent, group)
    return out


def reduce_wrongly(ranks: Ranks) -> str:
    """The error of a reduction by mean."""
    group = dist.group.WORLD
    assert group is not None
    try:
        ExchangeReduce(WaitMeter())(
            torch.empty(1), torch.empty(ranks.world), group, dist.ReduceOp.AVG
        )
    except ValueError as error:
        return str(error)
    return ""


def step_of_three(
    ranks: Ranks, model: ModelSpec, precision: str, small_bytes: int
) -> tuple[list[tuple[int, int, int]], list[int], dict[str, Tensor]]:
    """A step under ZeRO 3: bytes held after each micro-batch, collectives, and gradients.

    Held are bytes of whole weights, of whole gradients and of split ones.
    """
    decoder = Decoder(model)
    initialize(decoder, 0)
    sharded = ShardedDecoder(decoder, ranks, zero=3, precision=precision, small_bytes=small_bytes)
    held, calls, exchange = [], [], dist.all_to_all_single

    def count(*arguments: Any, **named: Any) -> dist.Work | None:
        calls[-1] += 1
        work: dist.Work | None = exchange(*arguments, **named)
        return work

    dist.all_to_all_single = count
    try:
        for at in range(3):
            tokens = torch.arange(at, at + 20 + 7 * ranks.rank)  # unlike on each rank
            sharded.prepare_micro_batch(last=at == 2)
            calls.append(0)
            decoder(tokens, (len(tokens),), labels_T=tokens.roll(-1)).backward()
            held.append(held_bytes(decoder))
    finally:
        dist.all_to_all_single = exchange
    return held, calls, {name: p.grad.full_tensor() for name, p in decoder.named_parameters()}


def kept_layers(ranks: Ranks, model: ModelSpec, precision: str) -> list[bool]:
    """Whether each layer of a decoder under ZeRO 3 stays whole for the step."""
    decoder = Decoder(model)
    sharded = ShardedDecoder(decoder, ranks, zero=3, precision=precision)
    sharded.prepare_micro_batch(last=False)
    return [not _frees(layer) for layer in decoder.layers]


def _frees(layer: nn.Module) -> bool:
    assert isinstance(layer, FSDPModule)
    group = layer._get_fsdp_state()._fsdp_param_group
    assert group is not None
    return group.reshard_after_backward
