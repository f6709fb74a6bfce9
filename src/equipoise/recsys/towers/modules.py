"""What a tower makes of its tables' vectors before they leave its host.

Why
    Features that belong together interact on their host, where links are fast, and what crosses
    to other hosts is less than went in.

What it decides
    ``identity`` passes vectors on. ``linear`` takes linear combinations of them (DLRM's tower), and
    cuts each to fewer floats. ``cross`` lets them interact in a cross layer of low rank first
    (DCN's tower). A module's weights depend on the seed and its tower's number alone, so no layout
    changes them.

Shapes: B samples, F vectors that enter, V that leave, W and N floats of each of them.

Kept true (tests/unit/recsys/towers/test_modules.py)
    A module has as many weights as ``spec.towers.count_weights`` says.

Sources
    L. Luo et al., "Disaggregated Multi-Tower", arXiv:2403.00877, section 3: tower modules.
"""

import torch
from torch import Tensor, nn

from equipoise.recsys.models.dcn import CrossLayer
from equipoise.recsys.models.vectors import MixVectors
from equipoise.spec.towers import TowerSizes


class TowerModule(nn.Module):
    """One tower's module, [B, F, W] to [B, V, N]."""

    def __init__(self, sizes: TowerSizes, features: int) -> None:
        """Draw the weights.

        Args:
            sizes: What kind of module, and what leaves it.
            features: Vectors that enter.
        """
        super().__init__()
        has_cross = sizes.module == "cross"
        flat = features * sizes.entering
        self.cross = CrossLayer(flat, sizes.low_rank) if has_cross else None
        self.mix = MixVectors(features, sizes.vectors) if sizes.vectors else None
        self.cut = nn.Linear(sizes.entering, sizes.width) if sizes.width else None

    def forward(self, x_BFW: Tensor) -> Tensor:
        """float32 [B, V, N]."""
        if self.cross is not None:
            x_BD = x_BFW.flatten(1)
            x_BFW = self.cross(x_BD, x_BD).view_as(x_BFW)
        if self.mix is not None:
            x_BFW = self.mix(x_BFW)
        if self.cut is not None:
            x_BFW = self.cut(x_BFW)
        return x_BFW


def make_module(sizes: TowerSizes, features: int, *, seed: int, tower: int) -> TowerModule:
    """The module of a tower, drawn from the seed and the tower's number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1_000_003 * (tower + 1))
        return TowerModule(sizes, features)
