"""A decoder's sizes, and nothing that can be executed.

Why
    Packing, prices, memory forecasts and the model itself must agree on what the model is.
    They all read this one dataclass.

Sources
    Llama 3: arXiv:2407.21783, table 3. Llama 3.1 rope scaling: the published config.json of
    each model. Qwen 2, 2.5 and 3: the published config.json of each model. Mixtral:
    arXiv:2401.04088, table 1. SmolLM2: its config.json. GPT-like small presets are ours.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest

Balance = Literal["none", "auxiliary", "bias"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of slow rotary frequencies.

    Source: Llama 3.1 config.json, ``rope_scaling`` of type ``llama3``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a pre-norm decoder with RoPE, grouped-query attention and SwiGLU.

    A *sparse* layer sends each token through ``top_k`` of its ``experts``, not through one
    feed-forward; what one token passes through is *active*.
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
    """Of a sparse layer; 0 for a model without."""
    top_k: int = 0
    """Experts that a token passes through."""
    expert_ffn: int = 0
    """Width of one expert; ``ffn`` is that of layers that are not sparse."""
    shared_ffn: int = 0
    """Width of the expert that every token passes through; 0 for none."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a sigmoid of its input."""
    dense_layers: int = 0
    """So many first layers are not sparse."""
    expert_every: int = 1
    """Of the others only every so many-th is: where ``layer + 1`` is a multiple of it."""
    norm_top_k: bool = True
    """The weights of a token's experts are scaled to sum to one."""
    balance: Balance = "auxiliary"
    """How the router is kept from sending all tokens to few experts (``nn.moe_balance``)."""
    balance_rate: float = 0.01
    """Weight of the auxiliary loss, or what a step adds to a bias."""
    capacity_factor: float = 0.0
    """An expert takes so many times its even share of a micro-batch; 0 takes all."""

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        late = layer >= self.dense_layers
        return self.experts > 0 and late and (layer + 1) % self.expert_every == 0

    @property
    def sparse_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.is_sparse(layer) for layer in range(self.layers))

    @property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.expert_ffn

    def count_layer(self, *, sparse: bool, active: bool) -> int:
        """Weights of one layer that multiply tokens; biases and norms are left out.

        Args:
            sparse: A layer with experts, not one without.
            active: Only those that one token passes through.
        """
        attention = self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        if not sparse:
            return attention + 3 * self.hidden * self.ffn
        router = self.hidden * (self.experts + (1 if self.shared_gate else 0))
        experts = (self.top_k if active else self.experts) * self.expert_params
        return attention + router + experts + 3 * self.hidden * self.shared_ffn

    def _count_layers(self, *, active: bool) -> int:
        sparse = self.sparse_layers
        dense = (self.layers - sparse) * self.count_layer(sparse=False, active=active)
        return dense + sparse * self.count_layer(sparse=True, active=active)

    @property
    def _layer_vectors(self) -> int:
        biases = self.head_width * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        return biases + 2 * self.hidden + (2 * self.head_width if self.qk_norm else 0)

    @property
    def matmul_params(self) -> int:
        """Weights that multiply one token: the layers' and the head's, no embedding look-up."""
        return self._count_layers(active=True) + self.hidden * self.vocab

    @property
    def layer_matmul_params(self) -> int:
        """Weights of a layer that multiply one token, in the mean of all layers, rounded down."""
        return self._count_layers(active=True) // self.layers

    @property
    def layer_params(self) -> int:
        """Every weight of the largest kind of layer."""
        kinds = {self.is_sparse(layer) for layer in range(self.layers)} or {False}
        return self._layer_vectors + max(self.count_layer(sparse=k, active=False) for k in kinds)

    @property
    def params(self) -> int:
        """Every weight of the model, a tied head counted once."""
        return self._count_all(active=False)

    @property
    def active_params(self) -> int:
        """The weights that one token passes through, and both tables: what "A14B" means."""
        return self._count_all(active=True)

    def _count_all(self, *, active: bool) -> int:
        tables = self.hidden * self.vocab * (1 if self.tied else 2)
        layers = self._count_layers(active=active) + self.layers * self._layer_vectors
        return layers + tables + self.hidden

    @property
    def break_even_tokens(self) -> float:
        """Document length at which causal attention costs as many FLOP as the linear layers.

        Linear layers do ``2 P`` FLOP a token and a layer; causal attention over a document
        of ``l`` tokens does ``2 H E l**2`` in all. They meet at ``l = P / (H E)``, with the
        mean P of the layers.
        """
        return self._count_layers(active=True) / (self.layers * self.heads * self.head_width)

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


