"""What every dense part begins and ends with: a vector for each table, and MLPs.

Shapes: B samples, V vectors (the numbers', then one for each table), W width of each.

Kept true (tests/unit/recsys/models/test_dlrm.py)
    Tables of another width are refused by the model's name.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.base.errors import ModelError
from equipoise.spec.tables.table import TableSpec


class Vectors(nn.Module):
    """The vectors of a sample: its numbers through an MLP, then its tables' rows."""

    def __init__(
        self, tables: Sequence[TableSpec], numbers: int, *, bottom: Sequence[int], model: str
    ) -> None:
        """Draw the weights of the MLP.

        Args:
            tables: All of one width.
            numbers: Real numbers of a sample; 0 for none.
            bottom: Hidden widths of their MLP.
            model: Named where tables are refused.

        Raises:
            ModelError: tables have different widths.
        """
        super().__init__()
        widths = {table.width for table in tables}
        if len(widths) != 1:
            raise ModelError(
                f"{model} multiplies embeddings of one width, and its tables have "
                f"{', '.join(map(str, sorted(widths))) or 'none'}. Give all tables one width."
            )
        self.features, self.width = len(tables), widths.pop()
        self.count = self.features + (numbers > 0)
        self.mlp = make_mlp([numbers, *bottom, self.width]) if numbers else None

    def forward(self, pooled: Tensor, numbers: Tensor) -> Tensor:
        """Vectors, float32 [B, V, W].

        Args:
            pooled: The tables' output, float32 [B, tables x W].
            numbers: float32 [B, numbers].
        """
        vectors_BVW = pooled.view(-1, self.features, self.width)
        if self.mlp is None:
            return vectors_BVW
        own = torch.relu(self.mlp(numbers)).unsqueeze(1)
        return torch.cat((own, vectors_BVW), dim=1)


def require_norm(width: int, model: str) -> None:
    """Refuse vectors of which a layer norm would leave nothing.

    Raises:
        ModelError: they have one float.
    """
    if width < 2:
        raise ModelError(
            f"{model} norms each vector, which leaves nothing of one float. Give model.width, or "
            "model.tower_width, of 2 or more."
        )


def make_mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for index, (into, out) in enumerate(itertools.pairwise(widths)):
        if index:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(into, out))
    return nn.Sequential(*layers)


class MixVectors(nn.Module):
    """Linear combinations of vectors: [B, V, W] to [B, out, W]."""

    def __init__(self, vectors: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(vectors, out, bias=False)

    def forward(self, vectors_BVW: Tensor) -> Tensor:
        """float32 [B, out, W]."""
        mixed: Tensor = self.linear(vectors_BVW.transpose(1, 2))
        return mixed.transpose(1, 2)
