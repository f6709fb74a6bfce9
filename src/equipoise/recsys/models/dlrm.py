"""DLRM: embeddings, a bottom MLP for numbers, products of all pairs, a top MLP.

Shapes: B samples, V vectors, W width of every embedding.

Kept true (tests/unit/recsys/models/test_dlrm.py)
    Products are those of each pair once; tables of another width are refused.

Sources
    M. Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems", arXiv:1906.00091.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.recsys.models.vectors import Vectors, make_mlp
from equipoise.spec.tables.table import TableSpec


class PairProducts(nn.Module):
    """The product of each pair of vectors, once: [B, V, W] to [B, V (V - 1) / 2]."""

    def __init__(self, vectors: int) -> None:
        super().__init__()
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("_pairs", first * vectors + second, persistent=False)
        self.count = vectors * (vectors - 1) // 2

    def forward(self, vectors_BVW: Tensor) -> Tensor:
        """float32 [B, pairs]."""
        products = torch.bmm(vectors_BVW, vectors_BVW.transpose(1, 2)).flatten(1)
        return products[:, self.get_buffer("_pairs")]


class DLRM(nn.Module):
    """The dense part of DLRM, on top of pooled tables of one width."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        numbers: int,
        *,
        bottom: Sequence[int] = (32,),
        top: Sequence[int] = (64, 32),
        seed: int = 0,
    ) -> None:
        """Draw the weights of both MLPs.

        Args:
            tables: All of one width.
            numbers: Real numbers of a sample; 0 for none.
            bottom: Hidden widths of the MLP for numbers.
            top: Hidden widths of the last MLP.
            seed: Of the weights.

        Raises:
            ModelError: tables have different widths.
        """
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.vectors = Vectors(tables, numbers, bottom=bottom, model="DLRM")
            self.products = PairProducts(self.vectors.count)
            flat = self.vectors.count * self.vectors.width
            self.top = make_mlp([self.products.count + flat, *top, 1])

    def forward(self, pooled: Tensor, numbers: Tensor) -> Tensor:
        """Logits.

        Args:
            pooled: The tables' output, float32 [B, tables x W].
            numbers: float32 [B, numbers].

        Returns:
            float32 [B].
        """
        vectors_BVW = self.vectors(pooled, numbers)
        pairs = self.products(vectors_BVW)
        logits: Tensor = self.top(torch.cat((pairs, vectors_BVW.flatten(1)), dim=1))
        return logits.squeeze(1)
