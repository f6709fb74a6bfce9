"""A Llama-style decoder over packed documents, as single-device code.

What it decides
    Nothing about ranks. A pack whose tokens lie on several is a ``PackAttention`` that has their
    positions and attends over all of them; every other layer treats each token by itself.

Kept true (tests/unit/nn/test_decoder.py, tests/multi/test_check.py)
    Documents do not see each other; however a pack is shared out, loss, logits and gradients
    are those of one rank.

Shapes: T packed tokens, D model width, H query heads, G key/value heads, E head width.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.base.digest import digest
from equipoise.nn.attention import Attend, PackAttention, pack_attention
from equipoise.nn.loss import head_loss
from equipoise.nn.norm import RmsNorm
from equipoise.nn.project import add_project, add_swiglu, project
from equipoise.nn.rope import rotary_frequencies, rotary_table, rotate
from equipoise.spec.model import ModelSpec


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        query, key = model.heads * model.head_width, model.kv_heads * model.head_width
        self.head_width = model.head_width
        self.query = nn.Linear(model.hidden, query, bias=model.qkv_bias)
        self.key = nn.Linear(model.hidden, key, bias=model.qkv_bias)
        self.value = nn.Linear(model.hidden, key, bias=model.qkv_bias)
        self.output = nn.Linear(query, model.hidden, bias=False)
        self.query_norm = RmsNorm(model.head_width, model.norm_eps) if model.qk_norm else None
        self.key_norm = RmsNorm(model.head_width, model.norm_eps) if model.qk_norm else None

    def forward(self, residual_TD: Tensor, x_TD: Tensor, table: Tensor, attend: Attend) -> Tensor:
        """``residual + attention(x)`` inside each document."""
        parts = [self.query, self.key, self.value]
        projected = project(x_TD, *(part.weight for part in parts))
        if self.query.bias is not None:
            projected = tuple(x + part.bias for x, part in zip(projected, parts, strict=True))
        q_THE, k_TGE, v_TGE = (x.unflatten(1, (-1, self.head_width)) for x in projected)
        if self.query_norm is not None and self.key_norm is not None:
            q_THE, k_TGE = self.query_norm(q_THE), self.key_norm(k_TGE)
        q_THE, k_TGE = rotate(q_THE, table), rotate(k_TGE, table)
        o_THE = attend(q_THE, k_TGE, v_TGE)
        return add_project(residual_TD, o_THE.flatten(1), self.output.weight)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """``residual + swiglu(x)``."""
        return add_swiglu(residual_TD, x_TD, self.gate.weight, self.up.weight, self.down.weight)


def set_recompute(decoder: "Decoder", recompute: bool) -> None:
    """Make every layer keep its input alone for the backward, or all that it needs."""
    for layer in decoder.layers:
        if isinstance(layer, DecoderLayer):
            layer.recompute = recompute


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind its norm, each added to the stream."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(model.hidden, model.norm_eps)
        self.attention = Attention(model)
        self.feed_forward_norm = RmsNorm(model.hidden, model.norm_eps)
        self.feed_forward = FeedForward(model)
        self.recompute = False

    def _run(self, x_TD: Tensor, table: Tensor, attend: Attend) -> Tensor:
        x_TD = self.attention(x_TD, self.attention_norm(x_TD), table, attend)
        out: Tensor = self.feed_forward(x_TD, self.feed_forward_norm(x_TD))
        return out

    def forward(self, x_TD: Tensor, table: Tensor, attend: Attend) -> Tensor:
        """One layer; with ``recompute`` only its input is kept for the backward."""
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(
                self._run,
                x_TD,
                table,
                attend,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            return out
        return self._run(x_TD, table, attend)


class Decoder(nn.Module):
    """The whole model: tokens in, summed loss or logits out."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self.embed = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(DecoderLayer(model) for _ in range(model.layers))
        self.norm = RmsNorm(model.hidden, model.norm_eps)
        self.head = None if model.tied else nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(
        self,
        tokens_T: Tensor,
        pack: Sequence[int] | PackAttention,
        *,
        labels_T: Tensor | None = None,
    ) -> Tensor:
        """Summed cross-entropy against ``labels_T``, or the logits [T, V] without labels.

        Args:
            tokens_T: Packed token ids, int64 [T]; T may be 0.
            pack: Length of each document in the pack [tokens], where positions restart; or
                where these tokens stand and how they attend, if that is known elsewhere.
            labels_T: Next token of each token, ``loss.IGNORED`` where there is none.
        """
        x_TD = self.run_layers(self.embed(tokens_T), pack, self.layers)
        return self.finish(x_TD, labels_T)

    def run_layers(
        self, x_TD: Tensor, pack: Sequence[int] | PackAttention, layers: Iterable[nn.Module]
    ) -> Tensor:
        """Some of the layers, in order, on hidden states [T, D]."""
        if not isinstance(pack, PackAttention):
            pack = pack_attention(pack, x_TD.device)
        frequency = rotary_frequencies(self.model, device=x_TD.device)
        table = rotary_table(frequency, pack.positions_T, x_TD.dtype)
        for layer in layers:
            x_TD = layer(x_TD, table, pack.attend)
        return x_TD

    def finish(self, x_TD: Tensor, labels_T: Tensor | None) -> Tensor:
        """What comes after the last layer: summed cross-entropy, or logits without labels."""
        x_TD = self.norm(x_TD)
        head_VD: Tensor = self.embed.weight if self.head is None else self.head.weight
        if labels_T is None:
            logits_TV: Tensor = x_TD @ head_VD.t()
            return logits_TV
        return head_loss(x_TD, head_VD, labels_T)


def initialize(decoder: Decoder, seed: int) -> None:
    """Draw every weight from its own generator, named by the seed and the weight's name.

    No weight's values depend on the order, the number or the layout of the others. Matrices
    are normal with deviation 0.02; those that write to the residual stream are divided by
    ``sqrt(2 layers)`` (GPT-2's rule); norms are one, biases zero.
    """
    residual_scale = (2 * decoder.model.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator().manual_seed(int(digest([seed, name])[:15], 16))
            scale = residual_scale if name.endswith(("output.weight", "down.weight")) else 1.0
            values = torch.empty(parameter.shape, dtype=torch.float32)
            parameter.copy_(values.normal_(0.0, 0.02 * scale, generator=generator))
