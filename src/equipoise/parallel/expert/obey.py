"""Layers with experts obey the policy of a run.

What it decides
    Which exchange a layer gets, once ``spread_experts`` has given its weights their places.

Kept true (tests/multi/parallel/test_balanced.py, tests/multi/parallel/test_tutel.py)
    A policy that these ranks cannot obey is refused before the first step.
"""

from pathlib import Path

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from equipoise.balance.expert.policies import SPECULATIVE, require_balanced
from equipoise.balance.expert.price import RowPrices
from equipoise.base.errors import LayoutError
from equipoise.comm.mesh import Mesh
from equipoise.parallel.expert.balanced import BalancedExchange
from equipoise.parallel.expert.exchange import ExpertExchange, sparse_layers
from equipoise.parallel.expert.parted import PartedExchange
from equipoise.parallel.expert.switched import SwitchedExchange
from equipoise.parallel.expert.tiers import ExpertTiers
from equipoise.parallel.overlap.parts import PartedSites, Parts
from equipoise.spec.run.layout import ExpertsSpec


def make_tiers(
    module: nn.Module,
    mesh: Mesh,
    wish: ExpertsSpec,
    *,
    policy: MixedPrecisionPolicy,
    folder: Path | None,
) -> ExpertTiers | None:
    """What holds experts in a file, where a run has memory for a part of them alone.

    Args:
        module: Whose layers ``spread_experts`` gives to it.
        mesh: Groups of the layout.
        wish: How much memory.
        policy: Of mixed precision.
        folder: For the file; a temporary one unless given.

    Raises:
        LayoutError: the layout or the device is not proven with it.
    """
    layers, layout = sparse_layers(module), mesh.layout
    if not wish.memory_mib or not layers:
        return None
    device = mesh.ranks.device.type
    if layout.zero != 3 or max(layout.pp, layout.etp, layout.replicas) > 1 or device != "cpu":
        raise LayoutError(
            f"experts.memory_mib = {wish.memory_mib:g} is proven on CPU ranks with zero = 3, "
            f"pp = etp = replicas = 1; these are {device} ranks with zero = {layout.zero}, "
            f"pp = {layout.pp}, etp = {layout.etp}, replicas = {layout.replicas}. Set "
            f"experts.memory_mib = 0."
        )
    tiers = ExpertTiers(
        folder,
        int(wish.memory_mib * 2**20),
        layers=len(layers),
        peers=mesh.peers("edp"),
        width=policy.param_dtype,
    )
    module.register_forward_pre_hook(lambda *_: tiers.begin())
    return tiers


def balance_experts(module: nn.Module, wish: ExpertsSpec, *, parts: Parts = 1) -> None:
    """Let the layers that ``spread_experts`` has spread obey a policy's schedules.

    Args:
        module: Whose weights have their places.
        wish: The policy and its limits.
        parts: In how many rows travel; ranks that share hidden units need ``tutel`` for that.

    Raises:
        LayoutError: ranks also share the hidden units of each expert; or the policy does not take
            this number of experts or slots.
    """
    if wish.policy in ("fixed", SPECULATIVE):
        for layer in sparse_layers(module) if parts != 1 else ():
            if isinstance(layer.exchange, ExpertExchange) and layer.exchange.split is None:
                ffn = layer.experts.gate.weight.shape[1]
                layer.exchange = PartedExchange(layer.exchange, PartedSites(parts), ffn)
        return
    for layer in sparse_layers(module):
        base = layer.exchange
        if not isinstance(base, ExpertExchange):
            continue
        ffn = layer.experts.gate.weight.shape[1]  # of all ranks: the weight is a DTensor
        row_cost = RowPrices.of_width(wish.least_rows, ffn).row_cost
        etp = 1 if base.split is None else base.split.peers.count
        require_balanced(wish, sum(base.experts), ep=base.peers.count, etp=etp, tp=1, pp=1)
        if base.split is not None:
            layer.exchange = SwitchedExchange(
                base,
                wish,
                row_cost=row_cost,
                split=base.split,
                ffn=ffn,
                sites=PartedSites(parts),
            )
            continue
        layer.exchange = BalancedExchange(
            base, wish, row_cost=row_cost, ffn=ffn, sites=PartedSites(parts)
        )
