"""DLRM: embeddings, a bottom MLP for numbers, products of all pairs, a top MLP.

Shapes: B samples, F features (tables), W width of every embedding, N numbers.

Kept true (tests/unit/recsys/test_dlrm.py)
    Products are those of each pair once; tables of another width are refused.

Sources
    M. Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems", arXiv:1906.00091.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.base.errors import ModelError
from equipoise.spec.tables.table import TableSpec


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
        widths = {table.width for table in tables}
        if len(widths) != 1:
            raise ModelError(
                f"DLRM multiplies embeddings of one width, and its tables have "
                f"{', '.join(map(str, sorted(widths))) or 'none'}. Give all tables one width."
            )
        self.features, self.width = len(tables), widths.pop()
        vectors = self.features + (numbers > 0)
        pairs = vectors * (vectors - 1) // 2
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottom = _mlp([numbers, *bottom, self.width]) if numbers else None
            self.top = _mlp([pairs + vectors * self.width, *top, 1])
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("_pairs", first * vectors + second, persistent=False)

    def forward(self, pooled: Tensor, numbers: Tensor) -> Tensor:
        """Logits.

        Args:
            pooled: The tables' output, float32 [B, F x W].
            numbers: float32 [B, N].

        Returns:
            float32 [B].
        """
        vectors_BFW = pooled.view(-1, self.features, self.width)
        if self.bottom is not None:
            own = torch.relu(self.bottom(numbers)).unsqueeze(1)
            vectors_BFW = torch.cat((own, vectors_BFW), dim=1)
        products = torch.bmm(vectors_BFW, vectors_BFW.transpose(1, 2)).flatten(1)
        pairs = products[:, self.get_buffer("_pairs")]
        logits: Tensor = self.top(torch.cat((pairs, vectors_BFW.flatten(1)), dim=1))
        return logits.squeeze(1)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (into, out) in enumerate(itertools.pairwise(widths)):
        if index:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(into, out))
    return nn.Sequential(*layers)
