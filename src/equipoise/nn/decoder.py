"""A Llama-style decoder over packed documents, as single-device code.

What it decides
    Nothing about ranks. A pack that is spread over several arrives as a ``PackAttention``, which
    has the positions of this rank's tokens and attends over all of them; every other layer treats
    each token by itself. Ranks that share weights are ``tensor``: a block computes with its share.

Kept true (tests/unit/nn/test_decoder.py, tests/multi/check/test_check.py)
    Documents do not see each other; however a pack is distributed, loss, logits and gradients
    equal those of one rank.

Shapes: T packed tokens, D model width, H query heads, G key/value heads, E head width; t is this
rank's share of the tokens between blocks, all of them where no ranks share weights.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.base.digest import digest
from equipoise.base.errors import ModelError
from equipoise.nn.attention import Attend, PackAttention, pack_attention
from equipoise.nn.declare import Copied, Placement, Split, local
from equipoise.nn.lora import adapter_of
from equipoise.nn.loss import head_loss
from equipoise.nn.modality.insert import Inserted
from equipoise.nn.moe.layer import MixtureOfExperts, RowsAway
from equipoise.nn.norm import RmsNorm
from equipoise.nn.packed import PackedModel
from equipoise.nn.project import PLAIN, Products, gate_up
from equipoise.nn.recompute import again
from equipoise.nn.rope import rotary_frequencies, rotary_table, rotate
from equipoise.nn.shuffle import PlaceTokens, Shuffle, permute_rows
from equipoise.nn.tensor import Alone, TensorRanks, look_up
from equipoise.spec.model.heads import share_heads
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import LayerRecompute, layer_recompute
from equipoise.spec.run.spec import Recompute


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        query, key = model.heads * model.head_width, model.kv_heads * model.head_width
        self.model = model
        self.head_width = model.head_width
        self.tensor: TensorRanks = Alone()
        self.products = PLAIN
        self.query = nn.Linear(model.hidden, query, bias=model.qkv_bias)
        self.key = nn.Linear(model.hidden, key, bias=model.qkv_bias)
        self.value = nn.Linear(model.hidden, key, bias=model.qkv_bias)
        self.output = nn.Linear(query, model.hidden, bias=False)
        self.query_norm = RmsNorm(model.head_width, model.norm_eps) if model.qk_norm else None
        self.key_norm = RmsNorm(model.head_width, model.norm_eps) if model.qk_norm else None

    def declare(self) -> dict[str, Placement]:
        """Heads are split; a key/value head may be read by several ranks."""
        model, heads = self.model, Split(0, self.model.heads)
        kv_heads = Split(0, model.kv_heads)
        placements: dict[str, Placement] = {"output.weight": Split(1, model.heads)}
        for name, placement in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
            placements |= {f"{name}.weight": placement, f"{name}.bias": placement}
        return placements | {f"{name}.weight": Copied() for name in ("query_norm", "key_norm")}

    def heads(self, x_tD: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, as the attention core takes them."""
        parts = [self.query, self.key, self.value]
        weights = [self._rows(part.weight, part) for part in parts]
        adapters = [adapter_of(part) for part in parts]

        def project(x_RD: Tensor) -> tuple[Tensor, ...]:
            projected = self.products.project(x_RD, *weights)
            if not any(adapters):
                return projected
            return tuple(
                x if adapter is None else x + adapter(x_RD, partial(self._rows, part=part))
                for x, adapter, part in zip(projected, adapters, parts, strict=True)
            )

        columns = sum(map(len, weights))
        projected = self.tensor.enter_through(x_tD, table.shape[1], project, columns)
        if self.query.bias is not None:
            biases = [self._rows(part.bias, part) for part in parts]
            projected = tuple(x + bias for x, bias in zip(projected, biases, strict=True))
        q_THE, k_TGE, v_TGE = (x.unflatten(1, (-1, self.head_width)) for x in projected)
        if self.query_norm is not None and self.key_norm is not None:
            q_THE, k_TGE = self.query_norm(q_THE), self.key_norm(k_TGE)
        return rotate(q_THE, table), rotate(k_TGE, table), v_TGE

    def join(self, residual_tD: Tensor, o_THE: Tensor) -> Tensor:
        """``residual`` plus the output projection of the core's output."""
        o_TD = o_THE.flatten(1)
        adapter = adapter_of(self.output)
        if self.tensor.ranks == 1:
            out_TD = self.products.add_project(residual_tD, o_TD, self.output.weight)
            return out_TD if adapter is None else out_TD + adapter(o_TD)
        weight = local(self.output.weight)

        def project(o_RD: Tensor) -> Tensor:
            (partial_RD,) = self.products.project(o_RD, weight)
            return partial_RD if adapter is None else partial_RD + adapter(o_RD)

        return residual_tD + self.tensor.leave_through(o_TD, project, len(weight))

    def _rows(self, weight: Tensor, part: nn.Linear) -> Tensor:
        """This rank's heads of a weight or bias; if copied, the heads that its queries read."""
        weight, model, ranks = local(weight), self.model, self.tensor.ranks
        if part is self.query or model.kv_heads % ranks == 0:
            return weight
        share = share_heads(model.heads, model.kv_heads, ranks=ranks, rank=self.tensor.rank)
        heads = weight.unflatten(0, (model.kv_heads, self.head_width))
        run = share.kv_run
        own = heads[list(share.kv_heads)] if run is None else heads[run.start : run.stop]
        rows: Tensor = own.flatten(0, 1)
        return rows


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)
        self.products = PLAIN

    def declare(self) -> dict[str, Placement]:
        """Hidden units are split."""
        return {"gate.weight": Split(0), "up.weight": Split(0), "down.weight": Split(1)}

    def forward(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """``residual + swiglu(x)``; a partial sum if this rank has a share of the hidden units."""
        parts = (self.gate, self.up, self.down)
        gate_FD, up_FD, down_DF = (local(part.weight) for part in parts)
        adapters = [adapter_of(part) for part in parts]
        if not any(adapters):
            return self.products.add_swiglu(residual_TD, x_TD, gate_FD, up_FD, down_DF)
        inner = self.products.project(x_TD, gate_FD, up_FD)
        hidden_TF = gate_up(
            *(
                x if adapter is None else x + adapter(x_TD)
                for x, adapter in zip(inner, adapters, strict=False)
            )
        )
        out_TD = self.products.add_project(residual_TD, hidden_TF, down_DF)
        return out_TD if adapters[2] is None else out_TD + adapters[2](hidden_TF)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind its norm, each added to the stream.

    ::

        x -> norm -> heads -> attend -> join (+ x) -> norm -> feed-forward (+) ->
             ------[begin]    [core]    ----------------------------[end]

    With a shortcut, experts read what attention reads, after the same norm, and their rows travel
    meanwhile; the shared expert alone reads what attention has added to::

        x -> norm -> heads -> attend -> join (+ x) -> norm -> shared expert (+) -> (+)
               |---- rows leave ............. arrive, experts, outputs leave ... arrive ^
    """

    def __init__(self, model: ModelSpec, *, sparse: bool = False) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(model.hidden, model.norm_eps)
        self.attention = Attention(model)
        self.feed_forward_norm = RmsNorm(model.hidden, model.norm_eps)
        self.feed_forward = MixtureOfExperts(model) if sparse else FeedForward(model)
        self.has_shortcut = sparse and model.shortcut
        self.tensor: TensorRanks = Alone()
        self.recompute: LayerRecompute = "none"

    def declare(self) -> dict[str, Placement]:
        """Norms are whole."""
        return {f"{name}.weight": Copied() for name in ("attention_norm", "feed_forward_norm")}

    def begin(self, x_tD: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before the core: queries, keys and values."""
        return self.attention.heads(self.attention_norm(x_tD), table)

    def _attend(self, x_tD: Tensor, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        return self.attention.join(x_tD, attend(q, k, v))

    def _feed(self, x_tD: Tensor, table: Tensor) -> Tensor:
        normed_tD = self.feed_forward_norm(x_tD)
        if self.tensor.ranks == 1 or not isinstance(self.feed_forward, FeedForward):
            out: Tensor = self.feed_forward(x_tD, normed_tD)  # experts take tokens where they are
            return out
        feed = self.feed_forward

        def partial(normed_RD: Tensor) -> Tensor:
            out_RD: Tensor = feed(normed_RD.new_zeros(1, 1), normed_RD)
            return out_RD

        return x_tD + self.tensor.through(normed_tD, table.shape[1], partial)

    def end(self, x_tD: Tensor, o_THE: Tensor, table: Tensor) -> Tensor:
        """What comes after the core: its output joined to the stream, and the feed-forward."""
        away = self._leave(x_tD)
        return self._meet(self.attention.join(x_tD, o_THE), table, away)

    def _leave(self, x_tD: Tensor, normed_tD: Tensor | None = None) -> RowsAway | None:
        """Let rows of experts leave before attention, if there is a shortcut."""
        if not self.has_shortcut or not isinstance(self.feed_forward, MixtureOfExperts):
            return None
        normed_tD = self.attention_norm(x_tD) if normed_tD is None else normed_tD
        return self.feed_forward.start(normed_tD, travels=True)

    def _meet(self, x_tD: Tensor, table: Tensor, away: RowsAway | None) -> Tensor:
        """The feed-forward; ``away`` are rows that have left for its experts."""
        if away is None or not isinstance(self.feed_forward, MixtureOfExperts):
            return self._feed(x_tD, table)
        return self.feed_forward.finish(x_tD, self.feed_forward_norm(x_tD), away)

    def _run(self, x_tD: Tensor, table: Tensor, attend: Attend) -> Tensor:
        normed_tD = self.attention_norm(x_tD)
        away = self._leave(x_tD, normed_tD)
        o_THE = attend(*self.attention.heads(normed_tD, table))
        return self._meet(self.attention.join(x_tD, o_THE), table, away)

    def forward(self, x_tD: Tensor, table: Tensor, attend: Attend) -> Tensor:
        """One layer; ``recompute`` says what it keeps for the backward."""
        if self.recompute == "full":
            return again(self._run, x_tD, table, attend)
        if self.recompute == "attention":
            normed_tD = self.attention_norm(x_tD)
            away = self._leave(x_tD, normed_tD)
            heads = self.attention.heads(normed_tD, table)
            return self._meet(again(self._attend, x_tD, *heads, attend), table, away)
        if self.recompute == "selective":
            heads = again(self.begin, x_tD, table)
            return again(self.end, x_tD, attend(*heads), table)
        return self._run(x_tD, table, attend)


def _require_built(model: ModelSpec) -> None:
    kind = "" if model.gated else "Feed-forwards without a gate"
    kind = kind if model.latent is None else "Latent attention"
    if kind:
        raise ModelError(
            f"{kind} can be simulated and planned, but not trained yet. Use a decoder with gated "
            f"feed-forwards and grouped-query attention, as in equipoise config."
        )


class Decoder(PackedModel):
    """The whole model: tokens in, summed loss or logits out."""

    def __init__(self, model: ModelSpec) -> None:
        """Build the modules, with torch's initial weights.

        Raises:
            ModelError: the model can be priced but not trained.
        """
        super().__init__()
        _require_built(model)
        self.model = model
        self.tensor: TensorRanks = Alone()
        self.place_tokens: PlaceTokens | None = None
        """Which of the ranks that share weights keeps which tokens; in their order unless set."""
        self.shuffle: Shuffle | None = None
        """What the last forward did, by which ``logits`` puts its rows back."""
        self.embed = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(model, sparse=model.is_sparse(layer)) for layer in range(model.layers)
        )
        self.norm = RmsNorm(model.hidden, model.norm_eps)
        self.head = None if model.tied else nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(
        self,
        tokens_T: Tensor,
        pack: Sequence[int] | PackAttention,
        *,
        labels_T: Tensor | None = None,
        inserted: Inserted | None = None,
    ) -> Tensor:
        """Summed cross-entropy, or logits: see ``PackedModel``.

        ``inserted`` has rows of images and sound, in place of some of the tokens.
        """
        self.shuffle = None
        if self.place_tokens is not None and inserted is None:
            if not isinstance(pack, PackAttention):
                pack = pack_attention(pack, tokens_T.device)
            self.shuffle = Shuffle.of(self.place_tokens(tokens_T, pack.positions_T))
            pack, order_T = self.shuffle.pack(pack), self.shuffle.order_T
            tokens_T = tokens_T[order_T]
            labels_T = None if labels_T is None else labels_T[order_T]
        x_tD = self.begin(tokens_T, inserted)
        return self.finish(self.run_layers(x_tD, pack, self.layers), labels_T)

    @property
    def stack(self) -> Sequence[nn.Module]:
        """Its layers, in order."""
        return list(self.layers)

    def set_recompute(self, setting: Recompute) -> None:
        """Set what every layer makes again in the backward instead of keeping it."""
        for at, layer in enumerate(self.layers):
            if isinstance(layer, DecoderLayer):
                layer.recompute = layer_recompute(setting, at)

    def set_products(self, products: Products) -> None:
        """Set how attention projections and dense feed-forwards multiply."""
        for module in self.modules():
            if isinstance(module, Attention | FeedForward):
                module.products = products

    def declare(self) -> dict[str, Placement]:
        """The vocabulary is split."""
        return {"embed.weight": Split(0), "head.weight": Split(0), "norm.weight": Copied()}

    def begin(self, tokens_T: Tensor, inserted: Inserted | None = None) -> Tensor:
        """Embed the tokens: hidden states [t, D] for the first layer."""
        x_tD = look_up(tokens_T, local(self.embed.weight), self.model.vocab, self.tensor)
        return x_tD if inserted is None else inserted.into(x_tD)

    def run_layers(
        self, x_tD: Tensor, pack: Sequence[int] | PackAttention, layers: Iterable[nn.Module]
    ) -> Tensor:
        """Run some of the layers, in order, on hidden states [t, D]."""
        if not isinstance(pack, PackAttention):
            pack = pack_attention(pack, x_tD.device)
        frequency = rotary_frequencies(self.model, device=x_tD.device)
        table = rotary_table(frequency, pack.positions_T, x_tD.dtype)
        for layer in layers:
            x_tD = layer(x_tD, table, pack.attend)
        return x_tD

    def finish(self, x_tD: Tensor, labels_T: Tensor | None) -> Tensor:
        """Norm and head after the last layer: summed cross-entropy, or logits without labels."""
        x_tD = self.norm(x_tD)
        if labels_T is None:
            return self.logits(x_tD)
        x_TD = self.tensor.enter(x_tD, len(labels_T))
        words = self.model.vocab
        return head_loss(x_TD, self._head(), labels_T, words=words, tensor=self.tensor)

    def logits(self, x_tD: Tensor) -> Tensor:
        """Logits [T, V] of the last norm's output; not differentiable if the head is split."""
        tokens = int(self.tensor.sum_(torch.tensor([len(x_tD)], device=x_tD.device)))
        x_TD = self.tensor.enter(x_tD, tokens)
        if self.shuffle is not None:
            x_TD = permute_rows(x_TD, self.shuffle.back_T)
        return self.tensor.join_columns(x_TD @ self._head().t(), self.model.vocab)

    def _head(self) -> Tensor:
        """This rank's rows of the head."""
        return local(self.embed.weight if self.head is None else self.head.weight)


def initialize(decoder: Decoder, seed: int) -> None:
    """Draw every weight from its own generator, named by the seed and the weight's name.

    A weight's values do not depend on the order, number or layout of the others. Matrices
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
