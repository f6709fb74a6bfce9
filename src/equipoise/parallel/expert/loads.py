"""What the routers of all ranks chose in a step, and the balance of the next one.

Why
    A rank counts its own tokens in the layers that it holds; under a pipeline these are some.
    Every layer must be balanced by the counts of all ranks that computed it, and a rank without
    any sparse layer must join the sum all the same.

What it decides
    One table of all sparse layers of the model; a rank has zeros in rows of layers that it does
    not hold. Counts are integers, so one sum over all ranks is exact whatever the layout.

Kept true (tests/multi/parallel/test_pipeline_experts.py)
    Counts, balance and auxiliary loss of stages are those of one rank.
"""

import torch
from torch import Tensor

from equipoise.comm.group import Ranks
from equipoise.nn.decoder import Decoder
from equipoise.nn.moe.balance import balances


def settle_experts(decoder: Decoder, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Sum the counts of all ranks, and balance the next step by them; every rank calls it.

    Args:
        decoder: The whole, or a part of it, sharded or not.
        ranks: All of them.

    Returns:
        Tokens that chose each expert of each sparse layer of the model, int64 [layers, X]; and
        the auxiliary loss, summed over tokens and layers, a float64 scalar.
    """
    model = decoder.model
    sparse = [at for at in range(model.layers) if model.is_sparse(at)]
    rows = [(row, balances(decoder.layers[at])) for row, at in enumerate(sparse)]
    held = [(row, mine[0]) for row, mine in rows if mine]
    loads = torch.zeros(len(sparse), model.experts, dtype=torch.int64, device=ranks.device)
    penalty = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for row, each in held:
        loads[row] = each.loads_X
        penalty += each.penalty
    ranks.sum_(loads)
    ranks.sum_(penalty)
    for row, each in held:
        each.settle(loads[row])
    return loads, penalty
