"""A decoder for answering alone: weights laid out for the products, and few calls for each layer.

Why
    A generated token is a row or a few: reading the weights is the work. In the layout of the
    processor's matrix units they are read in half the time (bf16); where it has none, in those of
    ``products``. Three products of one input are one. Between products,
    calls are what costs: ``rows`` has one where the modules have many.

What it decides
    Which layers: dense ones on CPU, without adapters. Others stay as they are. Layers are taken out
    of the decoder one by one, so that weights are not in memory twice, unless there is room for
    that and it is faster (``nn.device.halves``). Ranks that share weights through a file have them
    in the plain layout.

Kept true (tests/unit/serve/engine/test_fused.py)
    Logits are the decoder's up to rounding, in every family; the decoder's own layers are gone.
"""

from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.base.errors import ModelError
from equipoise.nn.attention import Attend
from equipoise.nn.decoder import Attention, Decoder, DecoderLayer, FeedForward
from equipoise.nn.device.halves import widens
from equipoise.nn.lora import adapter_of
from equipoise.nn.norm import RmsNorm
from equipoise.serve.engine.bits import bits_of
from equipoise.serve.engine.jit import use_threads, use_threads_for
from equipoise.serve.engine.products.pairs import PairWeight, multiplies_by_pairs
from equipoise.serve.engine.products.words import WordWeight, multiplies_words
from equipoise.serve.engine.rows import gate_rows, head_rows, norm_rows

_PACKED_ROWS = 32
"""Rows that packed weights are laid out for; measured, others are as fast with them."""


Packs = Literal["now", "by each", "never"]
"""When weights are laid out: when they are taken, by each process in a copy of its own, never."""

_WIDE = 4
"""Outputs over inputs from which packing gains in fp32: measured, with 8 rows."""


_WIDENED_ROWS = {"packed": 128, "plain": 4}
"""Rows from which a product is computed in fp32 on a processor that is faster with it, by what its
weights are otherwise: measured, they are widened anew in each product."""


