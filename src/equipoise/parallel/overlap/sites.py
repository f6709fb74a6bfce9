"""How often sites of a step ran in parts, and in how many.

Kept true (tests/multi/parallel/test_overlap.py)
    Every forward pass of a site is counted once.
"""

from collections import Counter

from equipoise.nn.decoder import Decoder
from equipoise.parallel.expert.balanced import BalancedExchange
from equipoise.parallel.expert.exchange import sparse_layers
from equipoise.parallel.expert.parted import PartedExchange
from equipoise.parallel.tensor.shard import TensorGroup


def take_parted(decoder: Decoder) -> dict[int, int]:
    """Forward passes by their number of parts, since this was last called.

    Those of blocks that tensor-parallel ranks share, and of experts on several ranks where
    rows travel in parts; empty where there is neither.
    """
    sites = [
        layer.exchange.sites
        for layer in sparse_layers(decoder)
        if isinstance(layer.exchange, PartedExchange | BalancedExchange)
    ]
    if isinstance(decoder.tensor, TensorGroup):
        sites.append(decoder.tensor.sites)
    ran: Counter[int] = Counter()
    for each in sites:
        ran.update(each.ran)
        each.ran.clear()
    return dict(sorted(ran.items()))
