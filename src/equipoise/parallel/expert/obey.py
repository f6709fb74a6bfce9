"""Layers with experts obey the policy of a run.

What it decides
    Which exchange a layer gets, once ``spread_experts`` has given its weights their places.

Kept true (tests/multi/parallel/test_balanced.py, tests/multi/parallel/test_tutel.py)
    A policy that these ranks cannot obey is refused before the first step.
"""

import numpy as np
from torch import nn

from equipoise.balance.expert.price import RowPrices
from equipoise.base.errors import LayoutError
from equipoise.parallel.expert.balanced import BalancedExchange
from equipoise.parallel.expert.exchange import ExpertExchange, sparse_layers
from equipoise.parallel.expert.parted import PartedExchange
from equipoise.parallel.expert.switched import SwitchedExchange
from equipoise.spec.run.layout import ExpertsSpec


def balance_experts(module: nn.Module, wish: ExpertsSpec, *, parts: int = 1) -> None:
    """Let the layers that ``spread_experts`` has spread obey a policy's schedules.

    Args:
        module: Whose weights have their places.
        wish: The policy and its limits.
        parts: In how many rows travel where experts stay on their ranks.

    Raises:
        LayoutError: ranks also share the hidden units of each expert; or the policy does not take
            this number of experts or slots.
    """
    if wish.policy == "fixed":
        for layer in sparse_layers(module) if parts > 1 else ():
            if isinstance(layer.exchange, ExpertExchange) and layer.exchange.split is None:
                layer.exchange = PartedExchange(layer.exchange, parts)
        return
    for layer in sparse_layers(module):
        base = layer.exchange
        if not isinstance(base, ExpertExchange):
            continue
        ffn = layer.experts.gate.weight.shape[1]  # of all ranks: the weight is a DTensor
        row_cost = RowPrices.of_width(wish.least_rows, ffn).row_cost
        if base.split is not None:
            if wish.policy != "tutel":
                raise LayoutError(
                    f'experts.policy = "{wish.policy}" copies whole experts, but etp = '
                    f"{base.split.peers.count} ranks share the hidden units of each. Set "
                    f'layout.etp = 1, or experts.policy to "fixed" or "tutel".'
                )
            layer.exchange = SwitchedExchange(
                base, wish, row_cost=row_cost, split=base.split, ffn=ffn
            )
            continue
        balanced = BalancedExchange(base, wish, row_cost=row_cost)
        balanced.plan(np.zeros((base.peers.count, sum(base.experts)), dtype=np.int64))
        layer.exchange = balanced
