"""Wukong: layers of a factorization machine beside a linear compression, scaled together.

Why
    Deeper layers hold products of more vectors: 2 to the power of the layer's number. One size
    then scales the whole model, where others grow one block and saturate.

Shapes: B samples, V vectors, W width of every embedding, K compressed columns.

Kept true (tests/unit/recsys/models/test_wukong.py)
    The machine's product equals that of all pairs, compressed; with linear MLPs and no norms the
    output of layer l is a polynomial of degree 2 to the power of l.

Sources
    B. Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation",
    arXiv:2403.02545, section 3: FMB, LCB, the residual and the norm behind both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.base.errors import ModelError
from equipoise.recsys.models.vectors import MixVectors, Vectors, make_mlp, require_norm
from equipoise.spec.tables.table import TableSpec


def compress_products(x_BVW: Tensor, y_VK: Tensor) -> Tensor:
    """All pairs' products, compressed to K columns without forming V x V of them.

    ``(X X^T) Y = X (X^T Y)``: V W K multiplications twice, not V^2 (W + K).

    >>> x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> y = torch.tensor([[1.0], [0.5]])
    >>> compress_products(x, y).tolist(), (x @ x.mT @ y).tolist()
    ([[[10.5], [23.5]]], [[[10.5], [23.5]]])
    """
    return x_BVW @ (x_BVW.transpose(1, 2) @ y_VK)


class FactorizationBlock(nn.Module):
    """Compressed products of all pairs, through an MLP, as vectors."""

    def __init__(
        self, vectors: int, out: int, width: int, compressed: int, hidden: Sequence[int], norm: bool
    ) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(vectors, compressed) / vectors**0.5)
        flat = vectors * compressed
        self.norm = nn.LayerNorm(flat) if norm else nn.Identity()
        self.mlp = make_mlp([flat, *hidden, out * width])
        self.width = width

    def forward(self, x_BVW: Tensor) -> Tensor:
        """float32 [B, out, W]."""
        products = compress_products(x_BVW, self.columns).flatten(1)
        mixed: Tensor = self.mlp(self.norm(products))
        vectors_BVW: Tensor = mixed.unflatten(1, (-1, self.width))
        return vectors_BVW


class WukongLayer(nn.Module):
    """A factorization machine and a linear compression side by side, over a shortcut."""

    def __init__(
        self,
        vectors: int,
        width: int,
        *,
        fm_vectors: int,
        linear_vectors: int,
        compressed: int,
        hidden: Sequence[int],
        norm: bool = True,
    ) -> None:
        """Draw the weights; ``norm`` False leaves a polynomial, where ``hidden`` is empty."""
        super().__init__()
        out = fm_vectors + linear_vectors
        self.fm = FactorizationBlock(vectors, fm_vectors, width, compressed, hidden, norm)
        self.linear = MixVectors(vectors, linear_vectors)
        self.shortcut = nn.Identity() if out == vectors else MixVectors(vectors, out)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()

    def forward(self, x_BVW: Tensor) -> Tensor:
        """float32 [B, fm_vectors + linear_vectors, W]."""
        both = torch.cat((self.fm(x_BVW), self.linear(x_BVW)), dim=1)
        out: Tensor = self.norm(both + self.shortcut(x_BVW))
        return out


class Wukong(nn.Module):
    """The dense part of Wukong, on top of pooled tables of one width."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        numbers: int,
        *,
        bottom: Sequence[int] = (32,),
        top: Sequence[int] = (64, 32),
        layers: int = 2,
        fm_vectors: int = 8,
        linear_vectors: int = 8,
        compressed: int = 8,
        hidden: Sequence[int] = (64,),
        seed: int = 0,
    ) -> None:
        """Draw the weights.

        Args:
            tables: All of one width.
            numbers: Real numbers of a sample; 0 for none.
            bottom: Hidden widths of the MLP for numbers.
            top: Hidden widths of the last MLP.
            layers: Layers of interaction.
            fm_vectors: Vectors from each layer's factorization machine.
            linear_vectors: Vectors from its linear compression.
            compressed: Columns to which products are compressed.
            hidden: Hidden widths of the MLP behind them.
            seed: Of the weights.

        Raises:
            ModelError: tables have different widths, or one float; or a layer has one product.
        """
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.vectors = Vectors(tables, numbers, bottom=bottom, model="Wukong")
            width, count = self.vectors.width, self.vectors.count
            require_norm(width, "Wukong")
            out = fm_vectors + linear_vectors
            if min(count, out) * compressed < 2:
                raise ModelError(
                    "Wukong norms the products of its vectors, which leaves nothing of one. Give "
                    "model.compressed of 2 or more."
                )
            self.layers = nn.ModuleList(
                WukongLayer(
                    count if index == 0 else out,
                    width,
                    fm_vectors=fm_vectors,
                    linear_vectors=linear_vectors,
                    compressed=compressed,
                    hidden=hidden,
                )
                for index in range(layers)
            )
            self.top = make_mlp([out * width, *top, 1])

    def forward(self, pooled: Tensor, numbers: Tensor) -> Tensor:
        """Logits float32 [B]; arguments as ``DLRM.forward``."""
        x_BVW = self.vectors(pooled, numbers)
        for layer in self.layers:
            x_BVW = layer(x_BVW)
        logits: Tensor = self.top(x_BVW.flatten(1))
        return logits.squeeze(1)
