"""What the routers of all ranks chose in a step, and the balance of the next one.

Why
    A rank counts its own tokens in the layers that it holds; under a pipeline these are some.
    Every layer must be balanced by the counts of all ranks that computed it, and a rank without
    any sparse layer must join the sum all the same.

What it decides
    One table of all sparse layers of the model; a rank has zeros in rows of layers that it does
    not hold. Counts are integers, so one sum over all ranks is exact whatever the layout. Beside
    them stands what schedules of experts did, which one rank of each that share experts adds.
    Policies plan the next step by the same table, which a checkpoint holds for a run that resumes.

Kept true (tests/multi/parallel/test_pipeline_experts.py, tests/multi/parallel/test_expert_life.py)
    Counts, balance and auxiliary loss of stages are those of one rank; a resumed run plans as one
    that was never interrupted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.base.arrays import Ints
from equipoise.comm.group import Ranks
from equipoise.nn.decoder import Decoder
from equipoise.nn.moe.balance import balances
from equipoise.parallel.expert.balanced import BalancedExchange, balanced_exchanges
from equipoise.parallel.expert.buffers import TierCounts
from equipoise.parallel.expert.exchange import ExpertExchange, Travelled, sparse_layers
from equipoise.parallel.expert.parted import PartedExchange
from equipoise.parallel.expert.planned import PLANNED
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """Choices of all ranks' routers in a step."""

    loads: list[list[int]]
    """Tokens that chose each expert, by sparse layer."""
    balance_loss: float
    """Auxiliary loss for each label."""
    planned: list[list[int]]
    """``PlannedLoads`` by sparse layer."""
    travelled: Travelled | None
    """What rows took on this rank, if the model has a shortcut."""
    file: TierCounts | None = None
    """What experts in a file took on this rank, if there are any."""


def step_loads(decoder: nn.Module, ranks: Ranks, *, step: int, labels: int) -> ExpertLoads | None:
    """Sum what all ranks' routers chose, by which they are balanced in the next step.

    Args:
        decoder: The whole, or a part of it, sharded or not.
        ranks: All of them; each calls this.
        step: The number of the step that has ended, from 1.
        labels: What its loss was divided by.

    Returns:
        None of a model without experts.
    """
    if not isinstance(decoder, Decoder) or not decoder.model.experts:
        return None
    loads, penalty, planned = settle_experts(decoder, ranks, step=step)
    return ExpertLoads(
        loads.tolist(),
        float(penalty) / max(1, labels),
        planned.tolist(),
        take_travelled(decoder) if decoder.model.shortcut else None,
    )


def settle_experts(decoder: Decoder, ranks: Ranks, *, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the counts of all ranks, and balance the next step by them; every rank calls it.

    Args:
        decoder: The whole, or a part of it, sharded or not.
        ranks: All of them.
        step: The number of the step that has ended, from 1.

    Returns:
        Tokens that chose each expert of each sparse layer of the model, int64 [layers, X], those
        without weights last; the
        auxiliary loss, summed over tokens and layers, a float64 scalar; and ``PlannedLoads`` of
        each layer, int64 [layers, PLANNED], zeros where every expert stays on its own rank.
    """
    model, held = decoder.model, list(_held_layers(decoder))
    width = model.choices + PLANNED
    table = torch.zeros(len(_sparse(model)), width, dtype=torch.int64, device=ranks.device)
    penalty = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for row, layer in held:
        (each,) = balances(layer)
        table[row, : model.choices] = each.loads_X
        penalty += each.penalty
        for exchange in balanced_exchanges(layer):
            planned = torch.tensor(exchange.take(), device=ranks.device)
            table[row, model.choices :] = planned * (exchange.base.peers.rank == 0)
    ranks.sum_(table)
    ranks.sum_(penalty)
    loads = table[:, : model.choices].contiguous()
    for row, layer in held:
        balances(layer)[0].settle(loads[row])
    if balanced_exchanges(decoder):  # others need not wait for the counts
        remember_loads(decoder, loads.numpy(force=True), step=step)
    return loads, penalty, table[:, model.choices :]


def take_travelled(decoder: Decoder) -> Travelled:
    """What rows of this rank's layers took in the step that has ended."""
    taken = Travelled()
    for layer in sparse_layers(decoder):
        exchange = layer.exchange
        base = (
            exchange.base if isinstance(exchange, BalancedExchange | PartedExchange) else exchange
        )
        if isinstance(base, ExpertExchange):
            taken.beside_s += base.travelled.beside_s
            taken.waited_s += base.travelled.waited_s
            base.travelled.beside_s = base.travelled.waited_s = 0.0
    return taken


def remember_loads(decoder: Decoder, loads: Ints | None, *, step: int) -> None:
    """Let policies plan as after this step.

    Args:
        decoder: The whole, or a part of it.
        loads: Tokens that chose each expert of each sparse layer of the model in that step, int64
            [layers, X]; None where nobody knows.
        step: Its number, from 1.
    """
    for row, layer in _held_layers(decoder):
        for exchange in balanced_exchanges(layer):
            exchange.step = step
            exchange.seen = None if loads is None else loads[row, : decoder.model.experts].copy()


def _sparse(model: ModelSpec) -> list[int]:
    return [at for at in range(model.layers) if model.is_sparse(at)]


def _held_layers(decoder: Decoder) -> Iterator[tuple[int, nn.Module]]:
    """The sparse layers that this rank has, each with its number among those of the model."""
    for row, at in enumerate(_sparse(decoder.model)):
        if balances(decoder.layers[at]):
            yield row, decoder.layers[at]