class _Product:
    """``x @ weight.T + bias``, plain or packed."""

    def __init__(self, *parts: nn.Linear | nn.Embedding) -> None:
        given = [part.bias for part in parts if isinstance(part, nn.Linear)]
        biases = [bias.detach() for bias in given if bias is not None]
        self._weight = torch.cat([part.weight.detach() for part in parts])
        self._bias = torch.cat(biases) if biases else None
        self._ops: Any = None
        self._panels: PairWeight | WordWeight | None = None
        is_slow = widens(self._weight) and not _gains(self._weight)
        self._plain = self._weight if is_slow else None
        self._widened_rows = _WIDENED_ROWS["plain"]

    def pack(self, *, keeps_plain: bool) -> None:
        """Lay the weight out for the processor's matrix units, where that is faster.

        Args:
            keeps_plain: Keep it as it was as well, where products of many rows are faster with it.
        """
        if self._ops is None and self._panels is None and _gains(self._weight):
            self._plain = self._weight if keeps_plain and widens(self._weight) else None
            self._widened_rows = _WIDENED_ROWS["packed"]
            if (panels := self._laid_out(self._weight)) is not None:
                self._panels, self._weight = panels, self._weight.new_empty(0)
                return
            self._ops = torch.ops.mkldnn
            self._weight = self._ops._reorder_linear_weight(self._weight, _PACKED_ROWS)

    def _laid_out(self, weight: Tensor) -> PairWeight | WordWeight | None:
        """The weight in panels, where this processor's products are faster so."""
        if multiplies_by_pairs(weight):
            return PairWeight(weight)
        return WordWeight(weight) if multiplies_words(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [rows, outputs] of ``x`` [rows, inputs]."""
        if self._plain is not None and len(x) >= self._widened_rows:
            return _widened(x, self._plain, self._bias).to(x.dtype)
        if self._panels is not None:
            return self._panels.multiply(x, self._bias)
        if self._ops is None:
            return nn.functional.linear(x, self._weight, self._bias)
        out: Tensor = self._ops._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` plus the product, which has no bias."""
        if self._plain is not None and len(x) >= self._widened_rows:
            return _widened(x, self._plain, None).add_(residual).to(x.dtype)
        if self._panels is not None:
            return self._panels.multiply(x, residual)
        if self._ops is None:
            return torch.addmm(residual, x, self._weight.t())
        out: Tensor = self._ops._linear_pointwise.binary(x, residual, self._weight, None, "add")
        return out


class _GateProduct(_Product):
    """``silu(x @ gate.T) * (x @ up.T)``; neither has a bias."""

    def _laid_out(self, weight: Tensor) -> PairWeight | WordWeight | None:
        if multiplies_by_pairs(weight):
            return PairWeight(weight, is_gate=True)
        return super()._laid_out(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._panels, PairWeight):
            return self._panels.gate(x)
        both = super().__call__(x)
        hidden = both.new_empty(len(both), both.shape[1] // 2)
        use_threads_for(len(both))
        gate_rows(bits_of(both), bits_of(hidden))
        return hidden


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product in fp32."""
    return nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())


class _Norm:
    """A norm of rows."""

    def __init__(self, norm: RmsNorm) -> None:
        self._weight, self._eps = norm.weight.detach().float().numpy(), np.float32(norm.eps)

    def __call__(self, x_tD: Tensor) -> Tensor:
        out_tD = torch.empty_like(x_tD)
        use_threads_for(len(x_tD))
        norm_rows(bits_of(x_tD), self._weight, self._eps, bits_of(out_tD))
        return out_tD


class _Heads:
    """Queries, keys and values out of their joint product."""

    def __init__(self, attention: Attention) -> None:
        model, self._width = attention.model, attention.head_width
        self._heads = model.heads, model.kv_heads
        norms = attention.query_norm, attention.key_norm
        self._has_norm = norms[0] is not None
        self._eps = np.float32(model.norm_eps)
        self._norms = np.ones((2, self._width), dtype=np.float32)
        for row, norm in zip(self._norms, norms, strict=True):
            if norm is not None:
                row[:] = norm.weight.detach().float().numpy()

    def __call__(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self._heads
        q, k, v = (x.new_empty(len(x), h, self._width) for h in (heads, kv_heads, kv_heads))
        given = bits_of(x), bits_of(table.contiguous()), self._has_norm, self._norms, self._eps
        use_threads_for(len(x))
        head_rows(*given, bits_of(q), bits_of(k), bits_of(v))
        return q, k, v


class FusedLayer(nn.Module):
    """A dense layer, as ``DecoderLayer``: the same parts, the same results up to rounding."""

    def __init__(self, layer: DecoderLayer) -> None:
        """Take a layer's weights; it is dense and has no adapters."""
        super().__init__()
        attention, feed_forward = layer.attention, cast("FeedForward", layer.feed_forward)
        heads = attention.query, attention.key, attention.value
        self._norms = _Norm(layer.attention_norm), _Norm(layer.feed_forward_norm)
        self._heads = _Heads(attention)
        self._qkv = _Product(*heads)
        self._output = _Product(attention.output)
        self._gate = _GateProduct(feed_forward.gate, feed_forward.up)
        self._down = _Product(feed_forward.down)

    def pack(self, *, keeps_plain: bool) -> None:
        """Lay its weights out for the processor's matrix units, each as ``_Product.pack``."""
        for product in (self._qkv, self._output, self._gate, self._down):
            product.pack(keeps_plain=keeps_plain)

    def begin(self, x_tD: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before the core: queries, keys and values."""
        return self._heads(self._qkv(self._norms[0](x_tD)), table)

    def end(self, x_tD: Tensor, o_tHE: Tensor, table: Tensor) -> Tensor:
        """What comes after the core: its output joined to the stream, and the feed-forward."""
        del table  # experts would want it
        x_tD = self._output.add(x_tD, o_tHE.flatten(1))
        return self._down.add(x_tD, self._gate(self._norms[1](x_tD)))

    def forward(self, x_tD: Tensor, table: Tensor, attend: Attend) -> Tensor:
        """One layer."""
        return self.end(x_tD, attend(*self.begin(x_tD, table)), table)


class FusedDecoder(nn.Module):
    """A decoder's layers, fused where they can be; it answers and does not train."""

    def __init__(
        self, decoder: Decoder, packs: Packs = "now", *, keeps_plain: bool = False
    ) -> None:
        """Take a decoder's weights; its layers are gone afterwards.

        Args:
            decoder: On the CPU, in fp32 or bf16.
            packs: When weights are laid out anew: processes share those that are not.
            keeps_plain: Keep layers' weights in the plain layout as well, where products of many
                rows are faster with it: there is memory for both.
        """
        super().__init__()
        self._packs, self._keeps_plain = packs, keeps_plain
        self.model, self.embed = decoder.model, decoder.embed
        self.norm = _Norm(cast("RmsNorm", decoder.norm))
        self._head = _Product(decoder.embed if decoder.head is None else decoder.head)
        self.layers = nn.ModuleList()
        for at, layer in enumerate(decoder.layers):
            fused = _fuse(layer)
            decoder.layers[at] = nn.Identity()  # its weights need not be there twice
            if packs == "now" and isinstance(fused, FusedLayer):
                fused.pack(keeps_plain=keeps_plain)
            self.layers.append(fused)
        if packs == "now":
            self._head.pack(keeps_plain=False)

    def pack(self) -> None:
        """Lay weights out in this process, if each is to do that."""
        if self._packs != "by each":
            return
        for layer in self.layers:
            if isinstance(layer, FusedLayer):
                layer.pack(keeps_plain=self._keeps_plain)
        self._head.pack(keeps_plain=False)

    def begin(self, tokens_t: Tensor) -> Tensor:
        """Embed the tokens: hidden states [t, D]."""
        use_threads(torch.get_num_threads())
        return nn.functional.embedding(tokens_t, self.embed.weight)

    def finish(self, x_tD: Tensor, labels_t: Tensor | None) -> Tensor:
        """Norm and head after the last layer: logits [t, V]; there are no labels here."""
        if labels_t is not None:
            raise ModelError("A decoder that answers computes no loss. Give it to train instead.")
        return self._head(self.norm(x_tD))


def _gains(weight: Tensor) -> bool:
    """Whether packing makes products faster: always in bf16, in fp32 if there are many outputs."""
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.shape[0] >= _WIDE * weight.shape[1]


def _fuse(layer: nn.Module) -> nn.Module:
    """A layer fused if it is dense and has no adapters, else as it is."""
    if not isinstance(layer, DecoderLayer) or not isinstance(layer.feed_forward, FeedForward):
        return layer
    parts = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    return layer if any(map(adapter_of, parts)) else FusedLayer(layer)


ServedDecoder = Decoder | FusedDecoder
"""What an engine computes with."""


def decoder_layers(decoder: ServedDecoder) -> list[DecoderLayer | FusedLayer]:
    """A decoder's layers, in order."""
    return [layer for layer in decoder.layers if isinstance(layer, DecoderLayer | FusedLayer)]
