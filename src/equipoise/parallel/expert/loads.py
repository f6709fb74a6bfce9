"""What the routers of all ranks chose in a step, and the balance of the next one.

Why
    A rank counts its own tokens in the layers that it holds; under a pipeline these are some.
    Every layer must be balanced by the counts of all ranks that computed it, and a rank without
    any sparse layer must join the sum all the same.

What it decides
    One table of all sparse layers of the model; a rank has zeros in rows of layers that it does
    not hold. Counts are integers, so one sum over all ranks is exact whatever the layout. Beside
    them stands what schedules of experts did, which one rank of each that share experts adds.

Kept true (tests/multi/parallel/test_pipeline_experts.py)
    Counts, balance and auxiliary loss of stages are those of one rank.
"""

import torch
from torch import Tensor

from equipoise.comm.group import Ranks
from equipoise.nn.decoder import Decoder
from equipoise.nn.moe.balance import balances
from equipoise.parallel.expert.balanced import balanced_exchanges
from equipoise.parallel.expert.planned import PLANNED


def settle_experts(decoder: Decoder, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the counts of all ranks, and balance the next step by them; every rank calls it.

    Args:
        decoder: The whole, or a part of it, sharded or not.
        ranks: All of them.

    Returns:
        Tokens that chose each expert of each sparse layer of the model, int64 [layers, X], those
        without weights last; the
        auxiliary loss, summed over tokens and layers, a float64 scalar; and ``PlannedLoads`` of
        each layer, int64 [layers, PLANNED], zeros where every expert stays on its own rank.
    """
    model = decoder.model
    sparse = [at for at in range(model.layers) if model.is_sparse(at)]
    held = [(row, decoder.layers[at]) for row, at in enumerate(sparse)]
    held = [(row, layer) for row, layer in held if balances(layer)]
    width = model.choices + PLANNED
    table = torch.zeros(len(sparse), width, dtype=torch.int64, device=ranks.device)
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
        for exchange in balanced_exchanges(layer):
            exchange.seen = loads[row, : model.experts].numpy(force=True).copy()
    return loads, penalty, table[:, model.choices :]
