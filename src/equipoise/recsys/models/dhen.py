"""DHEN: layers of several interaction modules, whose outputs form a hierarchical ensemble.

Why
    No interaction module is the best on all data. A layer of different ones learns what each is
    good for, and the next layer mixes what they found.

Shapes: B samples, V vectors, W width of every embedding.

Kept true (tests/unit/recsys/models/test_dhen.py)
    A layer is ``norm(ensemble(modules) + shortcut)``; concat divides its vectors over modules, a
    weighted ensemble begins as their mean.

Sources
    B. Zhang et al., "DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through
    Rate Prediction", arXiv:2203.11014, section 3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.base.errors import ModelError
from equipoise.recsys.models.dcn import CrossLayer
from equipoise.recsys.models.dlrm import PairProducts
from equipoise.recsys.models.vectors import MixVectors, Vectors, make_mlp, require_norm
from equipoise.spec.architectures import DhenModule, Ensemble
from equipoise.spec.tables.table import TableSpec


class DotModule(nn.Module):
    """DLRM's interaction: products of all pairs, through a linear layer, as vectors."""

    def __init__(self, vectors: int, out: int, width: int) -> None:
        super().__init__()
        self.products = PairProducts(vectors)
        self.linear = nn.Linear(self.products.count + vectors * width, out * width)
        self.width = width

    def forward(self, x_BVW: Tensor) -> Tensor:
        """float32 [B, out, W]."""
        both = torch.cat((self.products(x_BVW), x_BVW.flatten(1)), dim=1)
        mixed: Tensor = self.linear(both)
        vectors_BVW: Tensor = mixed.unflatten(1, (-1, self.width))
        return vectors_BVW


class CrossModule(nn.Module):
    """A cross layer over all vectors side by side."""

    def __init__(self, vectors: int, out: int, width: int, low_rank: int) -> None:
        super().__init__()
        self.cross = CrossLayer(vectors * width, low_rank)
        self.mix = MixVectors(vectors, out)

    def forward(self, x_BVW: Tensor) -> Tensor:
        """float32 [B, out, W]."""
        x_BD = x_BVW.flatten(1)
        mixed: Tensor = self.mix(self.cross(x_BD, x_BD).view_as(x_BVW))
        return mixed


class AttentionModule(nn.Module):
    """Self-attention of a head among the vectors."""

    def __init__(self, vectors: int, out: int, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = MixVectors(vectors, out)

    def forward(self, x_BVW: Tensor) -> Tensor:
        """float32 [B, out, W]."""
        q_BVW, k_BVW, v_BVW = self.qkv(x_BVW).chunk(3, dim=2)
        scores = q_BVW @ k_BVW.transpose(1, 2) * x_BVW.shape[2] ** -0.5
        mixed: Tensor = self.mix(scores.softmax(dim=2) @ v_BVW)
        return mixed


class ConvolutionModule(nn.Module):
    """A 3 x 3 convolution over the vectors as a picture."""

    def __init__(self, vectors: int, out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3, padding=1, bias=False)  # a norm removes it
        self.mix = MixVectors(vectors, out)

    def forward(self, x_BVW: Tensor) -> Tensor:
        """float32 [B, out, W]."""
        mixed: Tensor = self.mix(self.convolution(x_BVW.unsqueeze(1)).squeeze(1))
        return mixed


def _make_module(name: DhenModule, vectors: int, out: int, width: int, low_rank: int) -> nn.Module:
    match name:
        case "dot":
            return DotModule(vectors, out, width)
        case "cross":
            return CrossModule(vectors, out, width, low_rank)
        case "attention":
            return AttentionModule(vectors, out, width)
        case "linear":
            return MixVectors(vectors, out)
        case "convolution":
            return ConvolutionModule(vectors, out)


class DhenLayer(nn.Module):
    """Several modules over the same vectors, put together over a shortcut."""

    def __init__(
        self,
        vectors: int,
        width: int,
        *,
        out: int,
        modules: Sequence[DhenModule],
        ensemble: Ensemble,
        low_rank: int,
    ) -> None:
        super().__init__()
        count = len(modules)
        parts = [(at + 1) * out // count - at * out // count for at in range(count)]
        if ensemble != "concat":
            parts = [out] * count
        self.parts = nn.ModuleList(
            _make_module(name, vectors, part, width, low_rank)
            for name, part in zip(modules, parts, strict=True)
        )
        self.ensemble = ensemble
        is_weighted = ensemble == "weighted"
        self.weights = nn.Parameter(torch.zeros(count)) if is_weighted else None
        self.shortcut = nn.Identity() if out == vectors else MixVectors(vectors, out)
        self.norm = nn.LayerNorm(width)

    def forward(self, x_BVW: Tensor) -> Tensor:
        """float32 [B, out, W]."""
        outs = [part(x_BVW) for part in self.parts]
        if self.ensemble == "concat":
            mixed = torch.cat(outs, dim=1)
        elif self.weights is None:
            mixed = torch.stack(outs).sum(dim=0)
        else:
            mixed = (torch.stack(outs) * self.weights.softmax(0).view(-1, 1, 1, 1)).sum(dim=0)
        out: Tensor = self.norm(mixed + self.shortcut(x_BVW))
        return out


class DHEN(nn.Module):
    """The dense part of DHEN, on top of pooled tables of one width."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        numbers: int,
        *,
        bottom: Sequence[int] = (32,),
        top: Sequence[int] = (64, 32),
        layers: int = 2,
        modules: Sequence[DhenModule] = ("dot", "linear"),
        ensemble: Ensemble = "concat",
        vectors: int = 8,
        low_rank: int = 16,
        seed: int = 0,
    ) -> None:
        """Draw the weights.

        Args:
            tables: All of one width.
            numbers: Real numbers of a sample; 0 for none.
            bottom: Hidden widths of the MLP for numbers.
            top: Hidden widths of the last MLP.
            layers: Layers of interaction.
            modules: What each mixes, at least one.
            ensemble: How it puts their vectors together.
            vectors: How many vectors it passes on.
            low_rank: Of the cross module's matrix.
            seed: Of the weights.

        Raises:
            ModelError: no module, too few vectors for a concatenation, or tables of different
                widths or of one float.
        """
        super().__init__()
        if not modules:
            raise ModelError(
                'model.modules is empty, so a layer of DHEN has nothing to mix. Name one: "dot".'
            )
        if ensemble == "concat" and vectors < len(modules):
            raise ModelError(
                f"model.vectors = {vectors} leaves none to some of {len(modules)} modules. Give "
                f'{len(modules)} or more, or set model.ensemble to "sum".'
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.vectors = Vectors(tables, numbers, bottom=bottom, model="DHEN")
            width, count = self.vectors.width, self.vectors.count
            require_norm(width, "DHEN")
            self.layers = nn.ModuleList(
                DhenLayer(
                    count if index == 0 else vectors,
                    width,
                    out=vectors,
                    modules=modules,
                    ensemble=ensemble,
                    low_rank=low_rank,
                )
                for index in range(layers)
            )
            self.top = make_mlp([vectors * width, *top, 1])

    def forward(self, pooled: Tensor, numbers: Tensor) -> Tensor:
        """Logits float32 [B]; arguments as ``DLRM.forward``."""
        x_BVW = self.vectors(pooled, numbers)
        for layer in self.layers:
            x_BVW = layer(x_BVW)
        logits: Tensor = self.top(x_BVW.flatten(1))
        return logits.squeeze(1)