def _narrow(width: int, hidden: int, before: int) -> int:
    return max(8, width * hidden // before // 8 * 8) if width else 0


def _llama3(
    layers: int, hidden: int, heads: int, ffn: int, *, head_width: int = 128, tied: bool = False
) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128_256,
        head_width=head_width,
        tied=tied,
        rope_theta=500_000.0,
        norm_eps=1e-5,
    )


def _llama31(base: ModelSpec, factor: float = 8.0) -> ModelSpec:
    return dataclasses.replace(base, rope_scaling=RopeScaling(factor, 1.0, 4.0, 8192))


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, vocab: int, tied: bool
) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        head_width=hidden // heads,
        tied=tied,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qkv_bias=True,
    )


def _small(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, tied: bool
) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        head_width=hidden // heads,
        tied=tied,
    )


PRESETS: dict[str, ModelSpec] = {
    "2m": _small(4, 128, 4, 2, 352, 4096, tied=False),
    "7m": _small(6, 256, 4, 2, 704, 4096, tied=False),
    "30m": _small(8, 512, 8, 4, 1408, 8192, tied=False),
    "120m": _small(12, 768, 12, 4, 2048, 32_768, tied=True),
    "moe-3m": dataclasses.replace(
        _small(4, 128, 4, 2, 176, 4096, tied=False), experts=8, top_k=2, expert_ffn=176
    ),
    "smollm2-135m": dataclasses.replace(
        _small(30, 576, 9, 3, 1536, 49_152, tied=True), rope_theta=100_000.0
    ),
    "llama3.2-1b": _llama31(_llama3(16, 2048, 32, 8192, head_width=64, tied=True), 32.0),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    "llama3.1-8b": _llama31(_llama3(32, 4096, 32, 14_336)),
    "llama3.1-70b": _llama31(_llama3(80, 8192, 64, 28_672)),
    "llama3.1-405b": _llama31(_llama3(126, 16_384, 128, 53_248)),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18_944, vocab=152_064, tied=False),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29_568, vocab=152_064, tied=False),
    "qwen3-8b": dataclasses.replace(
        _qwen25(36, 4096, 32, 8, 12_288, vocab=151_936, tied=False), qkv_bias=False, qk_norm=True
    ),
    "mixtral-8x7b": dataclasses.replace(
        _small(32, 4096, 32, 8, 14_336, 32_000, tied=False),
        rope_theta=1_000_000.0,
        experts=8,
        top_k=2,
        expert_ffn=14_336,
    ),
    "qwen2-57b-a14b": dataclasses.replace(
        _qwen25(28, 3584, 28, 4, 18_944, vocab=151_936, tied=False),
        experts=64,
        top_k=8,
        expert_ffn=2560,
        shared_ffn=20_480,
        shared_gate=True,
        norm_top_k=False,
    ),
}


def preset(name: str) -> ModelSpec:
    """The ModelSpec of a published or built-in model.

    Raises:
        SpecError: no such preset; names the nearest.

    >>> preset("llama3-405b").params
    405853388800
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise SpecError(
            f'No model preset is called "{name}". Nearest: {nearest(name, PRESETS)}. '
            f"All: {', '.join(PRESETS)}."
        ) from None
