"""A decoder's sizes; nothing here is executable.

Why
    Packing, prices, memory forecasts and the model itself must agree on what the model is.
    They all read this one dataclass.

What it decides
    What counts as a weight. Two shapes are counted and priced but not trained here, and have no
    preset in ``run.toml``: feed-forwards without a gate (GPT-3), and latent attention
    (DeepSeek-V3), whose keys and values come from one narrow vector per token.

Kept true (tests/unit/spec/model/test_presets.py)
    Totals equal the published ones of every family; counts of layers add up.

Sources
    Latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from equipoise.base.errors import SpecError

Balance = Literal["none", "auxiliary", "bias"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's scaling of low rotary frequencies.

    Source: Llama 3.1 config.json, ``rope_scaling`` of type ``llama3``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_tokens: int


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Widths of latent attention: the vectors that queries, keys and values are made from."""

    query: int
    """Width of the vector that all query heads come from; 0 where they come from the input."""
    key_value: int
    """Width of the vector that all keys and values come from."""
    rope: int
    """Width of the rotated part of each query, and of the one shared key; added to
    ``head_width``, which is also the width of values."""


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """Layers in which a query reads some of the tokens before it, not all."""

    tokens: int
    """Most keys that a query reads, itself included."""
    share: float
    """Share of all layers that are like this [0 to 1]."""
    is_chunk: bool = False
    """Whether texts are cut in chunks of this length, and a query reads its own chunk; otherwise it
    reads the last tokens."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a pre-norm decoder with RoPE, grouped-query attention and gated feed-forwards.

    A *sparse* layer sends each token through ``top_k`` of its ``experts`` instead of one
    feed-forward; the weights that a token passes through are *active*.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_width: int
    tied: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Experts of a sparse layer; 0 for a model without."""
    top_k: int = 0
    """Experts that a token passes through."""
    expert_ffn: int = 0
    """Width of one expert; ``ffn`` is the width in dense layers."""
    shared_ffn: int = 0
    """Width of the shared expert, which every token passes through; 0 for none."""
    shared_gate: bool = False
    """Whether the shared expert's output is scaled by a sigmoid of its input."""
    dense_layers: int = 0
    """Number of first layers that are dense."""
    expert_every: int = 1
    """Later layers are sparse if ``layer + 1`` is a multiple of this."""
    expert_groups: int = 0
    """Groups of experts; a router chooses ``kept_groups`` of them first. 0 chooses among all."""
    kept_groups: int = 0
    """Groups that hold all of a token's experts; 0 without groups."""
    norm_top_k: bool = True
    """Whether the weights of a token's experts are scaled to sum to one."""
    balance: Balance = "auxiliary"
    """What keeps the router from sending all tokens to few experts (``nn.moe.balance``)."""
    balance_rate: float = 0.01
    """Weight of the auxiliary loss, or what a step adds to a bias."""
    capacity_factor: float = 0.0
    """Most rows of an expert, as a multiple of its even share of a micro-batch; 0 for no limit."""
    identity_experts: int = 0
    """Experts without weights, among which a router chooses too; they return their input."""
    real_top_k: float = 0.0
    """Experts with weights that a token passes through on average, at which a bias holds it;
    ``top_k`` where there are no identity experts."""
    shortcut: bool = False
    """Whether experts read what attention of their layer reads, so that their rows travel while
    attention and the shared expert are computed."""
    gated: bool = True
    """Whether feed-forwards have a gate (SwiGLU, three products) or not (two products)."""
    latent: LatentSpec | None = None
    """Latent attention; None for separate keys and values."""
    window: WindowSpec | None = None
    """Layers that read a part of the text; None where all read all. Not trained here."""
    has_sinks: bool = False
    """Whether each head has a sink, and attention's output, router and experts have biases. Not
    trained here."""

    def most_nodes(self, nodes: int) -> int:
        """Nodes that a token's experts are on at most, of ``nodes`` that hold equal shares.

        >>> from equipoise.spec.model.presets import PLANNED
        >>> spec = PLANNED["deepseek-v3"]  # 4 of 8 groups
        >>> [spec.most_nodes(nodes) for nodes in (1, 2, 8, 16)]
        [1, 2, 4, 8]
        """
        if not self.expert_groups:
            return nodes
        each = -(-nodes // self.expert_groups)
        return min(nodes, self.kept_groups * each)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        late = layer >= self.dense_layers
        return self.experts > 0 and late and (layer + 1) % self.expert_every == 0

    @property
    def sparse_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.is_sparse(layer) for layer in range(self.layers))

    @property
    def products(self) -> int:
        """Matrix products of a feed-forward: gate, up and down, or up and down."""
        return 3 if self.gated else 2

    @property
    def choices(self) -> int:
        """What a router chooses among: experts, with weights or without."""
        return self.experts + self.identity_experts

    @property
    def mean_top_k(self) -> float:
        """Experts with weights that a token passes through on average.

        >>> import dataclasses
        >>> from equipoise.spec.model.presets import preset
        >>> dataclasses.replace(preset("moe-3m"), identity_experts=8).mean_top_k
        1.0
        """
        if not self.identity_experts:
            return self.top_k
        return self.real_top_k or self.top_k * self.experts / self.choices

    @property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return self.products * self.hidden * self.expert_ffn

    @property
    def score_width(self) -> int:
        """Width of a query and of a key of one head."""
        return self.head_width + (self.latent.rope if self.latent else 0)

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention, without biases and norms."""
        if self.latent is None:
            return self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        query, each = self.latent.query, self.heads * self.score_width
        queries = query * (self.hidden + each) if query else self.hidden * each
        down = self.hidden * (self.latent.key_value + self.latent.rope)
        up = self.latent.key_value * 2 * self.heads * self.head_width
        out = self.heads * self.head_width * self.hidden
        return queries + down + up + out

    def count_layer(self, *, sparse: bool, active: bool) -> int:
        """Weights of one layer that multiply tokens, without biases and norms.

        Args:
            sparse: Whether the layer has experts.
            active: Whether to count only those that one token passes through.
        """
        attention = self.attention_params
        if not sparse:
            return attention + self.products * self.hidden * self.ffn
        router = self.hidden * (self.choices + (1 if self.shared_gate else 0))
        experts = round((self.mean_top_k if active else self.experts) * self.expert_params)
        return attention + router + experts + self.products * self.hidden * self.shared_ffn

    def _count_layers(self, *, active: bool) -> int:
        sparse = self.sparse_layers
        dense = (self.layers - sparse) * self.count_layer(sparse=False, active=active)
        return dense + sparse * self.count_layer(sparse=True, active=active)

    @property
    def _layer_vectors(self) -> int:
        biases = self.head_width * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_width if self.qk_norm else 0)
        latents = self.latent.query + self.latent.key_value if self.latent else 0
        return biases + norms + latents + (self.heads + self.hidden if self.has_sinks else 0)

    def _expert_vectors(self, *, active: bool) -> int:
        """Biases of one sparse layer's router and experts."""
        if not self.has_sinks:
            return 0
        each = (self.products - 1) * self.expert_ffn + self.hidden
        return self.choices + (self.top_k if active else self.experts) * each

    @property
    def matmul_params(self) -> int:
        """Weights that multiply one token: those of layers and head, without the embedding."""
        return self._count_layers(active=True) + self.hidden * self.vocab

    @property
    def layer_matmul_params(self) -> int:
        """Weights of a layer that multiply one token; the mean over layers, rounded down."""
        return self._count_layers(active=True) // self.layers

    @property
    def layer_params(self) -> int:
        """All weights of the largest kind of layer."""
        kinds = {self.is_sparse(layer) for layer in range(self.layers)} or {False}
        return self._layer_vectors + max(
            self.count_layer(sparse=k, active=False) + k * self._expert_vectors(active=False)
            for k in kinds
        )

    @property
    def params(self) -> int:
        """All weights of the model, a tied head counted once."""
        return self._count_all(active=False)

    @property
    def active_params(self) -> int:
        """The weights that one token passes through, and both tables: what "A14B" means."""
        return self._count_all(active=True)

    def _count_all(self, *, active: bool) -> int:
        tables = self.hidden * self.vocab * (1 if self.tied else 2)
        layers = self._count_layers(active=active) + self.layers * self._layer_vectors
        layers += self.sparse_layers * self._expert_vectors(active=active)
        return layers + tables + self.hidden

    @property
    def break_even_tokens(self) -> float:
        """Document length at which causal attention costs as many FLOP as the linear layers.

        Linear layers do ``2 P`` FLOP per token and layer; causal attention over a document of
        ``l`` tokens does ``2 H E l**2``. They meet at ``l = P / (H E)``, with the mean P of the
        layers, and the mean width E of a head's scores and values; windows are left out.

        >>> from equipoise.spec.model.presets import PLANNED
        >>> round(PLANNED["llama3-8b"].break_even_tokens)
        53248
        """
        width = (self.score_width + self.head_width) / 2
        return self._count_layers(active=True) / (self.layers * self.heads * width)

    def scaled(self, *, layers: int | None = None, hidden: int | None = None) -> "ModelSpec":
        """The same shape, smaller: fewer layers, or narrower with every width in proportion.

        Raises:
            SpecError: the width is not a multiple of twice the number of heads.
        """
        changed = self if layers is None else dataclasses.replace(self, layers=layers)
        if hidden is None:
            return changed
        if hidden % (2 * self.heads):
            raise SpecError(
                f"A width of {hidden} does not divide over {self.heads} heads of an even width. "
                f"Nearest that does: {max(1, hidden // (2 * self.heads)) * 2 * self.heads}."
            )
        return dataclasses.replace(
            changed,
            hidden=hidden,
            head_width=hidden // self.heads,
            ffn=_narrow(self.ffn, hidden, self.hidden),
            expert_ffn=_narrow(self.expert_ffn, hidden, self.hidden),
            shared_ffn=_narrow(self.shared_ffn, hidden, self.hidden),
        )


def timed_sizes(model: ModelSpec) -> dict[str, Any]:
    """Sizes of a model by which what was timed of it is known.

    Without those of models that are only forecast: what was timed before there were any keeps its
    name.

    >>> from equipoise.spec.model.presets import preset
    >>> timed_sizes(preset("2m")).keys() & {"hidden", "window", "has_sinks"}
    {'hidden'}
    """
    sizes = {each.name: getattr(model, each.name) for each in dataclasses.fields(model)}
    return {name: size for name, size in sizes.items() if name not in ("window", "has_sinks")}


def _narrow(width: int, hidden: int, before: int) -> int:
    return max(8, width * hidden // before // 8 * 8) if width else 0
