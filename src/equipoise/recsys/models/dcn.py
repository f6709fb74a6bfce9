"""DCN-V2: cross layers of low rank over all vectors side by side, then an MLP.

Shapes: B samples, V vectors, W width of every embedding, D = V x W.

Kept true (tests/unit/recsys/models/test_dcn.py)
    A layer is ``x0 * (U V x + b) + x``; after L of them the output has degree L + 1 in the input.

Sources
    R. Wang et al., "DCN V2: Improved Deep & Cross Network", arXiv:2008.13535, equations 1 and 3;
    cross layers below the MLP, as in MLPerf's DLRM-DCNv2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.recsys.models.vectors import Vectors, make_mlp
from equipoise.spec.tables.table import TableSpec


class CrossLayer(nn.Module):
    """One cross layer, whose matrix is a product of two thin ones."""

    def __init__(self, size: int, low_rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, low_rank, bias=False)
        self.up = nn.Linear(low_rank, size)

    def forward(self, first_BD: Tensor, x_BD: Tensor) -> Tensor:
        """``first * (U V x + b) + x``, float32 [B, D]."""
        crossed: Tensor = first_BD * self.up(self.down(x_BD)) + x_BD
        return crossed


class DCN(nn.Module):
    """The dense part of DCN-V2, on top of pooled tables of one width."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        numbers: int,
        *,
        bottom: Sequence[int] = (32,),
        top: Sequence[int] = (64, 32),
        layers: int = 2,
        low_rank: int = 16,
        seed: int = 0,
    ) -> None:
        """Draw the weights.

        Args:
            tables: All of one width.
            numbers: Real numbers of a sample; 0 for none.
            bottom: Hidden widths of the MLP for numbers.
            top: Hidden widths of the last MLP.
            layers: Cross layers.
            low_rank: Rank of each one's matrix.
            seed: Of the weights.

        Raises:
            ModelError: tables have different widths.
        """
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.vectors = Vectors(tables, numbers, bottom=bottom, model="DCN")
            flat = self.vectors.count * self.vectors.width
            self.crosses = nn.ModuleList(CrossLayer(flat, low_rank) for _ in range(layers))
            self.top = make_mlp([flat, *top, 1])

    def forward(self, pooled: Tensor, numbers: Tensor) -> Tensor:
        """Logits float32 [B]; arguments as ``DLRM.forward``."""
        first_BD = x_BD = self.vectors(pooled, numbers).flatten(1)
        for cross in self.crosses:
            x_BD = cross(first_BD, x_BD)
        logits: Tensor = self.top(x_BD)
        return logits.squeeze(1)
